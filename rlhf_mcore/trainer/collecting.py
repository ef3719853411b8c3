"""How a step is filled with prompts: as they come here, chosen by their scores in ``dynamic_sampling``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rlhf_mcore.trainer.rollouts import Rollouts
    from rlhf_mcore.types import Prompt, Sampling, Score

# How many prompts a step misses, 0 at its beginning -> further ones: as many, or a whole batch.
Draw = Callable[[int], "list[Prompt]"]
# Prompts and the number of the batch within the step, from 0 -> what this rank owns of their rollouts, and its scores.
Attempt = Callable[["Sequence[Prompt]", int], "tuple[Rollouts, list[Score]]"]


@dataclass(slots=True)
class Collected:
    """A step's prompts (equal on every rank) and what this rank owns of their rollouts, as the exchange wants them."""

    prompts: list[Prompt]
    rollouts: Rollouts
    scores: list[Score]
    num_batches: int = 1  # that were drawn; their prompts are used up, dropped or not
    num_generated: int = 0  # prompts that responses were drawn for, where they are chosen from
    num_informative: int = 0  # those among them whose responses differ in score
    left_out: list[Score] = field(default_factory=list)  # of what was drawn and is not in the step

    def metrics(self) -> dict[str, float]:
        """Of the choice, where there was one."""
        if not self.num_generated:
            return {}
        return {
            "rollout/num_batches": float(self.num_batches),
            "rollout/informative_fraction": self.num_informative / self.num_generated,
        }


class Collector(Protocol):
    """Fills a step with prompts. Collective."""

    def collect(self, draw: Draw, attempt: Attempt) -> Collected: ...


@dataclass(frozen=True, slots=True)
class PlainSampling:
    """Takes the prompts as they come."""

    def collect(self, draw: Draw, attempt: Attempt) -> Collected:
        """The next batch, whatever its scores."""
        prompts = draw(0)
        return Collected(prompts, *attempt(prompts, 0))


def sampling_of_batch(sampling: Sampling, number: int) -> Sampling:
    """The sampling of batch ``number`` of a step: the first is as ever, later ones have seeds of their own.

    A data set smaller than the batches of a step draws a prompt again, which must not get the same responses.
    """
    return replace(sampling, seed=sampling.seed + (number << 32))
