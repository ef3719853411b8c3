"""What the loop is made of, as it sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.types import Prompt, Score, TrainBatch, Trajectory


class PromptSource(Protocol):
    """Hands out the prompts of one step after the other, the same on every rank."""

    def next_batch(self) -> list[Prompt]: ...


class LogprobModel(Protocol):
    """A policy that is asked for logprobs and entropy [B, T] of given tokens."""

    def compute_logprobs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]: ...


class TrainablePolicy(LogprobModel, Protocol):
    """A policy that is updated."""

    def update(self, batch: TrainBatch) -> Mapping[str, float]: ...


class Checkpointer(Protocol):
    """Writes the actor when it is due."""

    def after_step(self, step: int) -> None: ...


class Recorder(Protocol):
    """Keeps the record of a run."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step, and show what is happening."""
        ...

    def rollouts(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        """Keep the step's rollouts. Collective."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Close a step and write its metrics. ``step`` counts from 1; 0 is the evaluation before training."""
        ...


@dataclass(frozen=True, slots=True)
class PromptBatches:
    """Prompts in the order of a sampler."""

    prompts: Sequence[Prompt]
    sampler: Sampler

    def next_batch(self) -> list[Prompt]:
        return [self.prompts[place] for place in self.sampler.next_batch()]


class Sampler(Protocol):
    """Positions of the prompts of the next step."""

    def next_batch(self) -> list[int]: ...
