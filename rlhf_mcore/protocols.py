"""The interfaces between packages: first engines and bridges, then the parts of the training loop.

``rlhf_mcore.cli`` chooses the concrete classes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_mcore.types import Completion, Prompt, Request, Sampling, Score, TrainBatch, Trajectory, UpdateResult


MEMORY = ("weights", "kv_cache")  # memory of an engine, in the order in which it is needed after a sleep
ADAPTER_SLOTS = "adapter_slots"  # attribute of an engine's model that adds adapters: their buffers by name


@dataclass(frozen=True, slots=True)
class SyncStats:
    """Statistics of a weight transfer on one rank.

    ``peak_bytes``: peak memory of buffers. ``whole_bytes``: bytes that this rank would have sent without delta transfer; 0 if it sends
    all weights.
    """

    seconds: float
    received_bytes: int
    local_bytes: int
    peak_bytes: int
    sent_bytes: int = 0
    whole_bytes: int = 0


class SyncMismatch(RuntimeError):
    """An engine's weights differ from the trainer's."""


class WeightBridge(Protocol):
    """Copy the weights of a trained model to the rollout engine of this rank."""

    def sync(self, version: int) -> SyncStats:
        """Replace all weights of the engine and set their version. Collective over the world."""
        ...


@dataclass(frozen=True, slots=True)
class EngineRank:
    """The rollout engine that a rank belongs to. Only the lead rank of an engine returns completions."""

    engine_index: int = 0
    num_engines: int = 1
    is_lead: bool = True

    @classmethod
    def of(cls, rank: int, world_size: int, size: int) -> EngineRank:
        """Return the engine of a rank, if every ``size`` consecutive ranks form an engine."""
        return cls(rank // size, world_size // size, rank % size == 0)


class StepwiseEngine(Protocol):
    """An engine that samples in steps. If it has several ranks, all of them make the same calls."""

    @property
    def num_in_flight(self) -> int:
        """Return the number of submitted requests that were neither returned nor cancelled."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Start sampling the requests. Request ids must be unique among requests in flight."""
        ...

    def step(self) -> Sequence[Completion]:
        """Sample about one token for each request in flight. Returns the finished completions, in any order."""
        ...

    def cancel(self, request_ids: Collection[int]) -> None:
        """Stop sampling these requests, which are then not returned. Finished and unknown ids are ignored."""
        ...

    def forget_prefixes(self) -> None:
        """Drop the cached prefixes of earlier requests. No request may be in flight."""
        ...

    def compare_ranks(self) -> None:
        """Check that all ranks of the engine have sampled the same tokens."""
        ...

    def sampled_tokens(self, request_ids: Collection[int]) -> Mapping[int, Sequence[int]]:
        """Return the tokens sampled so far for the requests in flight; {} if the engine does not report them."""
        ...


@runtime_checkable
class AsyncEngine(Protocol):
    """An engine that answers each request separately, such as the client of servers. Only its lead rank samples."""

    on_progress: Callable[[], object] | None  # called about once a second while requests are in flight

    async def answer(self, request: Request) -> Completion:
        """Return the completion of a request, in any event loop. If the caller is cancelled, the engine stops sampling."""
        ...


class ResponseSampler(Protocol):
    """Samples responses to prompts outside of training steps."""

    @property
    def rank(self) -> EngineRank:
        """Return the position of this rank in the engines."""
        ...

    @property
    def decode(self) -> Callable[[Sequence[Sequence[int]]], list[str]]:
        """Return the function from token ids of responses to their texts."""
        ...

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Return all responses to each prompt, in prompt order. Returns [] on ranks that do not lead their engine."""
        ...

    def wait(self) -> object:
        """Wait until all ranks have finished sampling, without a timeout. Collective over the world."""
        ...


class WeightTarget(Protocol):
    """The receiver of a bridge's weights. It replaces all weights of a model in one transaction, in any process."""

    @property
    def policy_version(self) -> int:
        """Return the version of the current weights, or -1 if there are no usable weights."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights by full tensors under Hugging Face names, in one transaction."""
        ...

    def abandon(self, problem: str) -> None:
        """Mark the weights as unusable, for the reason ``problem``, until the next complete transaction."""
        ...


class LiveWeights(WeightTarget, Protocol):
    """Weights in the memory of this rank, which a bridge may write in place."""

    @property
    def model(self) -> nn.Module:
        """Return the live model on this rank, whose tensors a bridge inspects."""
        ...

    def begin(self, version: int) -> AbstractContextManager[nn.Module]:
        """Return the live model, to be written in place.

        The weights are unusable inside the block. Leaving it commits them as ``version``; an exception abandons them.
        """
        ...


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The parameters to join a process group whose members do not share a world.

    ``name`` is used only once in a run. The store listens on ``address`` and ``port`` in the process with ``rank`` 0. ``timeout_s``
    limits the time to join, and the time that an operation waits for other ranks.
    """

    name: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float


class PeersLost(RuntimeError):
    """Other ranks of a group have ended or do not answer. The rank that raises this error is healthy."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A rank of a rollout engine in a separate process.

    ``engine`` is the engine's name. ``process`` is unique in a run: a restarted rank gets a new one.
    """

    engine: str
    process: str


class WeightReceiver(Protocol):
    """A process of a remote engine that receives weights. One thread calls it, between two steps of the engine."""

    def join(self, spec: GroupSpec, bridge: str) -> None:
        """Leave the current group, if any, join another group, and plan its transfers. ``bridge`` is the trainer's description.

        Raises:
            PeersLost: other members have not joined, or are lost.
        """
        ...

    def sync(self, version: int) -> SyncStats:
        """Receive weights. After an error, the engine's weights are unusable and the engine is not in the group.

        Raises:
            PeersLost: other members of the group are lost.
        """
        ...

    def leave(self) -> None:
        """Leave the current group, if any. The weights do not change."""
        ...


class Sleeper(Protocol):
    """An engine that can free its device memory temporarily."""

    def sleep(self, level: int = 2) -> None:
        """Free the caches and the weights. Level 1 keeps a copy of the weights on the host, level 2 discards them."""
        ...

    def wake(self, tags: Sequence[str] = MEMORY) -> None:
        """Allocate the memory of ``tags``: all of ``MEMORY``, or one tag per call in its order."""
        ...


class RewardFunction(Protocol):
    """Score finished trajectories."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories, in order."""
        ...


class Tracker(Protocol):
    """A destination for metrics."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------ the loop and its parts
class LogprobModel(Protocol):
    """A policy that computes logprobs [N] of the sampled tokens. Collective over the world."""

    def compute_logprobs(self, batch: TrainBatch) -> Tensor: ...


class TrainableModel(Protocol):
    """A model that is updated by the ranks that store it. Only these ranks know the result."""

    def deliver_update(self, batch: TrainBatch) -> Callable[[], UpdateResult | None]:
        """Send the rows to these ranks. Returns a function that runs the updates there, and returns None on other ranks.

        Sending is collective over the world.
        """
        ...


class Source(Protocol):
    """The source of the rows of a step."""

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the rows of a step and their metrics. Collective."""
        ...


class Learner(Protocol):
    """Learn from the rows of a step."""

    def learn(self, step: int, batch: TrainBatch) -> tuple[Sequence[UpdateResult], Mapping[str, float]]:
        """Run all updates of a step. Returns their results, and further metrics. Collective."""
        ...


class Publisher(Protocol):
    """Publish the weights of a step, for example to engines."""

    def publish(self, version: int) -> Mapping[str, float]:
        """Publish the weights as ``version``. Returns metrics. Collective."""
        ...

    def withdraw(self) -> None:
        """Withdraw the last published weights, because the model will be updated and published again."""
        ...


class Evaluator(Protocol):
    """Evaluate the model on held-out data."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to evaluate after ``step`` of ``num_steps`` steps."""
        ...

    def run(self, step: int) -> dict[str, float]:
        """Return the ``evaluate/*`` metrics. Collective."""
        ...
