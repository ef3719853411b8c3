"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): fill a step with prompts whose responses differ in score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_mcore.algorithms.advantages import groups_that_differ
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.trainer.batches import Rollout, SampleBatch, SampledBatch
from rlhf_mcore.types import Prompt, Score


@dataclass(slots=True)
class DynamicSampling:
    """Samples batches until a step has enough informative prompts. ``gather`` collects a JSON value from every rank."""

    max_batches: int
    gather: Callable[[Any], list[Any]] = all_gather_json
    drop: bool = False  # drop prompts with a response that has no score

    def fill_step(self, sample: SampleBatch) -> SampledBatch:
        """Sample until the number of informative prompts equals the size of the first batch. Collective, over scores of all ranks.

        Prompts keep the order in which they were sampled. If ``max_batches`` batches contain too few informative prompts, prompts
        whose scores are all equal fill the step. Their group-relative advantages are zero.

        Raises:
            ConfigError: on every rank, if no prompt has responses with different scores.
        """
        batches: list[SampledBatch] = []
        judged: list[_BatchSelection] = []
        num_sampled = wanted = missing = 0
        while not batches or (missing > 0 and num_sampled < self.max_batches * wanted):
            batch = sample(missing, len(batches))
            batches.append(batch)
            judged.append(self._judge(batch))
            wanted, num_sampled = wanted or len(batch.prompts), num_sampled + len(batch.prompts)
            missing = wanted - sum(len(of_batch.informative) for of_batch in judged)
        if not any(of_batch.informative for of_batch in judged):
            raise ConfigError(_nothing_to_learn(num_sampled, judged, self.max_batches))
        return _assemble(batches, judged)

    def _judge(self, batch: SampledBatch) -> _BatchSelection:
        mine = [(each.place, each.score.value, each.score.failure is not None) for each in batch.rollouts]
        everyones = [entry for part in self.gather(mine) for entry in part]
        places = torch.tensor([place for place, *_ in everyones], dtype=torch.int64)
        values = torch.tensor([value for _, value, _ in everyones], dtype=torch.float64)
        dropped = {place for place, _, failed in everyones if failed and self.drop}
        informative = set(places[groups_that_differ(values, places)].tolist()) - dropped
        return _BatchSelection(sorted(informative), dropped, set(values.tolist()))


@dataclass(slots=True)
class _BatchSelection:
    """A classification of a batch's prompts, by the scores of all ranks."""

    informative: list[int]  # indices of prompts whose responses differ in score
    dropped: set[int]  # indices of prompts that are never used, even if too few others remain
    values: set[float]  # all distinct scores


def _assemble(batches: Sequence[SampledBatch], judged: Sequence[_BatchSelection]) -> SampledBatch:
    """Concatenate the batches, and keep as many prompts as the first batch has."""
    chosen = set(_choose(batches, judged, len(batches[0].prompts)))
    prompts, rollouts, kept, left_out = list[Prompt](), list[Rollout](), list[int](), list[Score]()
    for number, batch in enumerate(batches):
        before = len(prompts)
        prompts += batch.prompts
        rollouts += [replace(each, place=before + each.place) for each in batch.rollouts]
        kept += [before + place for place in range(len(batch.prompts)) if (number, place) in chosen]
        left_out += [each.score for each in batch.rollouts if (number, each.place) not in chosen]
    whole = SampledBatch(
        prompts,
        rollouts,
        left_out=left_out,
        num_batches=len(batches),
        num_generated=len(prompts),
        num_informative=sum(len(of_batch.informative) for of_batch in judged),
    )
    return whole.keep(kept)


def _choose(batches: Sequence[SampledBatch], judged: Sequence[_BatchSelection], wanted: int) -> list[tuple[int, int]]:
    """Return (batch, index) of the step's prompts. Informative prompts are chosen first; others fill the step up to ``wanted``."""
    everything = [(number, place) for number, batch in enumerate(batches) for place in range(len(batch.prompts))]
    informative = [(number, place) for number, of_batch in enumerate(judged) for place in of_batch.informative]
    taken = set(informative)
    others = [each for each in everything if each not in taken and each[1] not in judged[each[0]].dropped]
    return sorted((informative + others)[:wanted])


def _nothing_to_learn(num_prompts: int, judged: Sequence[_BatchSelection], max_batches: int) -> str:
    values = set().union(*(of_batch.values for of_batch in judged))
    given = f"{min(values):g}" if len(values) == 1 else f"between {min(values):g} and {max(values):g}"
    return (
        f"algorithm.dynamic_sampling.max_batches={max_batches} batches ({num_prompts} prompts) were generated and the "
        f"responses to each prompt got one and the same score (the scores are {given}): there is nothing to learn from. "
        "Look at the responses under rollouts/ and at the reward (reward.rules or reward.function); choose prompts in data.train "
        "that are neither too hard nor too easy for the model, or raise rollout.sampling.n or algorithm.dynamic_sampling.max_batches"
    )
