"""The scored responses that a rank sampled for a step, before the exchange converts them to rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rlhf_mcore.types import Prompt, Score, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """A scored trajectory. ``place`` is the index of its prompt among the prompts of the batch."""

    place: int
    trajectory: Trajectory
    score: Score


@dataclass(slots=True)
class SampledBatch:
    """The prompts of a step or of one batch within it, and the rollouts that this rank sampled for them.

    ``prompts`` are the same on every rank. ``rollouts`` is empty on ranks that do not lead an engine.
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    greedy: list[Rollout] = field(default_factory=list)  # baselines, not trained on
    left_out: list[Score] = field(default_factory=list)  # scores of rollouts whose prompts were removed from the step
    num_batches: int = 1  # batches sampled for the step; it consumes the prompts of all of them
    num_generated: int = 0  # candidate prompts of dynamic sampling; 0: the step does not select prompts
    num_informative: int = 0  # candidate prompts whose responses differ in score

    def keep(self, places: Sequence[int]) -> SampledBatch:
        """Return the batch with only the prompts at ``places``, in this order. Rollouts of other prompts are removed."""
        new_place = {old: new for new, old in enumerate(places)}
        return replace(
            self,
            prompts=[self.prompts[place] for place in places],
            rollouts=_renumber(self.rollouts, new_place),
            greedy=_renumber(self.greedy, new_place),
        )

    def separate_greedy(self, num_samples: int) -> SampledBatch:
        """Return the batch with rollouts of sample number ``num_samples`` or higher moved to ``greedy``."""
        return replace(
            self,
            rollouts=[rollout for rollout in self.rollouts if rollout.trajectory.sample < num_samples],
            greedy=[rollout for rollout in self.rollouts if rollout.trajectory.sample >= num_samples],
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the prompt selection, or {} if the step selected no prompts."""
        if not self.num_generated:
            return {}
        return {
            "rollout/num_batches": float(self.num_batches),
            "rollout/informative_fraction": self.num_informative / self.num_generated,
        }


def _renumber(rollouts: Sequence[Rollout], new_place: dict[int, int]) -> list[Rollout]:
    return [replace(rollout, place=new_place[rollout.place]) for rollout in rollouts if rollout.place in new_place]


# Trajectories -> a future of their scores, in order. The scores are computed in the background.
BeginScores = Callable[["Sequence[Trajectory]"], "Future[list[Score]]"]
# (number of missing prompts of the step, 0 at its start; index of the batch within the step) -> more prompts with their rollouts:
# the missing number, or a whole batch. Collective.
SampleBatch = Callable[[int, int], SampledBatch]
# Fills a step with prompts. Collective.
FillStep = Callable[[SampleBatch], SampledBatch]


def take_next_batch(sample: SampleBatch) -> SampledBatch:
    """Fill a step with the next batch of prompts, regardless of the scores."""
    return sample(0, 0)
