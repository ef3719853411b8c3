"""Prompts become requests with unique seeds. The sampler checks that each requested response arrives once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlhf_mcore.data.sampler import WeightedSampler
from rlhf_mcore.protocols import EngineRank
from rlhf_mcore.sampling.engine_loop import LostTrajectory, check_completion
from rlhf_mcore.sampling.rollouts import request_of, request_seed
from rlhf_mcore.trainer.batches import BatchSampler
from rlhf_mcore.types import Completion, Job, Prompt, Request, Sampling
from tests.episodes import sample_rollouts
from tests.unit.trainer.records import Streaming

SIZES, BATCH, SAMPLES = [40, 8], 64, 8  # half of a step is from the second file, each of its rows four times


def completion(request_id: int, ids: Sequence[int], logprobs: Sequence[float], reason: str = "stop") -> Completion:
    return Completion(request_id, np.array(ids, np.int32), np.array(logprobs, np.float32), ((0, 4),), reason)


class Generating(Streaming):
    """Records its requests, and answers each with its number as the token, after ``change``."""

    def __init__(self, change: Callable[[list[Completion]], list[Completion]] = lambda drawn: drawn) -> None:
        super().__init__()
        self.change = change
        self.asked: list[Request] = []

    def draw(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked += requests
        return self.change([completion(request.request_id, [request.request_id], [0.0]) for request in requests])


def letters(rows: Sequence[Sequence[int]]) -> list[str]:
    return ["".join(chr(97 + token) for token in row) for row in rows]


def draw(prompts: Sequence[Prompt], num_engines: int, step: int = 3) -> dict[tuple[int, int], int]:
    """(place, sample) -> seed."""
    found = {}
    for index in range(num_engines):
        engine = Generating()
        by = BatchSampler(engine, EngineRank(index, num_engines), letters)
        rollouts = sample_rollouts(by, prompts, Sampling(n=SAMPLES, seed=5), step=step)
        for each, request in zip(rollouts, engine.asked, strict=True):
            assert each.trajectory.prompt.prompt_id == prompts[each.place].prompt_id
            assert request.prompt_ids == prompts[each.place].prompt_ids
            found[each.place, each.trajectory.sample] = request.seed
    return found


def step_of(sampler: WeightedSampler) -> list[Prompt]:
    rows = [Prompt(f"row-{i}", i, [1], "") for i in range(sum(SIZES))]
    return [rows[place] for place in sampler.next_batch()]


def weighted_sampler() -> WeightedSampler:
    return WeightedSampler(SIZES, [1.0, 1.0], BATCH, seed=1, shuffle=True)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
def test_a_prompt_that_a_step_holds_several_times_gets_other_seeds_each_time(num_engines: int) -> None:
    prompts = step_of(weighted_sampler())
    assert len({prompt.index for prompt in prompts}) < BATCH
    seeds = draw(prompts, num_engines)
    assert len(seeds) == len(set(seeds.values())) == BATCH * SAMPLES
    assert seeds == draw(prompts, 1)
    # At its first occurrence a row has the same seeds as without repetitions.
    assert seeds[0, 2] == request_seed(5, 3, prompts[0].index, 2)


def test_a_resumed_run_draws_with_the_same_seeds() -> None:
    whole, part = weighted_sampler(), weighted_sampler()
    steps = [step_of(whole) for _ in range(3)]
    step_of(part)
    resumed = weighted_sampler()
    resumed.load_state_dict(part.state_dict())
    assert [draw(step_of(resumed), 2, step) for step in (2, 3)] == [draw(steps[1], 2, 2), draw(steps[2], 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "digest"),
    [  # digests of the 32 bytes by coreutils: b2sum -l 64
        ((0, 0, 0, 0), "c50d124a8aaf41a1"),
        ((7, 3, 11, 2), "04d06870f3b5aa95"),
        ((1, 0, 0, 0), "3eea3990185ec82c"),
    ],
)
def test_seed_is_the_digest_without_its_lowest_bit(arguments: tuple[int, int, int, int], digest: str) -> None:
    reversed_bytes = "".join(digest[i : i + 2] for i in range(14, -2, -2))
    assert request_seed(*arguments) == int(reversed_bytes, 16) // 2


def test_neighbours_have_seeds_of_their_own_that_fit_in_an_int64() -> None:
    seeds = {request_seed(*arguments) for arguments in itertools.product(range(8), repeat=4)}
    assert len(seeds) == 8**4
    assert all(0 <= seed < 2**63 for seed in seeds)


PROMPTS = [Prompt("sum-17", 17, [5, 6, 7], "2+2"), Prompt("sum-4", 4, [5], "1")]


def responses(change: Callable[[list[Completion]], list[Completion]]) -> dict[tuple[str, int], str]:
    """Return the response texts of two samples of two prompts."""
    drawn = BatchSampler(Generating(change), EngineRank(), letters).sample(PROMPTS, Sampling(n=2), step=0)
    return {(t.prompt.prompt_id, t.sample): t.response_text for t in drawn}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_completions_may_come_in_any_order(order: Sequence[int]) -> None:
    found = responses(lambda drawn: [drawn[place] for place in order])
    assert found == {("sum-17", 0): "a", ("sum-17", 1): "b", ("sum-4", 0): "c", ("sum-4", 1): "d"}
    assert list(found) == [("sum-17", 0), ("sum-17", 1), ("sum-4", 0), ("sum-4", 1)], "in the order of the prompts"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda drawn: drawn[:-1], "no completion for prompt 'sum-4', sample 1"),
        (lambda drawn: [], "no completion for prompt 'sum-17', sample 0; prompt 'sum-17', sample 1"),
        (lambda drawn: [*drawn, drawn[1]], "request 1, which was not made or had its answer"),
        (lambda drawn: [*drawn[:2], drawn[0], drawn[3]], "request 0, which was not made or had its answer"),
        (lambda drawn: [*drawn[:3], completion(9, [1], [0.0])], "request 9, which was not made"),
    ],
)
def test_fault_25_a_lost_doubled_or_foreign_completion_is_named(
    change: Callable[[list[Completion]], list[Completion]], message: str
) -> None:
    with pytest.raises(LostTrajectory, match=message):
        responses(change)
    with pytest.raises(LostTrajectory, match=message):
        sample_rollouts(BatchSampler(Generating(change), EngineRank(), letters), PROMPTS, Sampling(n=2), step=0)


def test_fault_25_a_rank_that_does_not_lead_returns_nothing() -> None:
    engine = Generating()
    assert BatchSampler(engine, EngineRank(0, 1, is_lead=False), letters).sample(PROMPTS, Sampling(), step=0) == []
    assert not engine.asked  # no rank sends it passes


def test_trajectories_carry_everything() -> None:
    [one] = BatchSampler(
        Generating(lambda drawn: [completion(0, [8, 9], [-0.1, -0.2], "length")]), EngineRank(), letters
    ).sample(PROMPTS[:1], Sampling(), step=0)
    assert (one.prompt, one.sample, one.versions) == (PROMPTS[0], 0, ((3, 4),))
    assert (one.token_ids.tolist(), one.sampled_ids.tolist(), one.response_text) == ([5, 6, 7, 8, 9], [8, 9], "ij")
    assert one.sampled_logprobs.tolist() == pytest.approx([-0.1, -0.2]) and one.finish_reason == "length"


REQUEST = Request(3, "prompt 'sum-17', sample 3", [5, 6, 7], Sampling(), 0)


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (completion(3, [], [], "stop"), "no token"),
        (completion(3, [1, 2], [-0.5], "stop"), "1 logprobs for 2 tokens"),
        (completion(3, [1], [-0.5, -0.5], "stop"), "2 logprobs for 1 tokens"),
        (completion(3, [1, 2], [-0.5, float("nan")], "stop"), "nan at token 1"),
        (completion(3, [1], [float("-inf")], "stop"), "-inf at token 0"),
        (completion(3, [1], [0.5], "stop"), "0.5 at token 0"),
        (completion(3, [1], [-0.5], "abort"), "'abort'"),
    ],
)
def test_what_must_not_be_trained_on_is_refused_by_name(drawn: Completion, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as raised:
        check_completion(REQUEST, drawn)
    assert "'sum-17', sample 3" in str(raised.value)
    with pytest.raises(RuntimeError, match=message):  # for sample 0
        responses(lambda _: [replace(drawn, request_id=0)])


def test_beside_the_samples_of_a_prompt_one_greedy_response_is_drawn() -> None:
    prompts = [Prompt(f"row-{i}", i, [1, i], "") for i in range(3)]
    sampling = Sampling(n=2, temperature=0.7, top_p=0.9, top_k=5, seed=5)
    engines = [Generating(), Generating()]
    for engine, wanted in zip(engines, (replace(sampling, baseline=True), sampling), strict=True):
        by = BatchSampler(engine, EngineRank(), letters)
        rollouts = sample_rollouts(by, prompts, wanted, step=3)
        places, made = [each.place for each in rollouts], [each.trajectory for each in rollouts]
        assert places == [place for place in range(3) for _ in range(wanted.num_responses)]
        assert [t.sample for t in made] == list(range(wanted.num_responses)) * 3
        # Each trajectory holds the number of its request, and is of the prompt that this one was for.
        asked = {request.request_id: request for request in engine.asked}
        assert [asked[int(t.sampled_ids[0])].prompt_ids for t in made] == [[1, place] for place in places]
    greedy = [request for request in engines[0].asked if request.sampling.temperature == 0]
    assert [request.prompt_ids for request in greedy] == [[1, 0], [1, 1], [1, 2]]
    assert all((request.sampling.top_p, request.sampling.top_k) == (1.0, -1) for request in greedy)
    # The samples are the same as without it.
    drawn = [
        (r.prompt_ids, r.seed, r.sampling.temperature, r.sampling.top_k) for r in engines[0].asked if r not in greedy
    ]
    assert drawn == [(r.prompt_ids, r.seed, r.sampling.temperature, r.sampling.top_k) for r in engines[1].asked]


def test_no_support_is_asked_of_a_greedy_response() -> None:
    sampling = Sampling(n=1, top_k=5, records_support=True, baseline=True)
    sampled, greedy = (request_of(Job(k, Prompt("p", 0, [1], ""), k, sampling, 1)) for k in range(2))
    assert (sampled.sampling.records_support, greedy.sampling.records_support) == (True, False)
    check_completion(greedy, completion(1, [4], [-0.5]))
    with pytest.raises(RuntimeError, match="did not record"):
        check_completion(sampled, completion(0, [4], [-0.5]))
