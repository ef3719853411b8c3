"""Batches are sampled until a step is full of prompts to learn from, with the same decision on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.sampling.rollouts import request_seed, sampling_of_batch
from rlhf_mcore.trainer.batches import Rollout, SampledBatch, scored_rollouts
from rlhf_mcore.trainer.dynamic_sampling import DynamicSampling
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.types import Completion, Prompt, Request, Sampling, Score, Trajectory
from tests.episodes import resolved_future
from tests.unit.trainer.records import Streaming, batch_sampler, completions, prompt, rows_of, trajectory

pytestmark = pytest.mark.usefixtures("world")

SAMPLES = 2


Attempt = Callable[[list[Prompt], int], SampledBatch]


class Source:
    """Samples batches of ``size`` prompts, counting on, by ``attempt``."""

    def __init__(self, size: int, attempt: Attempt) -> None:
        self.size, self.attempt, self.batches = size, attempt, 0

    def __call__(self, missing: int, number: int) -> SampledBatch:
        self.batches += 1
        return self.attempt(
            [prompt(i) for i in range((self.batches - 1) * self.size, self.batches * self.size)], number
        )


def attempt_of(
    learnable: Callable[[int], bool], rank: int = 0, ranks: int = 1, log: list[int] | None = None
) -> Attempt:
    """Sample two responses per prompt, with scores 0 and 1 if the prompt's index is learnable, else 1 and 1."""

    def attempt(prompts: list[Prompt], number: int) -> SampledBatch:
        if log is not None:
            log.append(number)
        placed = [(place, sample) for place in range(rank, len(prompts), ranks) for sample in range(SAMPLES)]
        return SampledBatch(
            prompts,
            [
                Rollout(
                    place,
                    trajectory(prompts[place], sample),
                    Score(float(sample or not learnable(prompts[place].index))),
                )
                for place, sample in placed
            ],
        )

    return attempt


def with_scores(batch: SampledBatch, scores: Callable[[Rollout], Score]) -> SampledBatch:
    return replace(batch, rollouts=[replace(each, score=scores(each)) for each in batch.rollouts])


def names(sampled: SampledBatch) -> list[tuple[int, int]]:
    return [(each.trajectory.prompt.index, each.trajectory.sample) for each in sampled.rollouts]


def indices(sampled: SampledBatch) -> list[int]:
    return [p.index for p in sampled.prompts]


def places(sampled: SampledBatch) -> list[int]:
    return [each.place for each in sampled.rollouts]


def values(sampled: SampledBatch) -> list[float]:
    return [each.score.value for each in sampled.rollouts]


def test_a_batch_that_is_learnable_is_taken_as_it_is() -> None:
    attempt = attempt_of(lambda index: True)
    source = Source(4, attempt)
    sampled = DynamicSampling(max_batches=5).fill_step(source)
    batch = attempt([prompt(i) for i in range(4)], 0)
    assert (places(sampled), values(sampled)) == (places(batch), values(batch))
    assert names(sampled) == names(batch)
    assert indices(sampled) == [0, 1, 2, 3] and source.batches == sampled.num_batches == 1
    assert sampled.metrics() == {"rollout/num_batches": 1.0, "rollout/informative_fraction": 1.0}


def test_batches_are_drawn_until_the_step_is_full() -> None:
    # Multiples of 3: 0 and 3 of the first batch, 6 of the second, 9 of the third; what is left over of the third is not needed.
    log: list[int] = []
    source = Source(4, attempt_of(lambda i: i % 3 == 0 or i > 9, log=log))
    sampled = DynamicSampling(max_batches=9).fill_step(source)
    assert indices(sampled) == [0, 3, 6, 9] and log == [0, 1, 2]
    assert source.batches == sampled.num_batches == 3
    assert sampled.num_generated == 12 and sampled.num_informative == 6
    assert places(sampled) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert names(sampled) == [(i, k) for i in (0, 3, 6, 9) for k in range(SAMPLES)]
    assert values(sampled) == [0.0, 1.0] * 4
    assert sampled.metrics() == {"rollout/num_batches": 3.0, "rollout/informative_fraction": 0.5}


def test_what_is_missing_at_the_bound_is_filled_up() -> None:
    source = Source(3, attempt_of(lambda index: index in (2, 4)))
    sampled = DynamicSampling(max_batches=2).fill_step(source)
    assert indices(sampled) == [0, 2, 4]  # 0 teaches nothing and keeps the step whole
    assert source.batches == 2
    assert values(sampled) == [1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert places(sampled) == [0, 0, 1, 1, 2, 2]


def test_what_has_no_score_is_not_taken_where_it_drops_its_prompt() -> None:
    """Prompt 1 has different scores, but one is missing. Without other prompts the step is smaller."""

    def attempt(prompts: list[Prompt], number: int) -> SampledBatch:
        batch = attempt_of(lambda index: index < 3)(prompts, number)

        def scores(each: Rollout) -> Score:
            is_lost = each.trajectory.prompt.index in (1, 4) and each.trajectory.sample == 0
            return replace(each.score, failure="error" if is_lost else None)

        return with_scores(batch, scores)

    kept = DynamicSampling(2).fill_step(Source(3, attempt))
    assert indices(kept) == [0, 1, 2] and kept.num_batches == 1
    dropped = DynamicSampling(2, drop=True).fill_step(Source(3, attempt))
    assert indices(dropped) == [0, 2, 3] and dropped.num_informative == 2
    assert [score.failure for score in dropped.left_out] == ["error", None, "error", None, None, None]
    assert indices(DynamicSampling(1, drop=True).fill_step(Source(3, attempt))) == [0, 2]


@pytest.mark.parametrize("max_batches", [1, 3])
def test_it_ends_where_every_group_has_zero_variance(max_batches: int) -> None:
    source = Source(4, attempt_of(lambda index: False))
    with pytest.raises(ConfigError) as caught:
        DynamicSampling(max_batches).fill_step(source)
    assert source.batches == max_batches
    message = str(caught.value)
    words = [
        f"max_batches={max_batches}",
        f"({4 * max_batches} prompts)",
        "scores are 1)",
        "reward.rules",
        "data.train",
    ]
    assert [word for word in [*words, "rollout.sampling.n"] if word not in message] == []


def test_the_message_tells_prompts_that_are_all_right_and_all_wrong() -> None:
    def attempt(prompts: list[Prompt], number: int) -> SampledBatch:
        batch = attempt_of(lambda index: False)(prompts, number)
        return with_scores(batch, lambda each: Score(float(each.place % 2)))

    with pytest.raises(ConfigError, match="scores are between 0 and 1"):
        DynamicSampling(2).fill_step(Source(4, attempt))


def test_a_score_that_is_not_finite_is_left_to_the_exchange() -> None:
    def attempt(prompts: list[Prompt], number: int) -> SampledBatch:
        batch = attempt_of(lambda index: True)(prompts, number)
        return with_scores(batch, lambda each: Score(float("nan")) if each is batch.rollouts[0] else each.score)

    sampled = DynamicSampling(3).fill_step(Source(2, attempt))
    assert indices(sampled) == [0, 1] and sampled.num_batches == 1


def test_the_exchange_takes_what_was_sampled() -> None:
    sampled = DynamicSampling(9).fill_step(Source(4, attempt_of(lambda index: index % 3 == 0)))
    batch, _ = RowExchange(SAMPLES)(sampled)
    rows = rows_of(batch)
    assert len(rows) == 8
    for row, (group, ids, _, score) in enumerate(rows):
        index, sample = 3 * (row // 2), row % 2
        assert (group, score) == (row // 2, float(sample))
        assert ids == prompt(index).prompt_ids + trajectory(prompt(index), sample).sampled_ids.tolist()


class Meeting:
    """``all_gather_json`` among threads."""

    def __init__(self, size: int) -> None:
        self.barrier, self.values = threading.Barrier(size, timeout=60), [None] * size

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(value: Any) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            gathered = list(self.values)
            self.barrier.wait()
            return gathered

        return gather


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_that_hold_parts_decide_alike(ranks: int) -> None:
    """The last rank of five owns nothing of a batch of four, as one that does not lead an engine."""

    def learnable(index: int) -> bool:
        return index % 3 == 0

    meeting = Meeting(ranks)

    def body(rank: int) -> SampledBatch:
        sampler = DynamicSampling(9, gather=meeting.gather_of(rank))
        return sampler.fill_step(Source(4, attempt_of(learnable, rank, ranks)))

    with ThreadPoolExecutor(ranks) as pool:
        parts = list(pool.map(body, range(ranks)))
    whole = DynamicSampling(9).fill_step(Source(4, attempt_of(learnable)))
    for part in parts:
        assert (part.prompts, part.num_batches, part.metrics()) == (whole.prompts, whole.num_batches, whole.metrics())
    owned = [entry for part in parts for entry in zip(places(part), names(part), values(part), strict=True)]
    owned.sort(key=lambda entry: (entry[0], entry[1]))
    assert owned == list(zip(places(whole), names(whole), values(whole), strict=True))


def test_later_batches_of_a_step_have_seeds_of_their_own() -> None:
    sampling = Sampling(n=2, seed=7, temperature=0.5)
    assert sampling_of_batch(sampling, 0) == sampling
    seeds = {sampling_of_batch(sampling, number).seed for number in range(10)}
    assert len(seeds) == 10 and max(seeds) < 2**62
    assert sampling_of_batch(sampling, 3).temperature == 0.5


def test_it_goes_with_the_engines_of_the_loop() -> None:
    """The attempt that the loop makes of ``generate`` and a reward; a prompt that comes again gets other responses."""
    seen: list[int] = []

    class Engine(Streaming):
        def draw(self, requests: Sequence[Request]) -> list[Completion]:
            seen.append(requests[0].seed)
            return completions(requests)

    def grade(trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
        return resolved_future([Score(float(t.sample and t.prompt.index < 2)) for t in trajectories])

    def sample(missing: int, number: int) -> SampledBatch:
        prompts, sampling = [prompt(i) for i in range(4)], sampling_of_batch(Sampling(n=SAMPLES, seed=5), number)
        groups = batch_sampler(Engine()).sample_step(prompts, sampling, step=3, begin_scores=grade)
        return SampledBatch(prompts, scored_rollouts(groups))

    sampled = DynamicSampling(4).fill_step(sample)
    assert indices(sampled) == [0, 1, 0, 1]
    assert seen == [request_seed(5, 3, 0, 0), request_seed(5 + 2**32, 3, 0, 0)]
