"""Processes that hold an engine's weights and nothing else, and their control by the trainer's first rank.

Run as a script it starts such processes on request, as forks of itself: importing torch takes longer than most checks.
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
from tests.unit.bridge.engine import Engine

ROOT = Path(__file__).resolve().parents[2]


class Served:
    """An engine in this process, and what it is asked."""

    def __init__(self, node: str, shapes: dict[str, list[int]]) -> None:
        self._engine = Engine(shapes, torch.float32)
        self._end = EngineEnd(self._engine, node)
        self._trouble: dict[str, Any] = {}  # what is to happen, and where
        open_bucket = EngineDestinations.open

        def opened(destinations: EngineDestinations, bucket: Bucket) -> Any:
            self._have_trouble("sync", bucket.index)
            return open_bucket(destinations, bucket)

        mock.patch.object(EngineDestinations, "open", opened).start()

    def answer(self, do: str, given: dict[str, Any]) -> Any:
        if do == "join":
            self._have_trouble("join", 0)
            self._end.join(GroupSpec(**given["spec"]), given["bridge"])
        elif do == "sync":
            stats = self._end.sync(given["version"], given["only"])
            return {**asdict(stats), "version": self._engine.policy_version, "imported": self._imported()}
        elif do == "trouble":
            self._trouble = given
        elif do == "messages":
            only_messages().start()
        elif do == "weights":
            expected = {**load_file(given["path"]), **({} if given["newer"] is None else load_file(given["newer"]))}
            held = self._engine.tensors
            wrong = [name for name, tensor in held.items() if not torch.equal(tensor, expected[name])]
            return {"wrong": wrong, "count": len(held), "version": self._engine.policy_version}
        elif do == "left":
            return left()
        return None

    def _imported(self) -> int:
        """Bytes that a sync of everything brings here from other machines."""
        assert self._end._end is not None
        bridge = self._end._end.bridge
        nodes, plan = bridge._nodes, bridge.rank_plan
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
    """As if every process were on a machine of its own."""
    return mock.patch.object(GroupLinks, "share", lambda *_: None)


def left() -> list[int]:
    """File descriptors, threads and KiB of memory of this process."""
    status = Path("/proc/self/status").read_text().split()
    memory = int(status[status.index("VmRSS:") + 1])
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), memory]


def serve(socket_path: str, order: dict[str, Any]) -> None:
    """Answer what the control asks, until it is gone."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(socket_path)
    stream = connection.makefile("rw")
    served = Served(order["node"], order["shapes"])
    stream.write(json.dumps({"name": order["name"], "pid": os.getpid()}) + "\n")
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


class _Channel:
    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.stream = connection, connection.makefile("rw")
        self.pid: int = json.loads(self.stream.readline())["pid"]

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
    """Control of the engines: a :class:`RemoteEngines`. What engines answer to ``finish`` is in ``answers``."""

    def __init__(self, directory: Path, shapes: dict[str, list[int]]) -> None:
        self._shapes, path = shapes, directory / "engines"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(str(path))
        self._listening.listen()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
            environment.pop(name, None)
        command = [sys.executable, "-W", "ignore", str(Path(__file__)), str(path)]
        self._starter = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)
        self._channels: dict[str, _Channel] = {}
        self.answers: list[dict[str, Any]] = []
        self.log: list[str] = []

    def start(self, name: str, node: str = "") -> None:
        order = {"name": name, "node": node, "shapes": self._shapes}
        assert self._starter.stdin is not None
        self._starter.stdin.write(json.dumps(order) + "\n")
        self._starter.stdin.flush()
        self._channels[name] = _Channel(self._listening.accept()[0])

    def end(self, name: str) -> None:
        channel = self._channels.pop(name)
        channel.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(channel.pid, signal.SIGKILL)

    def ask(self, name: str, do: str, **given: Any) -> Any:
        self._channels[name].ask(do, **given)
        answer = self._channels[name].answer(60)
        return answer.get("answer", answer)

    def close(self) -> None:
        for name in list(self._channels):
            self.end(name)
        self._starter.kill()
        self._starter.wait()
        self._listening.close()

    # ------------------------------------------------------------------------------------------ RemoteEngines
    def pause(self) -> list[EngineProcess]:
        self.log.append("pause")
        return [EngineProcess(name, str(channel.pid)) for name, channel in sorted(self._channels.items())]

    def join(self, specs: Sequence[GroupSpec], bridge: str) -> None:
        self.log.append("join")
        for (_, channel), spec in zip(sorted(self._channels.items()), specs, strict=True):
            channel.ask("join", spec=asdict(spec), bridge=bridge)

    def begin_sync(self, version: int, only: Sequence[str] | None) -> None:
        self.log.append("sync" if only is None else "some")
        for channel in self._channels.values():
            channel.ask("sync", version=version, only=only)

    def finish(self, timeout_s: float) -> list[str]:
        until, problems, self.answers = time.monotonic() + timeout_s, [], []
        for name, channel in sorted(self._channels.items()):
            answer = channel.answer(until - time.monotonic())
            self.answers.append({"engine": name, **answer})
            if "error" in answer:
                problems.append(f"{name} {answer['error']}")
                if not answer["lost"]:
                    self.end(name)
        return problems

    def resume(self) -> None:
        self.log.append("resume")


def main(socket_path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            try:
                serve(socket_path, json.loads(line))
            except BaseException:
                traceback.print_exc()
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
