"""Fill a step with prompts: as they come here, chosen by their scores in ``dynamic_sampling``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory

# How many prompts a step misses, 0 at its beginning -> further ones: as many, or a whole batch.
Draw = Callable[[int], "list[Prompt]"]
# Prompts and the number of their batch within the step, from 0 -> them with the scored trajectories that this rank has drawn.
Attempt = Callable[["list[Prompt]", int], "Collected"]


@dataclass(slots=True)
class Collected:
    """The prompts of a step, or of a batch of it, equal on every rank, and the scored trajectories that this rank has drawn for them.

    ``positions``, ``trajectories`` and ``scores`` run in parallel. They are empty on ranks that do not lead an engine.
    """

    prompts: list[Prompt]
    positions: list[int]  # place of each trajectory's prompt in ``prompts``
    trajectories: list[Trajectory]
    scores: list[Score]
    num_batches: int = 1  # batches that were drawn for the step; their prompts are used up
    num_generated: int = 0  # prompts that were drawn and chosen from; 0: the step takes prompts as they come
    num_informative: int = 0  # those of them whose responses differ in score
    left_out: list[Score] = field(default_factory=list)  # of trajectories that were drawn and are not in the step

    def metrics(self) -> dict[str, float]:
        """Return metrics of the choice of prompts, if there was one."""
        if not self.num_generated:
            return {}
        return {
            "rollout/num_batches": float(self.num_batches),
            "rollout/informative_fraction": self.num_informative / self.num_generated,
        }


# Fills a step with prompts. Collective.
Collect = Callable[[Draw, Attempt], Collected]


def collect_next(draw: Draw, attempt: Attempt) -> Collected:
    """Take the next batch of prompts as it comes, whatever its scores."""
    return attempt(draw(0), 0)


def sampling_of_batch(sampling: Sampling, number: int) -> Sampling:
    """Return the sampling of batch ``number`` of a step: that of the first unchanged, those of later ones with other seeds.

    A data set smaller than the batches of a step draws a prompt again, which must not get the same responses.
    """
    return replace(sampling, seed=sampling.seed + (number << 32))


def take_out_greedy(collected: Collected, num_samples: int) -> dict[int, Score]:
    """Take the greedy responses out of what was collected. Returns their scores by the place of their prompt."""
    is_greedy = [trajectory.sample >= num_samples for trajectory in collected.trajectories]
    greedy = {collected.positions[k]: collected.scores[k] for k, out in enumerate(is_greedy) if out}
    sampled = [k for k, out in enumerate(is_greedy) if not out]
    collected.positions = [collected.positions[k] for k in sampled]
    collected.trajectories = [collected.trajectories[k] for k in sampled]
    collected.scores = [collected.scores[k] for k in sampled]
    return greedy
