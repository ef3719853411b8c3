"""What the training loop needs of its parts, and no more. Concrete classes are picked in ``rlhf_mcore.cli``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory


@dataclass(frozen=True, slots=True)
class SyncStats:
    """One transfer of weights as a rank saw it. ``peak_bytes``: most buffer memory that was in use at a time."""

    seconds: float
    received_bytes: int
    local_bytes: int
    peak_bytes: int


class SyncMismatch(RuntimeError):
    """An engine does not hold what the trainer holds."""


class WeightBridge(Protocol):
    """Brings the weights of a trained model into the rollout engine of this rank."""

    def sync(self, version: int) -> SyncStats:
        """Replace all weights of the engine and set their version. Collective over the world."""
        ...


class RolloutEngine(Protocol):
    """A generator whose weights are set from outside and carry a version.

    With tensor parallelism inside the engine every rank of it is called with the same arguments; only the engine's first
    rank (``is_lead``) returns trajectories, the others return an empty list.
    """

    is_lead: bool
    num_engines: int
    engine_index: int
    policy_version: int

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        """Draw ``sampling.n`` responses for each prompt, in prompt order, samples 0..n-1 adjacent."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Replace all weights by full tensors under Hugging Face names. Until it returns, ``generate`` raises."""
        ...

    @property
    def model(self) -> nn.Module:
        """The live model on this rank, whose tensors a bridge looks at."""
        ...

    def updating(self, *, version: int) -> AbstractContextManager[nn.Module]:
        """The live model, to be written in place. Until the block has ended well, ``generate`` raises."""
        ...

    def drop_weights(self, problem: str) -> None:
        """Declare the weights unusable: until the next whole load or sync ``generate`` raises, saying why."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class RewardFunction(Protocol):
    """Scores finished trajectories."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]: ...


class Tracker(Protocol):
    """A place where metrics go."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
