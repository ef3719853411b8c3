"""The scored responses of a step, as a rank holds them until the exchange makes rows of them."""

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
    """The prompts of a step, or of one batch of it, and the rollouts of them that this rank has sampled.

    ``prompts`` are the same on every rank. ``rollouts`` is empty on ranks that do not lead an engine.
    """

    prompts: list[Prompt]
    rollouts: list[Rollout]
    greedy: list[Rollout] = field(default_factory=list)  # baselines, which are not learned from
    left_out: list[Score] = field(default_factory=list)  # scores of rollouts whose prompts have left the step
    num_batches: int = 1  # batches that were sampled for the step; their prompts are used up
    num_generated: int = 0  # prompts that dynamic sampling has chosen from; 0: the step takes prompts as they come
    num_informative: int = 0  # those of them whose responses differ in score

    def keep(self, places: Sequence[int]) -> SampledBatch:
        """Return the batch with the prompts at ``places`` only, in this order. Rollouts of other prompts leave with them."""
        new_place = {old: new for new, old in enumerate(places)}
        return replace(
            self,
            prompts=[self.prompts[place] for place in places],
            rollouts=_renumber(self.rollouts, new_place),
            greedy=_renumber(self.greedy, new_place),
        )

    def separate_greedy(self, num_samples: int) -> SampledBatch:
        """Return the batch with the greedy responses, whose sample number is ``num_samples``, apart from the others."""
        return replace(
            self,
            rollouts=[rollout for rollout in self.rollouts if rollout.trajectory.sample < num_samples],
            greedy=[rollout for rollout in self.rollouts if rollout.trajectory.sample >= num_samples],
        )

    def metrics(self) -> dict[str, float]:
        """Return metrics of the choice of prompts; {} if there was none."""
        if not self.num_generated:
            return {}
        return {
            "rollout/num_batches": float(self.num_batches),
            "rollout/informative_fraction": self.num_informative / self.num_generated,
        }


def _renumber(rollouts: Sequence[Rollout], new_place: dict[int, int]) -> list[Rollout]:
    return [replace(rollout, place=new_place[rollout.place]) for rollout in rollouts if rollout.place in new_place]


# Trajectories -> their scores, in order, which are computed meanwhile.
BeginScores = Callable[["Sequence[Trajectory]"], "Future[list[Score]]"]
# The number of prompts that a step misses (0 at its beginning) and the number of the batch within the step, from 0 -> further prompts
# with their rollouts: as many as are missing, or a whole batch. Collective.
SampleBatch = Callable[[int, int], SampledBatch]
# Fills a step with prompts. Collective.
FillStep = Callable[[SampleBatch], SampledBatch]


def take_next_batch(sample: SampleBatch) -> SampledBatch:
    """Fill a step with the next batch of prompts, whatever its scores."""
    return sample(0, 0)
