"""Processes that hold only the weights of an engine, and their control by the trainer's first rank.

As a script, this module starts such processes on request, as forks of itself, because importing torch takes longer than most checks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.remote import EngineEnd
from rlhf_mcore.bridge.run.transports import GroupLinks
from rlhf_mcore.protocols import EngineProcess, GroupSpec, PeersLost
from tests.distributed.nccl_rules import enforce
from tests.unit.bridge.engine import Engine

ROOT = Path(__file__).resolve().parents[2]


class Served:
    """An engine in this process, and its requests."""

    def __init__(self, engine: Any, node: str = "") -> None:
        self._engine, self._end = engine, EngineEnd(engine, node)
        self._trouble: dict[str, Any] = {}  # injected fault -> position
        open_bucket = EngineDestinations.open

        def open_or_fail(destinations: EngineDestinations, bucket: Bucket) -> Any:
            self._have_trouble("sync", bucket.index)
            return open_bucket(destinations, bucket)

        mock.patch.object(EngineDestinations, "open", open_or_fail).start()

    def answer(self, do: str, given: dict[str, Any]) -> Any:
        if do == "join":
            self._have_trouble("join", 0)
            self._end.join(GroupSpec(**given["spec"]), given["bridge"])
        elif do == "sync":
            stats = self._end.sync(given["version"])
            return {**asdict(stats), "version": self._engine.policy_version, "imported": self._imported_bytes()}
        elif do == "trouble":
            self._trouble = given
        elif do == "spoil":
            next(self._engine.model.parameters()).view(-1)[0] += 1
        elif do == "messages":
            only_messages().start()
        elif do == "weights":
            expected = {**load_file(given["path"]), **({} if given["newer"] is None else load_file(given["newer"]))}
            held = self._engine.tensors
            wrong = [name for name, tensor in held.items() if not torch.equal(tensor, expected[name])]
            return {"wrong": wrong, "count": len(held), "version": self._engine.policy_version}
        elif do == "left":
            return count_resources()
        return None

    def _imported_bytes(self) -> int:
        """Return the bytes that a full sync sends to this process from other machines."""
        assert self._end._end is not None
        bridge = self._end._end.bridge
        nodes, plan = bridge._options.nodes, bridge.rank_plan
        if nodes is None:
            return 0
        received = [m for bucket in plan.buckets for phase in bucket.phases for m in phase.receives]
        return sum(message.nbytes for message in received if nodes[message.peer] != nodes[plan.rank])

    def _have_trouble(self, during: str, at: int) -> None:
        if self._trouble.get("during") == during and self._trouble.get("at") == at:
            kind, self._trouble = self._trouble["kind"], {}
            if kind == "raise":
                raise OSError("the engine has no memory left")
            os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)


def only_messages() -> Any:
    """Let every process act as if it were on a separate machine."""
    return mock.patch.object(GroupLinks, "share", lambda *_: None)


def count_resources() -> list[int]:
    """Return the file descriptors, threads and KiB of memory of this process."""
    status = Path("/proc/self/status").read_text().split()
    memory = int(status[status.index("VmRSS:") + 1])
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), memory]


def serve(socket_path: str, name: str, served: Served) -> None:
    """Answer the requests of the control until it disconnects."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    stream = connection.makefile("rw")
    stream.write(json.dumps({"name": name, "pid": os.getpid()}) + "\n")
    stream.flush()
    for line in stream:
        asked = json.loads(line)
        try:
            answer = {"answer": served.answer(asked.pop("do"), asked)}
        except Exception as error:
            lost = isinstance(error, PeersLost)
            answer = {
                "error": f"{type(error).__name__}: {error}",
                "lost": lost,
                "version": served._engine.policy_version,
            }
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


def start_process(command: Sequence[str]) -> subprocess.Popen[str]:
    """Run a script without the environment of the trainer's world."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
    ):
        environment.pop(name, None)
    command = [sys.executable, "-W", "ignore", *command]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)


class _Channel:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.stream = connection, connection.makefile("rw")
        hello = json.loads(self.stream.readline())
        self.name: str = hello["name"]
        self.pid: int = hello["pid"]

    def ask(self, do: str, **given: Any) -> None:
        with contextlib.suppress(OSError):
            self.stream.write(json.dumps({"do": do, **given}) + "\n")
            self.stream.flush()

    def answer(self, timeout_s: float) -> Any:
        self.connection.settimeout(max(timeout_s, 0.01))
        try:
            line = self.stream.readline()
        except TimeoutError:
            return {"error": "does not answer", "lost": False}
        except OSError:
            line = ""
        finally:
            self.connection.settimeout(None)
        return json.loads(line) if line else {"error": "is gone", "lost": False}


class EngineProcesses:
    """The control of the engines, a stand-in for :class:`Fleet`. ``answers`` contains the engines' answers to ``finish``."""

    def __init__(self, directory: Path, shapes: dict[str, list[int]] | None = None) -> None:
        """Start the engines. ``shapes``: shapes of their tensors; None: the caller starts their processes."""
        self._shapes, self.path = shapes, directory / "engines"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(self.path))
        self._listening.listen()
        self._starter = None if shapes is None else start_process([str(Path(__file__)), str(self.path)])
        self._channels: dict[str, _Channel] = {}
        self.answers: list[dict[str, Any]] = []
        self.log: list[str] = []

    def start(self, name: str, node: str = "") -> None:
        order = {"name": name, "node": node, "shapes": self._shapes}
        assert self._starter is not None and self._starter.stdin is not None
        self._starter.stdin.write(json.dumps(order) + "\n")
        self._starter.stdin.flush()
        self.accept()

    def accept(self) -> None:
        """Wait for a started process. If an engine has several ranks, the name of a process is ENGINE.RANK, otherwise ENGINE."""
        channel = _Channel(self._listening.accept()[0])
        self._channels[channel.name] = channel

    def end(self, engine: str) -> None:
        for name in [name for name in self._channels if name.partition(".")[0] == engine]:
            channel = self._channels.pop(name)
            channel.connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(channel.pid, signal.SIGKILL)

    def ask(self, name: str, do: str, **given: Any) -> Any:
        return self.ask_all([name], do, **given)[0]

    def ask_all(self, names: Sequence[str], do: str, **given: Any) -> list[Any]:
        for name in names:
            self._channels[name].ask(do, **given)
        answers = [self._channels[name].answer(120) for name in names]
        return [answer.get("answer", answer) for answer in answers]

    @property
    def names(self) -> list[str]:
        return sorted(self._channels)

    def close(self) -> None:
        for name in self.names:
            self.end(name.partition(".")[0])
        if self._starter is not None:
            self._starter.kill()
            self._starter.wait()
        self._listening.close()

    # ------------------------------------------------------------------------------------------ transfers of weights
    def pause(self) -> list[EngineProcess]:
        self.log.append("pause")
        return [EngineProcess(name.partition(".")[0], str(self._channels[name].pid)) for name in self.names]

    def join(self, specs: Sequence[GroupSpec], bridge: str) -> None:
        self.log.append("join")
        for name, spec in zip(self.names, specs, strict=True):
            self._channels[name].ask("join", spec=asdict(spec), bridge=bridge)

    def begin_sync(self, version: int) -> None:
        self.log.append("sync")
        for channel in self._channels.values():
            channel.ask("sync", version=version)

    def finish(self, timeout_s: float) -> list[str]:
        until, problems, self.answers = time.monotonic() + timeout_s, [], []
        for name, channel in sorted(self._channels.items()):
            answer = channel.answer(until - time.monotonic())
            self.answers.append({"engine": name, **answer})
            if "error" in answer:
                problems.append(f"{name} {answer['error']}")
                if not answer["lost"]:
                    self.end(name.partition(".")[0])
        return problems

    def resume(self, version: int) -> None:
        self.log.append("resume")


def main(socket_path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    enforce()
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                order = json.loads(line)
                serve(socket_path, order["name"], Served(Engine(order["shapes"], torch.float32), order["node"]))
            except BaseException:
                traceback.print_exc()
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
