"""A reward model among the graders, on one rank and on three that hold different numbers of responses."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rlhf_mcore.rewards.reward import RuleReward
from rlhf_mcore.trainer import model_reward as module
from rlhf_mcore.trainer.evaluation import is_correct
from rlhf_mcore.trainer.model_reward import PART, ModelReward
from rlhf_mcore.types import Score, TrainBatch, Trajectory
from tests.unit.trainer.records import prompt, trajectory

pytestmark = pytest.mark.usefixtures("world")


class LastToken:
    """Says the id of a row's last token, and remembers how many rows it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        self.asked.append(len(batch.lengths))
        return batch.token_ids.gather(1, batch.lengths[:, None] - 1).squeeze(1).float()


class Rules:
    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.25, {"final_number": float(t.sample)}) for t in trajectories]


def test_its_weighted_score_is_added() -> None:
    made = [trajectory(prompt(0), 0, 3), trajectory(prompt(1), 1, 1)]
    found = ModelReward(Rules(), LastToken(), 0.5, 0).score(made)
    last = [float(t.response_ids[-1]) for t in made]
    assert [s.value for s in found] == [0.25 + 0.5 * value for value in last]
    assert [s.parts for s in found] == [
        {"final_number": k, PART: value} for k, value in zip((0.0, 1.0), last, strict=True)
    ]


def test_alone_it_is_the_score() -> None:
    made = [trajectory(prompt(2), 0, 2)]
    assert ModelReward(RuleReward([]), LastToken(), 2.0, 0).score(made) == [
        Score(2.0 * made[0].response_ids[-1], {PART: float(made[0].response_ids[-1])})
    ]
    assert ModelReward(RuleReward([]), LastToken(), 2.0, 0).score([]) == []


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_score_together_and_each_gets_its_own(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    held = [[trajectory(prompt(0), 0, 2), trajectory(prompt(0), 1, 4)], [], [trajectory(prompt(5), 0, 1)]]
    everyones = [t for part in held for t in part]
    sizes = torch.tensor([[len(t.prompt.prompt_ids), len(t.response_ids)] for t in everyones])
    tokens = torch.tensor([token for t in everyones for token in (*t.prompt.prompt_ids, *t.response_ids)])
    monkeypatch.setattr(module, "all_gather_json", lambda mine: [len(part) for part in held])
    monkeypatch.setattr(module, "all_gather_rows", lambda mine: sizes if mine.dim() == 2 else tokens)
    monkeypatch.setattr(module.dist, "get_rank", lambda: rank)
    model = LastToken()
    found = ModelReward(RuleReward([]), model, 1.0, 0).score(held[rank])
    assert [s.value for s in found] == [float(t.response_ids[-1]) for t in held[rank]]
    assert model.asked == [3]


def test_a_response_is_right_whatever_the_reward_model_thinks() -> None:
    assert is_correct(-3.0, {"final_number": 1.0, PART: -4.0})
    assert not is_correct(3.0, {"final_number": 0.0, PART: 3.0})
    assert is_correct(1.5, {PART: 1.5}) and not is_correct(0.5, {PART: 1.5})
