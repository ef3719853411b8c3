"""A world of one holds all trajectories. What data-parallel ranks make of the rows is in tests/unit/roles."""

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


def call(positions: list[int], trajectories: list[Trajectory]) -> Exchanged:
    exchange = Exchange(SAMPLES, pad_token_id=0)
    return exchange(PROMPTS, positions, trajectories, [score(t) for t in trajectories])


def test_every_row_is_there_whole() -> None:
    positions, trajectories = made()
    rows = rows_of(call(positions, trajectories).batch)
    assert len(rows) == 24
    for row, (group, ids, logprobs, value) in enumerate(rows):
        source = trajectories[row]
        assert group == row // 3 == source.prompt.index
        assert ids == PROMPTS[group].prompt_ids + source.response_ids
        assert logprobs == pytest.approx(source.rollout_logprobs, rel=1e-6)
        assert value == group + (row % 3) / 10  # in double precision


def test_the_order_of_arrival_does_not_matter() -> None:
    positions, trajectories = made()
    trajectories[7].finish_reason = "length"
    expected = call(positions, trajectories).batch
    order = list(range(24))
    random.Random(5).shuffle(order)
    found = call([positions[k] for k in order], [trajectories[k] for k in order]).batch
    assert rows_of(found) == rows_of(expected)
    assert found.truncated.nonzero().tolist() == expected.truncated.nonzero().tolist() == [[7]]


def test_a_prompt_that_a_step_holds_twice_makes_two_groups() -> None:
    twice = [PROMPTS[0], PROMPTS[0]]
    trajectories = [trajectory(PROMPTS[0], k % 2, length=k + 1) for k in range(4)]
    batch = Exchange(2, 0)(twice, [0, 0, 1, 1], trajectories, [Score(float(k)) for k in range(4)]).batch
    assert batch.group_ids.tolist() == [0, 0, 1, 1] and batch.scores.tolist() == [0, 1, 2, 3]


def test_scores_parts_and_truncation_follow_their_rows() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 1, 5, "length"), trajectory(one[0], 0, 2)]
    scores = [Score(0.1, {"format": 1.0, "answer": 0.0}), Score(-2.0, {"format": 0.5})]
    found = Exchange(2, 0)(one, [0, 0], trajectories, scores)
    batch = found.batch
    assert batch.scores.dtype == torch.float64 and batch.scores.tolist() == [-2.0, 0.1]
    assert batch.loss_mask.sum(1).tolist() == [2, 5] and batch.truncated.tolist() == [False, True]
    assert found.part_means == {"format": 0.75, "answer": 0.0}


def test_an_empty_response_keeps_its_row() -> None:
    one = [prompt(0)]
    trajectories = [trajectory(one[0], 0, 0), trajectory(one[0], 1, 2)]
    batch = Exchange(2, 0)(one, [0, 0], trajectories, [Score(1.0), Score(2.0)]).batch
    assert batch.lengths.tolist() == [2, 4] and batch.loss_mask.sum(1).tolist() == [0, 2]
    assert batch.scores.tolist() == [1.0, 2.0]


def test_large_token_ids_are_exact() -> None:
    one = [prompt(0)]
    made_of = trajectory(one[0], 0, 2)
    made_of.response_ids = [2**31 - 1, 2**40 + 1]
    batch = Exchange(1, 0)(one, [0], [made_of], [Score(0.0)]).batch
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
        call(positions, trajectories)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_an_error(value: float) -> None:
    positions, trajectories = made()
    scores = [score(t) for t in trajectories]
    scores[7].value = value
    with pytest.raises(RuntimeError, match=r"rows \[7\] of the step have no finite score"):
        Exchange(SAMPLES, 0)(PROMPTS, positions, trajectories, scores)


def test_fewer_logprobs_than_tokens_are_an_error() -> None:
    positions, trajectories = made()
    trajectories[3].rollout_logprobs.append(0.0)
    with pytest.raises(ValueError, match="argument"):
        call(positions, trajectories)
