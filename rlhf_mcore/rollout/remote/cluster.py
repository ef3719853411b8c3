"""Connect to Ray for the fleet of engines: place and call processes, and report problems."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import start
from rlhf_mcore.redaction import is_secret_variable, without_secrets
from rlhf_mcore.rollout.engine import DEBUG_VARIABLE
from rlhf_mcore.rollout.remote.head import SETTINGS
from rlhf_mcore.rollout.remote.host import EngineHost

_START_S = 120.0  # for Ray on this machine
_PROBE_S = 2.0  # between two looks at whether Ray's head is there, and for one of them
# Methods of EngineHost that wait keep no others waiting: those of a group are carried out one after the other, in their order.
_GROUP_OF = {
    "locate": "weights",
    "start": "weights",
    "submit": "orders",
    "cancel": "orders",
    "lend": "orders",
    "take_back": "orders",
    "report": "reports",
    "pause": "weights",
    "join": "weights",
    "sync": "weights",
    "leave": "weights",
    "resume": "weights",
}
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"


class EngineProcessLost(RuntimeError):
    """A process of an engine is gone, or Ray could not start it."""


@dataclass(frozen=True, slots=True)
class RayCall:
    """A call of a method in another process."""

    reference: Any

    def is_done(self) -> bool:
        """Tell whether there is a result, or an error."""
        import ray

        return bool(ray.wait([self.reference], timeout=0)[0])

    def result(self) -> Any:
        """Return the result of a call that is done.

        Raises:
            EngineProcessLost: the process is gone.
            Exception: what the method has raised.
        """
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(self.reference, timeout=_PROBE_S)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None
        except ActorDiedError as error:
            # Ray's word for a process is "actor", which here is the policy. What its beginning has raised is told.
            raise EngineProcessLost(
                _first_line(error) if "creation" in str(error) else "its process has ended"
            ) from None
        except (RayError, GetTimeoutError) as error:
            raise EngineProcessLost(_first_line(error)) from None


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A rank of an engine: an actor."""

    process: str
    actor: Any

    def call(self, method: str, *arguments: Any) -> RayCall:
        """Begin a method of :class:`EngineHost`."""
        return RayCall(getattr(self.actor, method).options(concurrency_group=_GROUP_OF[method]).remote(*arguments))


@dataclass(slots=True)
class Cluster:
    """A connection to Ray, which is started on this machine where no address is given.

    ``cores`` and ``gpus`` are what a process of an engine asks for; ``own_gpus`` are the devices of this machine that engines may
    have, where Ray is started here.
    """

    address: str | None
    cores: int
    gpus: int = 0
    own_gpus: Sequence[str] = ()
    key: str = "rollout.ray.address"  # of the configuration, for messages
    _head: subprocess.Popen[bytes] | None = None
    _line: socket.socket | None = None
    joined: str = ""  # address of the head
    _looked: float = 0.0
    _silent_since: float | None = None  # the first look that failed, of those since the last answer
    _groups: dict[str, Any] = field(default_factory=dict)  # placement groups by the name of what is in them
    _share: int = 0  # ranks of an engine on each of its machines; 0: all, on one

    def connect(self) -> None:
        """Join the cluster, or start one first. Takes seconds; not on the main thread, where Ray would set signal handlers.

        Raises:
            ConfigError: nobody listens at the address, or it wants another token.
            RuntimeError: Ray did not start on this machine.
        """
        address = self._start() if self.address is None else self.address
        if self.address is not None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            _require_token(self.key)
        if address != "auto":
            _refuse_unless_listening(address, self.key)
        import ray
        from ray._private import worker

        if DEBUG_VARIABLE not in os.environ:
            logging.getLogger("ray").setLevel(logging.CRITICAL)
        try:  # a process is in one cluster: reward workers and engines share what the first of them has joined
            if not ray.is_initialized():
                ray.init(address=address, configure_logging=False, log_to_driver=DEBUG_VARIABLE in os.environ)
        except Exception as error:
            is_token = "InvalidAuthToken" in str(error.__cause__)  # Ray names it in the cause alone
            reason = f"{TOKEN_VARIABLE} is not the token of this cluster" if is_token else _first_line(error)
            raise ConfigError(
                f"{self.key}={self.address}: Ray does not take this connection ({reason}); check the address, "
                f"the version of Ray ({ray.__version__} here) and {TOKEN_VARIABLE}"
            ) from error
        if DEBUG_VARIABLE not in os.environ:
            worker.print_to_stdstream = lambda *_, **__: None  # what Ray tells of its own end: the fleet tells it once
        self.joined = str(ray.get_runtime_context().gcs_address)

    def _start(self) -> str:
        os.environ.update(SETTINGS)
        os.environ.setdefault(TOKEN_VARIABLE, secrets.token_hex(32))
        environment = {
            name: value for name, value in os.environ.items() if name == TOKEN_VARIABLE or not is_secret_variable(name)
        }
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self.own_gpus)
        self._line, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as errors:
            self._head = start(
                [sys.executable, "-m", "rlhf_mcore.rollout.remote.head"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=environment,
            )
            theirs.close()
            self._line.settimeout(_START_S)
            with contextlib.suppress(OSError, ValueError):
                self._line.sendall(json.dumps({"gpus": len(self.own_gpus)}).encode() + b"\n")
                return str(json.loads(self._line.makefile().readline())["address"])
            self.close()
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(
            "Ray did not start on this machine: " + without_secrets(" | ".join(text) or "no reason given")
        )

    def problem(self) -> str | None:
        """Explain why there is no Ray any more, or return None. Looks every few seconds."""
        now = time.monotonic()
        if not self.joined:
            return None
        if self._head is not None and self._head.poll() is not None:
            return "Ray on this machine has ended"
        if now - self._looked > _PROBE_S:
            self._looked = now
            host, _, port = self.joined.rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
                self._silent_since = None
            except OSError:  # one look may fail where a machine is busy, and the look before may be long ago
                self._silent_since = now if self._silent_since is None else self._silent_since
        is_gone = self._silent_since is not None and now - self._silent_since > 4 * _PROBE_S
        return f"Ray's head at {self.joined} does not answer" if is_gone else None

    def capacity_problem(self, engines: int, size: int, wait_s: float = 0.0) -> str | None:
        """Explain why so many engines cannot run here, or return None.

        Engines that do not fit on single machines span several, with equally many ranks on each. Nodes of a cluster may still be
        joining: it has ``wait_s`` to get them.
        """
        import ray

        end = time.monotonic() + (0.0 if self.address is None else wait_s)
        while True:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._share = _ranks_per_machine(engines, size, self._needed, nodes)
            if self._share:
                return None
            if time.monotonic() > end:
                return _room_problem(engines, size, self._needed, nodes)
            time.sleep(1.0)

    @property
    def _needed(self) -> dict[str, int]:
        """What a rank of an engine asks Ray for."""
        return {"CPU": self.cores} | ({"GPU": self.gpus} if self.gpus else {})

    def spawn(self, name: str, size: int) -> list[RayProcess]:
        """Start processes for the ranks of an engine, on as few machines as ``capacity_problem`` has found.

        They start when Ray has room for them. ``name`` is used once.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = self._share or size
        bundle = {name: float(count * share) for name, count in self._needed.items()}  # a bundle is on one machine
        group = self._groups[name] = placement_group([bundle] * (size // share), strategy="PACK")
        host = ray.remote(concurrency_groups=dict.fromkeys(set(_GROUP_OF.values()), 1))(EngineHost)
        return [
            RayProcess(
                f"{name}.{rank}",
                host.options(
                    num_cpus=self.cores,
                    num_gpus=self.gpus,
                    max_restarts=0,
                    max_task_retries=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        group, placement_group_bundle_index=rank // share
                    ),
                ).remote(),
            )
            for rank in range(size)
        ]

    def end(self, name: str, processes: Sequence[RayProcess]) -> None:
        """Kill the processes of an engine, whatever they are doing, and give up their place."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for process in processes:
            ray.kill(process.actor)
        remove_placement_group(self._groups.pop(name))

    def wait(self, calls: Sequence[RayCall], timeout_s: float, *, every: bool = False) -> None:
        """Wait until one of the calls is done, or every one; no longer than ``timeout_s``."""
        import ray

        if calls:
            number = len(calls) if every else 1
            ray.wait([call.reference for call in calls], num_returns=number, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def close(self) -> None:
        """End all engines, and Ray where it was started here."""
        if self.joined:
            import ray

            ray.shutdown()
        if self._line is not None and self._head is not None:
            self._line.close()
            self._head.wait()


def _ranks_per_machine(engines: int, size: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the most ranks of an engine per machine with which all engines fit; 0 if they do not. A rank needs ``needed``."""
    for share in (share for share in range(size, 0, -1) if size % share == 0):
        if _room(share, needed, nodes) * share >= engines * size:
            return share
    return 0


def _room(share: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> int:
    """Count the shares of so many ranks that machines have room for."""
    return sum(min(int(node.get(name, 0) // (count * share)) for name, count in needed.items()) for node in nodes)


def _room_problem(engines: int, size: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> str:
    """Explain why machines lack room for so many engines of ``size`` ranks."""
    for name, count in needed.items():
        if (there := sum(node.get(name, 0) for node in nodes)) < engines * size * count:
            return (
                f"rollout.num_engines={engines}: engines of {size} ranks (rollout.layout) need {engines * size * count} {name}s, and "
                f"Ray has {there:g}; lower it, or give Ray more"
            )
    wanted = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in needed.items())
    return (
        f"rollout.num_engines={engines}: engines of {size} ranks (rollout.layout) need {wanted} for each rank, and Ray's machines "
        f"have room for {_room(1, needed, nodes)} ranks; lower it, or give Ray more"
    )


def _refuse_unless_listening(address: str, key: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{key}={address}: nobody answers there ({error}); give the host and port that ray start --head has "
            "printed, or null to start Ray on this machine"
        ) from error


def _require_token(key: str) -> None:
    """Require a token, because a cluster that takes orders from anybody runs anybody's code."""
    tokens = [os.environ.get(TOKEN_VARIABLE), os.environ.get(f"{TOKEN_VARIABLE}_PATH")]
    if os.environ.get("RAY_AUTH_MODE") is None:
        if not any(tokens) and not (Path.home() / ".ray" / "auth_token").is_file():
            raise ConfigError(
                f"{key} is set, and there is no token of that cluster; start Ray with RAY_AUTH_MODE=token and set "
                f"{TOKEN_VARIABLE} or {TOKEN_VARIABLE}_PATH here (RAY_AUTH_MODE=disabled joins a cluster that has none)"
            )
        os.environ["RAY_AUTH_MODE"] = "token"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray: numbers of actors and advice follow."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_secrets((lines or [type(error).__name__])[0][:400])
