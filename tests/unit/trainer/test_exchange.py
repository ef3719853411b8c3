"""A world of one holds all trajectories; a data-parallel rank is a place given to the exchange."""

from __future__ import annotations

import random

import pytest
import torch

from rlhf_mcore.trainer.exchange import Exchange, Exchanged
from rlhf_mcore.types import Score, Trajectory
from tests.unit.trainer.records import prompt, rows_of, score, trajectory

pytestmark = pytest.mark.usefixtures("world")

SAMPLES = 3
PROMPTS = [prompt(i, length=1 + i % 3) for i in range(8)]


def made(seed: int = 0) -> tuple[list[int], list[Trajectory]]:
    """Trajectories of different lengths, in the order of an engine: prompt after prompt."""
    lengths = random.Random(seed)
    positions = [place for place in range(len(PROMPTS)) for _ in range(SAMPLES)]
    return positions, [trajectory(PROMPTS[p], k % SAMPLES, lengths.randint(1, 12)) for k, p in enumerate(positions)]


def exchange(dp_rank: int = 0, dp_size: int = 1, prompts_per_minibatch: int = 3) -> Exchange:
    return Exchange(dp_rank, dp_size, SAMPLES, prompts_per_minibatch, pad_token_id=0)


def call(which: Exchange, positions: list[int], trajectories: list[Trajectory]) -> Exchanged:
    return which(PROMPTS, positions, trajectories, [score(t) for t in trajectories])


def test_one_rank_has_every_row_whole() -> None:
    positions, trajectories = made()
    batch = call(exchange(), positions, trajectories).batch
    assert batch.row_ids.tolist() == list(range(24)) and batch.num_rows_global == 24
    rows = rows_of(batch)
    for row, (group, minibatch, ids, logprobs, value) in rows.items():
        source = trajectories[row]
        assert group == row // 3 == source.prompt.index
        assert minibatch == group // 3
        assert ids == PROMPTS[group].prompt_ids + source.response_ids
        assert logprobs == pytest.approx(source.rollout_logprobs, rel=1e-6)
        assert value == pytest.approx(group + (row % 3) / 10)
    assert batch.num_minibatches == 3  # 3 + 3 + 2 prompts


def test_the_order_of_arrival_does_not_matter() -> None:
    positions, trajectories = made()
    expected = call(exchange(), positions, trajectories)
    order = list(range(24))
    random.Random(5).shuffle(order)
    found = call(exchange(), [positions[k] for k in order], [trajectories[k] for k in order])
    assert rows_of(found.batch) == rows_of(expected.batch)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.response_lengths, expected.response_lengths)


@pytest.mark.parametrize("dp_size", [1, 2, 4, 5])
def test_ranks_share_the_same_rows_and_minibatches(dp_size: int) -> None:
    positions, trajectories = made()
    whole = rows_of(call(exchange(), positions, trajectories).batch)
    shares = [rows_of(call(exchange(rank, dp_size), positions, trajectories).batch) for rank in range(dp_size)]
    assert sum(len(share) for share in shares) == 24
    assert {row: value for share in shares for row, value in share.items()} == whole


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dp_size", [2, 4])
def test_ranks_get_nearly_equal_tokens_of_every_minibatch(dp_size: int, seed: int) -> None:
    positions, trajectories = made(seed)
    shares = [call(exchange(rank, dp_size), positions, trajectories).batch for rank in range(dp_size)]
    for minibatch in range(3):
        tokens = [int(share.lengths[share.minibatch_ids == minibatch].sum()) for share in shares]
        longest = max(int(share.lengths[share.minibatch_ids == minibatch].max()) for share in shares)
        assert max(tokens) - min(tokens) <= longest
        assert max(tokens) <= sum(tokens) / dp_size + longest / 2


def test_balance_by_hand() -> None:
    # Total lengths 9 9 | 5 5 | 3 3: each of two ranks gets one of each.
    prompts = [prompt(i, 1) for i in range(3)]
    trajectories = [trajectory(p, k, length) for p, length in zip(prompts, (8, 4, 2), strict=True) for k in (0, 1)]
    for rank in (0, 1):
        which = Exchange(rank, 2, 2, 3, pad_token_id=0)
        batch = which(prompts, [0, 0, 1, 1, 2, 2], trajectories, [Score(0.0)] * 6).batch
        assert sorted(batch.lengths.tolist()) == [3, 5, 9]


def test_more_ranks_than_rows_leave_some_without() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 0), trajectory(one[0], 1)]
    sizes = []
    for rank in range(3):
        batch = Exchange(rank, 3, 2, 1, 0)(one, [0, 0], trajectories, [Score(1.0), Score(0.0)]).batch
        sizes.append(len(batch.row_ids))
        assert batch.num_rows_global == 2 and batch.num_minibatches == 1
    assert sorted(sizes) == [0, 1, 1]


def test_a_prompt_that_a_step_holds_twice_makes_two_groups() -> None:
    twice = [PROMPTS[0], PROMPTS[0]]
    trajectories = [trajectory(PROMPTS[0], k % 2, length=k + 1) for k in range(4)]
    batch = Exchange(0, 1, 2, 2, 0)(twice, [0, 0, 1, 1], trajectories, [Score(float(k)) for k in range(4)]).batch
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.scores.tolist() == [0, 1, 2, 3]


def test_the_record_sees_all_rows() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 1, 5, "length"), trajectory(one[0], 0, 2)]
    scores = [Score(0.1, {"format": 1.0, "answer": 0.0}), Score(-2.0, {"format": 0.5})]
    found = Exchange(0, 1, 2, 1, 0)(one, [0, 0], trajectories, scores)
    assert found.scores.dtype == torch.float64 and found.scores.tolist() == [-2.0, 0.1]
    assert found.response_lengths.tolist() == [2, 5] and found.truncated.tolist() == [False, True]
    assert found.part_means == {"format": 0.75, "answer": 0.0}


def test_an_empty_response_keeps_its_row() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 0, 0), trajectory(one[0], 1, 2)]
    batch = Exchange(0, 1, 2, 1, 0)(one, [0, 0], trajectories, [Score(1.0), Score(2.0)]).batch
    assert batch.lengths.tolist() == [2, 4] and batch.loss_mask.sum(1).tolist() == [0, 2]
    assert batch.scores.tolist() == [1.0, 2.0]


def test_large_token_ids_are_exact() -> None:
    one = [prompt(0)]
    made_of = trajectory(one[0], 0, 2)
    made_of.response_ids = [2**31 - 1, 2**40 + 1]
    batch = Exchange(0, 1, 1, 1, 0)(one, [0], [made_of], [Score(0.0)]).batch
    assert batch.token_ids[0, 2:].tolist() == [2147483647, 1099511627777]


@pytest.mark.parametrize("fault", ["missing", "doubled", "replaced", "foreign"])
def test_a_lost_or_doubled_trajectory_is_an_error(fault: str) -> None:
    positions, trajectories = made()
    if fault == "missing":
        positions, trajectories = positions[:-1], trajectories[:-1]
    elif fault == "doubled":
        positions, trajectories = [*positions, positions[4]], [*trajectories, trajectories[4]]
    elif fault == "replaced":  # the number is right
        positions[5], trajectories[5] = positions[4], trajectories[4]
    else:
        positions[5] = 99
    with pytest.raises(RuntimeError, match=r"returned 2[345] trajectories, 24 different ones were asked for"):
        call(exchange(), positions, trajectories)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_an_error(value: float) -> None:
    positions, trajectories = made()
    scores = [score(t) for t in trajectories]
    scores[7].value = value
    with pytest.raises(RuntimeError, match=r"rows \[7\] of the step have no finite score"):
        exchange()(PROMPTS, positions, trajectories, scores)


def test_fewer_logprobs_than_tokens_are_an_error() -> None:
    positions, trajectories = made()
    trajectories[3].rollout_logprobs.append(0.0)
    with pytest.raises(ValueError, match="argument"):
        call(exchange(), positions, trajectories)
