"""Connect ``rlhf-mcore rollouts`` to the fleet of a running job, by a socket in Linux's abstract namespace, for the same user only."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.fleet import Fleet

_MAX_BYTES = 2**20  # maximum size of a message
_TIMEOUT_S = 60.0  # for an answer; the fleet may first check whether Ray's head is lost


@contextmanager
def listening(fleet: Fleet, directory: Path) -> Iterator[None]:
    """Answer commands about the engines of the run in ``directory`` while the block runs."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(_name(directory))
    server.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:  # closed
                return
            with connection, suppress(OSError, ValueError):
                connection.settimeout(_TIMEOUT_S)
                if _user_of(connection) == os.getuid():
                    connection.sendall(json.dumps(_answer(fleet, json.loads(_line(connection)))).encode() + b"\n")

    threading.Thread(target=serve, name="rollouts", daemon=True).start()
    try:
        yield
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # else the thread would keep waiting
        server.close()


def ask(directory: Path, command: str, **arguments: Any) -> list[dict[str, Any]]:
    """Send a command to the running job in ``directory``, and return the state of its engines afterwards.

    The commands are list, add (``number``), drain and remove (both with ``name``).

    Raises:
        ConfigError: no job with disaggregated engines runs there on this machine, or it rejects the command.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(_name(directory))
            if _user_of(connection) != os.getuid():
                raise ConnectionRefusedError
            connection.sendall(json.dumps({"command": command, **arguments}).encode() + b"\n")
            answer = json.loads(_line(connection))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{directory}: no job with engines of its own (rollout.placement=disaggregated) answers for this run; it must run on "
                "this machine, that of its first rank, and under this user, and have begun to start its engines"
            ) from error
    if "error" in answer:
        raise ConfigError(answer["error"])
    return list(answer["engines"])


def _answer(fleet: Fleet, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        if asked["command"] == "add":
            fleet.add(int(asked["number"]))
        elif asked["command"] == "drain":
            fleet.drain(asked["name"])
        elif asked["command"] == "remove":
            fleet.remove(asked["name"])
        return {"engines": [asdict(status) for status in fleet.status()]}
    except Exception as error:
        return {"error": str(error)}


def _name(directory: Path) -> str:
    return f"\0rlhf-mcore-rollouts-{hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=16).hexdigest()}"


def _user_of(connection: socket.socket) -> int:
    """Return the user id of the other end, as the kernel reports it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def _line(connection: socket.socket) -> bytes:
    return connection.makefile("rb").readline(_MAX_BYTES)
