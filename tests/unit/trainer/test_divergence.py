"""Update results that every rank knows decide whether a run continues."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mcore.trainer import divergence
from rlhf_mcore.trainer.divergence import DivergedError, share_results, stop_if_diverged
from rlhf_mcore.types import UpdateResult
from tests.messages import expect_error


def test_the_last_rank_that_has_a_model_tells_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[dict[str, Any]] = []

    def gather(mine: list[Any]) -> list[list[Any]]:
        return [mine, others, []]

    monkeypatch.setattr(divergence, "all_gather_json", gather)
    critic = UpdateResult("critic", {"loss/value": 0.5}, 2.0)
    assert share_results([critic, None]) == [critic]
    others += [
        {"model": "actor", "metrics": {"loss/total": 1.0}, "grad_norm": 3.0, "is_finite": False, "bad_in_a_row": 2},
        {"model": "critic", "metrics": {"loss/value": 0.25}, "grad_norm": 2.0, "is_finite": True, "bad_in_a_row": 1},
    ]
    assert share_results([critic, None]) == [
        UpdateResult("critic", {"loss/value": 0.25}, 2.0, bad_in_a_row=1),
        UpdateResult("actor", {"loss/total": 1.0}, 3.0, is_finite=False, bad_in_a_row=2),
    ]


def test_names_of_metrics_decide_nothing() -> None:
    named = {"actor/not_finite": 1.0, "actor/bad_updates_in_a_row": 99.0}
    stop_if_diverged([UpdateResult("actor", named, bad_in_a_row=1)], max_bad_updates=2)
    with expect_error(DivergedError, field="actor", value="2 updates"):
        stop_if_diverged([UpdateResult("actor", {}, bad_in_a_row=2)], max_bad_updates=2)
    with pytest.raises(DivergedError, match=r"state of critic are not finite"):
        stop_if_diverged([UpdateResult("actor", {}), UpdateResult("critic", {}, is_finite=False)], max_bad_updates=2)
