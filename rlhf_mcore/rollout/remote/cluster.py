"""Connect the fleet of engines to Ray: start processes, call their methods, and report problems."""

from __future__ import annotations

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

_START_S = 120.0  # timeout for the start of Ray on this machine
_PROBE_S = 2.0  # interval between checks of Ray's head, and timeout of a check
# Concurrency group of each EngineHost method. Methods of a group run one after the other, in order; groups do not block each other.
_GROUP_OF = {
    "locate": "weights",
    "start": "weights",
    "submit": "orders",
    "cancel": "orders",
    "lend_turns": "orders",
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
    """A process of an engine has ended, or Ray could not start it."""


@dataclass(frozen=True, slots=True)
class RayCall:
    """A call of a method in another process."""

    reference: Any

    def is_done(self) -> bool:
        """Return whether the call has a result or an error."""
        import ray

        return bool(ray.wait([self.reference], timeout=0)[0])

    def result(self) -> Any:
        """Return the result of a completed call.

        Raises:
            EngineProcessLost: the process has ended.
            Exception: the method raised this error.
        """
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

        try:
            return ray.get(self.reference, timeout=_PROBE_S)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None
        except ActorDiedError as error:
            # Ray calls a process an "actor", which means the policy here. Keep its text only for errors in the constructor.
            raise EngineProcessLost(
                _first_line(error) if "creation" in str(error) else "its process has ended"
            ) from None
        except (RayError, GetTimeoutError) as error:
            raise EngineProcessLost(_first_line(error)) from None


@dataclass(frozen=True, slots=True)
class RayProcess:
    """The Ray actor that runs a rank of an engine."""

    process: str
    actor: Any

    def call(self, method: str, *arguments: Any) -> RayCall:
        """Start a method of :class:`EngineHost` and return its call."""
        return RayCall(getattr(self.actor, method).options(concurrency_group=_GROUP_OF[method]).remote(*arguments))


@dataclass(slots=True)
class Cluster:
    """A connection to Ray, which starts on this machine if ``address`` is None.

    Each process of an engine requests ``cores`` and ``gpus``. If Ray starts here, engines may use the devices ``own_gpus`` of this
    machine.
    """

    address: str | None
    cores: int
    gpus: int = 0
    own_gpus: Sequence[str] = ()
    key: str = "rollout.ray.address"  # configuration key, for messages
    _head: subprocess.Popen[bytes] | None = None
    _line: socket.socket | None = None
    joined: str = ""  # address of the head
    _looked: float = 0.0
    _silent_since: float | None = None  # time of the first failed check since the last answer
    _groups: dict[str, Any] = field(default_factory=dict)  # placement groups by the name of their engine
    _share: int = 0  # ranks per machine of an engine; 0: all ranks on one machine

    def connect(self) -> None:
        """Join the cluster, or start Ray here and join it. Takes seconds.

        Do not call this on the main thread, because Ray would set signal handlers there.

        Raises:
            ConfigError: Ray does not listen at the address, or it requires a different token.
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
        try:  # a process can join only one cluster, so reward workers and engines share it
            if not ray.is_initialized():
                ray.init(address=address, configure_logging=False, log_to_driver=DEBUG_VARIABLE in os.environ)
        except Exception as error:
            is_token = "InvalidAuthToken" in str(error.__cause__)  # only the cause contains it
            reason = f"{TOKEN_VARIABLE} is not the token of this cluster" if is_token else _first_line(error)
            raise ConfigError(
                f"{self.key}={self.address}: Ray does not take this connection ({reason}); check the address, "
                f"the version of Ray ({ray.__version__} here) and {TOKEN_VARIABLE}"
            ) from error
        if DEBUG_VARIABLE not in os.environ:
            worker.print_to_stdstream = lambda *_, **__: (
                None
            )  # hides Ray's messages about its end, which the fleet reports once
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
            reason = "no reason given"
            try:
                self._line.sendall(json.dumps({"gpus": len(self.own_gpus)}).encode() + b"\n")
                return str(json.loads(self._line.makefile().readline())["address"])
            except TimeoutError:
                reason = f"no answer within {_START_S:g} s; this machine may be overloaded"
            except (OSError, ValueError):  # it has ended; its output may say why
                pass
            self.close()
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError("Ray did not start on this machine: " + without_secrets(" | ".join(text) or reason))

    def problem(self) -> str | None:
        """Return a message if Ray has ended, else None. The head is checked at most every ``_PROBE_S`` seconds."""
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
            except OSError:  # a check may fail on a busy machine, and the previous check may be long ago
                self._silent_since = now if self._silent_since is None else self._silent_since
        is_gone = self._silent_since is not None and now - self._silent_since > 4 * _PROBE_S
        return f"Ray's head at {self.joined} does not answer" if is_gone else None

    def capacity_problem(self, engines: int, size: int, wait_s: float = 0.0) -> str | None:
        """Return a message if this number of engines of ``size`` ranks does not fit, else None.

        An engine that does not fit on one machine spans several machines, with the same number of ranks on each. If ``address``
        is set, waits at most ``wait_s`` seconds for nodes that have not joined the cluster yet.
        """
        import ray

        end = time.monotonic() + (0.0 if self.address is None else wait_s)
        while True:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self._share = _ranks_per_machine(engines, size, self._rank_resources, nodes)
            if self._share:
                return None
            if time.monotonic() > end:
                return _room_problem(engines, size, self._rank_resources, nodes)
            time.sleep(1.0)

    @property
    def _rank_resources(self) -> dict[str, int]:
        """The resources that a rank of an engine requests from Ray."""
        return {"CPU": self.cores} | ({"GPU": self.gpus} if self.gpus else {})

    def spawn(self, name: str, size: int) -> list[RayProcess]:
        """Request processes for the ranks of an engine, with as many ranks per machine as ``capacity_problem`` has found.

        They start when Ray has free resources. Use each ``name`` only once.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = self._share or size
        bundle = {
            name: float(count * share) for name, count in self._rank_resources.items()
        }  # Ray places a bundle on one machine
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
        """Kill the processes of an engine at once and free their resources."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for process in processes:
            ray.kill(process.actor)
        remove_placement_group(self._groups.pop(name))

    def wait(self, calls: Sequence[RayCall], timeout_s: float, *, every: bool = False) -> None:
        """Wait until one call is done, or every call with ``every``, but at most ``timeout_s``."""
        import ray

        if calls:
            number = len(calls) if every else 1
            ray.wait([call.reference for call in calls], num_returns=number, timeout=timeout_s)
        else:
            time.sleep(timeout_s)

    def close(self) -> None:
        """Stop all engines. Stop Ray if this object started it."""
        if self.joined:
            import ray

            ray.shutdown()
        if self._line is not None and self._head is not None:
            self._line.close()
            self._head.wait()


def _ranks_per_machine(engines: int, size: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return the largest number of ranks per machine that fits all engines, or 0. Each rank requires ``needed``."""
    for share in (share for share in range(size, 0, -1) if size % share == 0):
        if _room(share, needed, nodes) * share >= engines * size:
            return share
    return 0


def _room(share: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> int:
    """Return how many shares of ``share`` ranks fit on the machines."""
    return sum(min(int(node.get(name, 0) // (count * share)) for name, count in needed.items()) for node in nodes)


def _room_problem(engines: int, size: int, needed: Mapping[str, int], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return the message that the engines of ``size`` ranks do not fit on the machines."""
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
    """Require a token, because a cluster without a token runs code from any client."""
    tokens = [os.environ.get(TOKEN_VARIABLE), os.environ.get(f"{TOKEN_VARIABLE}_PATH")]
    if os.environ.get("RAY_AUTH_MODE") is None:
        if not any(tokens) and not (Path.home() / ".ray" / "auth_token").is_file():
            raise ConfigError(
                f"{key} is set, and there is no token of that cluster; start Ray with RAY_AUTH_MODE=token and set "
                f"{TOKEN_VARIABLE} or {TOKEN_VARIABLE}_PATH here (RAY_AUTH_MODE=disabled joins a cluster that has none)"
            )
        os.environ["RAY_AUTH_MODE"] = "token"


def _first_line(error: BaseException) -> str:
    """Return the first line of a Ray error. The other lines contain actor ids and general advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return without_secrets((lines or [type(error).__name__])[0][:400])
