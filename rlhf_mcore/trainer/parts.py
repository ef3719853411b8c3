"""The parts of the loop, as the loop sees them: protocols."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlhf_mcore.types import Field, Prompt, Score, TrainBatch, Trajectory


class PromptSource(Protocol):
    """Yields the prompts of one step after the other, the same on every rank."""

    def next_batch(self) -> list[Prompt]: ...


class LogprobModel(Protocol):
    """A policy that computes logprobs [N] of the sampled tokens. Collective over the world."""

    def compute_logprobs(self, batch: TrainBatch) -> Tensor: ...


class ReferenceModel(LogprobModel, Protocol):
    """A policy whose weights can be replaced by those of another one."""

    def refresh(self, actor: Any) -> None: ...


class TrainableModel(Protocol):
    """A model that is updated by the ranks that hold it; its metrics are known to these."""

    def deliver_update(self, batch: TrainBatch) -> Callable[[], dict[str, float]]:
        """Bring the rows to those ranks, collective over the world; what is returned makes the updates there."""
        ...


class TrainablePolicy(LogprobModel, TrainableModel, Protocol):
    """A policy that is updated."""

    def makes_one_update(self, batch: TrainBatch) -> bool:
        """Whether a step learns from these rows in one update: the policy before it is then that of the update's forward pass."""
        ...

    def logprobs_of_update(self, batch: TrainBatch) -> Tensor:
        """Logprobs [N] of the forward pass of that update, which was made without ``old_logprobs``. Collective over the world."""
        ...


class ValueModel(TrainableModel, Protocol):
    """Values [N] of the states before each sampled token, and, where wanted, [B] of those after the last. Collective."""

    def compute_values(self, batch: TrainBatch) -> tuple[Tensor, Tensor | None]: ...


class ScoreModel(Protocol):
    """Scores [B] of whole responses. Collective over the world."""

    def compute_scores(self, batch: TrainBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The models of a run; those that its algorithm does not need are None.

    ``warmup_steps``: in so many steps only the critic learns. ``refresh_steps``: after so many steps the reference takes over the
    actor's weights (0: never).
    """

    actor: TrainablePolicy
    critic: ValueModel | None = None
    reference: ReferenceModel | None = None
    warmup_steps: int = 0
    refresh_steps: int = 0
    # What further models compute of the tokens of a batch before it is learned from, by the field that it fills: [N, ...]. Collective.
    computes: Mapping[str, Callable[[TrainBatch], Field]] = field(default_factory=dict)


class Source(Protocol):
    """Where the rows of a step come from."""

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """The rows of a step, and metrics of them. Collective."""
        ...


class Learner(Protocol):
    """What learns from the rows of a step."""

    def learn(self, step: int, batch: TrainBatch) -> Mapping[str, float]:
        """All updates of a step; returns their metrics. Collective."""
        ...


class Publisher(Protocol):
    """Who uses the weights of a step beside the checkpoints."""

    def publish(self, version: int) -> Mapping[str, float]:
        """Bring the weights of version ``version`` there; returns metrics. Collective."""
        ...

    def withdraw(self) -> None:
        """The weights that were published last are needed no longer: the model learns, and others follow."""
        ...


class Evaluator(Protocol):
    """Measures the model on held-out data."""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after ``step`` of ``num_steps`` steps."""
        ...

    def run(self, step: int) -> dict[str, float]:
        """``evaluate/*`` metrics. Collective."""
        ...


class Checkpointer(Protocol):
    """Saves when it is due."""

    def begin(self) -> None:
        """The first step begins."""
        ...

    def after_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Save if it is due; returns whether the run has to end now. Collective."""
        ...

    def save_to(self, directory: Path, step: int) -> Path:
        """Save ``<directory>/checkpoint-<step>`` and return its path. Collective."""
        ...

    def end(self) -> int | None:
        """The last step was made: wait until everything is on the disk. Collective.

        Returns the step of the checkpoint that the models hold from here on, None where they stay as they are.
        """
        ...


class Recorder(Protocol):
    """Keeps the record of a run."""

    def begin_step(self, step: int) -> None:
        """A step begins. Collective."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a phase of the step, and show what is happening."""
        ...

    def progress(self, text: str) -> None:
        """Show how far the phase is."""
        ...

    def rollouts(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> None:
        """Keep the step's rollouts. Collective."""
        ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Close a step and write its metrics. ``step`` counts from 1; 0 is the evaluation before training. Collective."""
        ...

    def final(self, last_step: int, step: int, metrics: Mapping[str, float]) -> None:
        """Write the evaluation of the model of an earlier step, with which the run ends."""
        ...
