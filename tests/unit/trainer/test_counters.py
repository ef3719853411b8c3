from __future__ import annotations

import pytest

from rlhf_mcore.trainer.counters import Counters
from tests.rows import Row, batch_of

pytestmark = pytest.mark.usefixtures("world")


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
