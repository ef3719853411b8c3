"""A reward model among the graders, on one rank and on three that hold different numbers of responses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.reward import RuleReward
from rlhf_mcore.trainer.evaluation import is_correct
from rlhf_mcore.trainer.model_reward import PART, ModelReward
from rlhf_mcore.types import Score, TrainBatch, Trajectory
from tests.rows import padded_batch
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.trainer.records import prompt, trajectory

pytestmark = pytest.mark.usefixtures("world")


class LastToken:
    """Says the id of a row's last token, and remembers how many rows it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        self.asked.append(len(batch.lengths))
        return padded_batch(batch).token_ids.long().gather(1, batch.lengths[:, None] - 1).squeeze(1).float()


class Rules:
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.25, {"final_number": float(t.sample)}) for t in trajectories]


def test_its_weighted_score_is_added() -> None:
    made = [trajectory(prompt(0), 0, 3), trajectory(prompt(1), 1, 1)]
    found = run(ModelReward(Rules(), LastToken().compute_scores, 0.5).score(made))
    last = [float(t.token_ids[-1]) for t in made]
    assert [s.value for s in found] == [0.25 + 0.5 * value for value in last]
    assert [s.parts for s in found] == [
        {"final_number": k, PART: value} for k, value in zip((0.0, 1.0), last, strict=True)
    ]


def test_alone_it_is_the_score() -> None:
    made = [trajectory(prompt(2), 0, 2)]
    assert run(ModelReward(RuleReward([]), LastToken().compute_scores, 2.0).score(made)) == [
        Score(2.0 * float(made[0].token_ids[-1]), {PART: float(made[0].token_ids[-1])})
    ]
    assert run(ModelReward(RuleReward([]), LastToken().compute_scores, 2.0).score([])) == []


@pytest.mark.usefixtures("rank_threads")
def test_ranks_score_together_and_each_gets_its_own() -> None:
    held = [[trajectory(prompt(0), 0, 2), trajectory(prompt(0), 1, 4)], [], [trajectory(prompt(5), 0, 1)]]

    def body(group: ThreadGroup) -> tuple[list[float], list[int]]:
        model = LastToken()
        found = run(ModelReward(RuleReward([]), model.compute_scores, 1.0).score(held[group.rank()]))
        return [s.value for s in found], model.asked

    for mine, (values, asked) in zip(held, run_ranks(3, body), strict=True):
        assert values == [float(t.token_ids[-1]) for t in mine]
        assert asked == [3]


def test_a_response_is_right_whatever_the_reward_model_thinks() -> None:
    assert is_correct(-3.0, {"final_number": 1.0, PART: -4.0})
    assert not is_correct(3.0, {"final_number": 0.0, PART: 3.0})
    assert is_correct(1.5, {PART: 1.5}) and not is_correct(0.5, {PART: 1.5})
