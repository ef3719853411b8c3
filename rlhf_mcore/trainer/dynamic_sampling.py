"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a step is filled with prompts whose responses differ in score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rlhf_mcore.algorithms.shaping import groups_that_differ
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.trainer.collecting import Attempt, Collected, Draw
from rlhf_mcore.trainer.rollouts import Rollouts

if TYPE_CHECKING:
    from rlhf_mcore.types import Prompt, Score


@dataclass(slots=True)
class DynamicSampling:
    """Draws batches until there are enough prompts to learn from. ``gather`` collects a JSON-able value of every rank."""

    max_batches: int
    gather: Callable[[Any], list[Any]] = all_gather_json
    drop: bool = False  # prompts that have a response without a score

    def collect(self, draw: Draw, attempt: Attempt) -> Collected:
        """As many prompts as the first batch has. Collective: the decisions follow from the scores of all ranks.

        The order is that in which prompts were drawn. If as many as ``max_batches`` such batches have do not give enough, prompts
        whose scores are all equal fill the step up: their group-relative advantages are zero.

        Raises:
            ConfigError: on every rank, if not one of the prompts has responses of different scores.
        """
        batches: list[_Batch] = []
        drawn = wanted = missing = 0
        while not batches or (missing > 0 and drawn < self.max_batches * wanted):
            prompts = draw(missing)
            rollouts, scores = attempt(prompts, len(batches))
            batches.append(self._judge(prompts, rollouts, scores))
            wanted, drawn = wanted or len(prompts), drawn + len(prompts)
            missing = wanted - sum(len(batch.informative) for batch in batches)
        if not any(batch.informative for batch in batches):
            raise ConfigError(_nothing_to_learn(batches, self.max_batches))
        return _assemble(batches)

    def _judge(self, prompts: Sequence[Prompt], rollouts: Rollouts, scores: Sequence[Score]) -> _Batch:
        mine = [
            (place, score.value, score.failure is not None)
            for place, score in zip(rollouts.positions, scores, strict=True)
        ]
        everyones = [entry for part in self.gather(mine) for entry in part]
        places = torch.tensor([place for place, *_ in everyones], dtype=torch.int64)
        values = torch.tensor([value for _, value, _ in everyones], dtype=torch.float64)
        dropped = {place for place, _, failed in everyones if failed and self.drop}
        informative = set(places[groups_that_differ(values, places)].tolist()) - dropped
        return _Batch(prompts, rollouts, scores, sorted(informative), dropped, set(values.tolist()))


@dataclass(slots=True)
class _Batch:
    prompts: Sequence[Prompt]
    rollouts: Rollouts
    scores: Sequence[Score]
    informative: list[int]  # places of prompts whose responses differ
    dropped: set[int]  # places of prompts that are not taken, whatever else there is
    values: set[float] = field(default_factory=set)  # all scores that were given


def _assemble(batches: list[_Batch]) -> Collected:
    wanted = len(batches[0].prompts)
    chosen = _choose(batches, wanted)
    new_place = {old: place for place, old in enumerate(chosen)}
    positions, trajectories, scores, left_out = [], [], [], []
    for number, batch in enumerate(batches):
        rows = zip(batch.rollouts.positions, batch.rollouts.trajectories, batch.scores, strict=True)
        for place, trajectory, score in rows:
            if (number, place) in new_place:
                positions.append(new_place[number, place])
                trajectories.append(trajectory)
                scores.append(score)
            else:
                left_out.append(score)
    return Collected(
        prompts=[batches[number].prompts[place] for number, place in chosen],
        rollouts=Rollouts(positions, trajectories),
        scores=scores,
        num_batches=len(batches),
        num_generated=sum(len(batch.prompts) for batch in batches),
        num_informative=sum(len(batch.informative) for batch in batches),
        left_out=left_out,
    )


def _choose(batches: list[_Batch], wanted: int) -> list[tuple[int, int]]:
    """(batch, place) of the step's prompts: the first informative ones, then what is needed of the others."""
    everything = [(number, place) for number, batch in enumerate(batches) for place in range(len(batch.prompts))]
    informative = [(number, place) for number, batch in enumerate(batches) for place in batch.informative]
    taken = set(informative)
    others = [each for each in everything if each not in taken and each[1] not in batches[each[0]].dropped]
    return sorted((informative + others)[:wanted])


def _nothing_to_learn(batches: list[_Batch], max_batches: int) -> str:
    values = set().union(*(batch.values for batch in batches))
    given = f"{min(values):g}" if len(values) == 1 else f"between {min(values):g} and {max(values):g}"
    num_prompts = sum(len(batch.prompts) for batch in batches)
    return (
        f"algorithm.dynamic_sampling.max_batches={max_batches} batches ({num_prompts} prompts) were generated and the "
        f"responses to each prompt got one and the same score (the scores are {given}): there is nothing to learn from. "
        "Look at the responses under rollouts/ and at the reward (reward.rules or reward.function); choose prompts in data.train "
        "that are neither too hard nor too easy for the model, or raise rollout.sampling.n or algorithm.dynamic_sampling.max_batches"
    )
