"""How many drafts were taken, over the responses of all ranks."""

from __future__ import annotations

import pytest
import torch

from rlhf_mcore.trainer.metrics import draft_metrics
from tests.unit.parallel.world import ThreadGroup, run_ranks


@pytest.mark.usefixtures("rank_threads")
def test_acceptance_by_depth_is_that_of_all_ranks() -> None:
    """Four passes accept 2 of 2, 0 of 2 and 1 of 1 drafts, and 1 of 3 on the second rank. The third rank has no passes."""
    fields = [[[0, 0], [2, 2], [2, 0], [1, 1]], [[3, 1], [0, 0]], []]

    def body(group: ThreadGroup) -> dict[str, float]:
        return draft_metrics(torch.tensor(fields[group.rank()], dtype=torch.int16).reshape(-1, 2))

    shares = {1: 3 / 4, 2: 1 / 3, 3: 0.0}
    expected = {f"rollout/draft_acceptance/{depth}": share for depth, share in shares.items()}
    assert run_ranks(3, body) == [expected | {"rollout/draft_pass_tokens": 2.0}] * 3
    fields = [[[0, 0]], [], []]
    assert run_ranks(3, body) == [{}] * 3, "nothing was drafted"
