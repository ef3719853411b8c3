"""What one room needs of another, and no more: seams of engines and bridges, then the parts of the loop.

Concrete classes are picked in ``rlhf_mcore.cli``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_mcore.types import Completion, Request, Score, TrainBatch, Trajectory, UpdateResult


MEMORY = ("weights", "kv_cache")  # of an engine, in the order in which it is needed again after a sleep
ADAPTER_SLOTS = "adapter_slots"  # attribute of an engine's model that adds adapters: their buffers by name


@dataclass(frozen=True, slots=True)
class SyncStats:
    """One transfer of weights as a rank saw it.

    ``peak_bytes``: most buffer memory that was in use at a time. ``whole_bytes``: what it would have sent if not only changes had
    travelled; 0 where everything does.
    """

    seconds: float
    received_bytes: int
    local_bytes: int
    peak_bytes: int
    sent_bytes: int = 0
    whole_bytes: int = 0


class SyncMismatch(RuntimeError):
    """An engine does not hold what the trainer holds."""


class WeightBridge(Protocol):
    """Brings the weights of a trained model into the rollout engine of this rank."""

    def sync(self, version: int) -> SyncStats:
        """Replace all weights of the engine and set their version. Collective over the world."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRank:
    """Name the rollout engine of the world that a rank is part of. Only the lead rank of an engine returns completions."""

    engine_index: int = 0
    num_engines: int = 1
    is_lead: bool = True

    @classmethod
    def of(cls, rank: int, world_size: int, size: int) -> EngineRank:
        """Every ``size`` consecutive ranks are an engine."""
        return cls(rank // size, world_size // size, rank % size == 0)


class Generator(Protocol):
    """Draws responses, also while the caller does something else."""

    def generate(self, requests: Sequence[Request]) -> Sequence[Completion]:
        """Draw one completion for each request, in any order. May be called as often as wanted.

        Where several ranks are one engine all of them pass the same requests, and all but the lead get nothing.
        """
        ...

    @property
    def num_in_flight(self) -> int:
        """Requests that were submitted and have been neither returned nor cancelled."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Begin to draw. Request ids are unique among those that are neither collected nor cancelled."""
        ...

    def collect(self, timeout_s: float) -> Sequence[Completion]:
        """Return what has finished since the last call, in any order. Waits for at least one; after ``timeout_s`` returns none."""
        ...

    def cancel(self, request_ids: Collection[int]) -> None:
        """Stop to draw these; they are not returned any more. Ids that have finished, or are unknown, are ignored."""
        ...


class WeightTarget(Protocol):
    """Take the weights that a bridge brings: those of a model, replaced as one transaction, wherever it is."""

    @property
    def policy_version(self) -> int:
        """Return the version of the weights that it holds; -1 where there are none that may be used."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights by full tensors under Hugging Face names, in a transaction of their own."""
        ...

    def abandon(self, problem: str) -> None:
        """Make the weights unusable, for the reason ``problem``, until the next whole transaction."""
        ...


class LiveWeights(WeightTarget, Protocol):
    """Weights in the memory of this rank, which a bridge may write in place."""

    @property
    def model(self) -> nn.Module:
        """The live model on this rank, whose tensors a bridge looks at."""
        ...

    def begin(self, version: int) -> AbstractContextManager[nn.Module]:
        """Return the live model, to be written in place.

        The weights are unusable inside the block. Leaving it commits them as ``version``; an exception abandons them.
        """
        ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Join a process to a process group whose members have no world in common.

    ``name`` is used once in a run. The store listens on ``address`` and ``port``, in the process with ``rank`` 0. ``timeout_s`` limits
    how long joining may take, and how long an operation may wait for other ranks.
    """

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


class PeersLost(RuntimeError):
    """Other ranks of a group are gone or do not answer. Nothing is wrong with the rank that raises it."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One rank of a rollout engine in a process of its own.

    ``engine`` is the engine's name. ``process`` is unique in a run: a rank that was started again has another one.
    """

    engine: str
    process: str


class RemoteEngines(Protocol):
    """The engines of other processes, as the trainer's first rank controls them while weights are transferred.

    The order is: ``pause``; ``join``, where the processes or their group have changed, and ``finish``; ``begin_sync`` and ``finish``;
    ``resume``. After a failure it begins again with ``pause``.
    """

    def pause(self) -> list[EngineProcess]:
        """Stop all engines between two of their steps. Those that are well, in the order of their ranks in a group.

        The ranks of an engine follow each other. Engines that have been started, or started again, and are ready, are among them.
        After a failed transfer it is called again, while those that are left are paused.
        """
        ...

    def join(self, specs: Sequence[GroupSpec], bridge: str) -> None:
        """Let the k-th process that ``pause`` has returned call :meth:`WeightReceiver.join` with ``specs[k]``. Returns at once."""
        ...

    def begin_sync(self, version: int, only: Sequence[str] | None) -> None:
        """Let every process that has joined call :meth:`WeightReceiver.sync`. Returns at once."""
        ...

    def finish(self, timeout_s: float) -> list[str]:
        """Wait for what was begun last. What went wrong in any process, with the name of its engine; [] where all is well.

        An engine has failed if one of its processes is gone, does not answer in time, or has raised anything but :class:`PeersLost`.
        ``pause`` leaves it out until it has been started again. An engine whose processes have raised PeersLost stays.
        """
        ...

    def resume(self, version: int) -> None:
        """Let engines generate again. Those that took part have whole weights, of this version."""
        ...


class WeightReceiver(Protocol):
    """A process of a remote engine, as the other end of the transfer. One thread calls it, between two steps of the engine."""

    def join(self, spec: GroupSpec, bridge: str) -> None:
        """Leave the group, if there is one, join another and plan the transfers in it. ``bridge`` is what the trainer has sent.

        Raises:
            PeersLost: the others have not come, or are lost.
        """
        ...

    def sync(self, version: int, only: Sequence[str] | None = None) -> SyncStats:
        """Receive weights. After an error the engine has none that may be used, and the group is left.

        Raises:
            PeersLost: others of the group are lost.
        """
        ...

    def leave(self) -> None:
        """Leave the group, if there is one. The weights stay as they are."""
        ...


class Sleeper(Protocol):
    """Give device memory to others for a while."""

    def sleep(self, level: int = 2) -> None:
        """Free the caches, and the weights: level 1 keeps a copy of them on the host, level 2 discards them."""
        ...

    def wake(self, tags: Sequence[str] = MEMORY) -> None:
        """Allocate the memory of ``tags``, all of it or one of ``MEMORY`` after the other."""
        ...


class RewardFunction(Protocol):
    """Scores finished trajectories."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories, in order."""
        ...


class Tracker(Protocol):
    """A place where metrics go."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------ the loop and its parts
class LogprobModel(Protocol):
    """A policy that computes logprobs [N] of the sampled tokens. Collective over the world."""

    def compute_logprobs(self, batch: TrainBatch) -> Tensor: ...


class TrainableModel(Protocol):
    """A model that is updated by the ranks that hold it; they know the result."""

    def deliver_update(self, batch: TrainBatch) -> Callable[[], UpdateResult | None]:
        """Bring the rows to those ranks, collective over the world; what is returned makes the updates there. None on other ranks."""
        ...


class Source(Protocol):
    """Make the rows of a step."""

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Make the rows of a step, and metrics of them. Collective."""
        ...


class Learner(Protocol):
    """Learn from the rows of a step."""

    def learn(self, step: int, batch: TrainBatch) -> tuple[Sequence[UpdateResult], Mapping[str, float]]:
        """Make all updates of a step. Returns their results, and metrics beside those of the results. Collective."""
        ...


class Publisher(Protocol):
    """Use the weights of a step beside the checkpoints."""

    def publish(self, version: int) -> Mapping[str, float]:
        """Bring the weights of version ``version`` there; returns metrics. Collective."""
        ...

    def withdraw(self) -> None:
        """Give up the weights that were published last: the model learns, and others follow."""
        ...


class Evaluator(Protocol):
    """Measures the model on held-out data."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after ``step`` of ``num_steps`` steps."""
        ...

    def run(self, step: int) -> dict[str, float]:
        """``evaluate/*`` metrics. Collective."""
        ...
