from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf_mcore.trainer.evaluation import Evaluator
from rlhf_mcore.trainer.model_scores import ModelScores
from rlhf_mcore.types import Sampling, Score, TrainBatch
from tests.unit.trainer.records import prompt, trajectory
from tests.unit.trainer.test_evaluation import Engine, Reward, prompts

pytestmark = pytest.mark.usefixtures("world")


class LastToken:
    """Scores a response by its last token, a thousandth of it."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def compute_scores(self, batch: TrainBatch) -> Tensor:
        self.num_rows.append(len(batch.lengths))
        last = batch.token_ids.gather(1, (batch.lengths - 1)[:, None])[:, 0]
        return last.float() / 1000


def test_each_response_gets_the_score_of_its_own_row() -> None:
    model = LastToken()
    asked = [prompt(i) for i in (4, 2, 9)]
    owned = [trajectory(made_of, sample, 3) for made_of in asked for sample in range(2)][::-1]
    before = [Score(10.0 * t.sample, {"format": 1.0}) for t in owned]
    found = ModelScores(model, 0.5, pad_token_id=0, prompts_per_batch=2)(asked, 2, owned, before)
    # records.trajectory: token t of sample k of prompt i is 1000 (i + 1) + 100 k + t
    expected = [10.0 * t.sample + 0.5 * (t.prompt.index + 1 + t.sample / 10 + 0.002) for t in owned]
    assert [score.value for score in found] == pytest.approx(expected)
    assert all(score.parts == {"format": 1.0} for score in found)
    assert model.num_rows == [4, 2]


def test_in_an_evaluation_it_counts_for_the_reward_and_not_for_accuracy() -> None:
    sampling = Sampling(n=2, temperature=1.0)
    plain = Evaluator(prompts(), Engine(), Reward(), sampling, 1, 3)  # type: ignore[arg-type]
    model = LastToken()
    with_model = replace(plain, model_scores=ModelScores(model, 2.0, pad_token_id=0, prompts_per_batch=8))
    before, after = plain.run(1), with_model.run(1)
    # last tokens of prompts 0..3 (lengths 1..4), samples 0 and 1, in thousandths
    added = torch.tensor([(i + 1) + k / 10 + i / 1000 for i in range(4) for k in range(2)], dtype=torch.float64).mean()
    assert after["evaluate/reward"] == pytest.approx(before["evaluate/reward"] + 2 * float(added))
    assert {**after, "evaluate/reward": 0} == {**before, "evaluate/reward": 0}
