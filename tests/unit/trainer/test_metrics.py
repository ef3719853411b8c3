from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rlhf_mcore.trainer.exchange import ScoreFacts
from rlhf_mcore.trainer.metrics import Counters, agreement_metrics, rollout_metrics, source_metrics
from rlhf_mcore.types import TrainBatch
from tests.rows import Row, batch_of, flat
from tests.unit.trainer.records import prompt

pytestmark = pytest.mark.usefixtures("world")


def batch() -> TrainBatch:
    rows = [Row([1], [2, 3], [-1.0, -2.0], 0.0), Row([1, 1], [2], [-0.5], 0.0)]
    return batch_of(rows, [0, 0])


def test_rewards_and_lengths_by_hand() -> None:
    # Prompts are of different lengths, and do not count.
    responses = {2: 1.0, 4: 0.0, 6: 0.0, 8: 3.0}
    rows = [Row([7] * (10 - n), [1] * n, [0.0] * n, score, truncated=n == 8) for n, score in responses.items()]
    facts = ScoreFacts({"format": 0.25}, {"error": 2, "timeout": 0}, num_dropped=3)
    assert rollout_metrics(batch_of(rows, [0, 0, 1, 1]), facts) == {
        "reward/errors": 2.0,
        "reward/timeouts": 0.0,
        "reward/dropped_prompts": 3.0,
        "reward/mean": 1.0,
        "reward/std": pytest.approx(math.sqrt(1.5)),  # squares of 0, 1, 1, 2 over 4
        "reward/max": 3.0,
        "reward/min": 0.0,
        "reward/format_mean": 0.25,
        "rollout/response_length_mean": 5.0,
        "rollout/response_length_max": 8.0,
        "rollout/truncated_fraction": 0.25,
        "rollout/num_tokens": 20.0,
    }


def test_what_teaches_nothing_is_counted_per_source_by_hand() -> None:
    scores = [1.0, 0.0, 0.0, 0.0, 2.0, 2.0]  # three prompts of two responses
    made = batch_of([Row([1], [2], [0.0], score) for score in scores], [0, 0, 1, 1, 2, 2])

    def metrics(*sources: str, **unread: int) -> dict[str, float]:
        made.prompts = [replace(prompt(number), data_source=source) for number, source in enumerate(sources)]
        return source_metrics(made, ScoreFacts(unread=unread))

    assert metrics("a", "a", "a", a=4) == pytest.approx(
        {
            "reward/share_zero": 0.5,
            "reward/share_max": 1 / 3,
            "reward/share_same": 2 / 3,
            "reward/parse_failures": 4.0,
        }
    )
    found = metrics("a", "b", "a", a=1, c=2)  # all prompts of c have left the step
    assert found == pytest.approx(
        {
            "reward/share_zero": 0.5,
            "reward/share_max": 1 / 3,
            "reward/share_same": 2 / 3,
            "reward/parse_failures": 3.0,
            "reward/parse_failures/a": 1.0,
            "reward/parse_failures/b": 0.0,
            "reward/parse_failures/c": 2.0,
            "reward/share_max/a": 0.5,
            "reward/share_max/b": 0.0,
            "reward/mean/a": 1.25,
            "reward/share_zero/a": 0.25,
            "reward/share_same/a": 0.5,
            "reward/mean/b": 0.0,
            "reward/share_zero/b": 1.0,
            "reward/share_same/b": 1.0,
        }
    )


def test_agreement_of_engine_and_trainer_by_hand() -> None:
    made = batch()
    made.old_logprobs = flat(made, torch.tensor([[9.0, -1.25, -2.0], [9.0, 9.0, -1.5]]))  # 9: not a response token
    assert agreement_metrics(made) == {
        "rollout/logprob_diff_mean": pytest.approx((0.25 + 0.0 + 1.0) / 3),
        "rollout/logprob_diff_max": 1.0,
        "rollout/logprob_exact": pytest.approx(1 / 3),
    }


def test_agreement_of_no_rows_is_zero() -> None:
    made = batch_of([], [])
    made.old_logprobs = torch.zeros(made.token_ids.shape)
    assert agreement_metrics(made) == {
        "rollout/logprob_diff_mean": 0.0,
        "rollout/logprob_diff_max": 0.0,
        "rollout/logprob_exact": 1.0,
    }


def test_steps_prompts_samples_and_tokens_are_counted_apart() -> None:
    rows = [Row([1], [2] * n, [-1.0] * n, 0.0) for n in (3, 1, 2, 4)]
    batch = batch_of(rows, group_ids=[0, 0, 1, 1])
    counters = Counters()
    assert counters.count(batch) == {"progress/prompts": 2, "progress/samples": 4, "progress/tokens": 10}
    counters.count(batch)
    resumed = Counters()
    resumed.load_state_dict(counters.state_dict())
    assert resumed == Counters(steps=2, prompts=4, samples=8, tokens=20)
    assert resumed.count(batch)["progress/tokens"] == 30
