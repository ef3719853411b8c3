"""Scalars of an optimizer's state that no optimizer can have: refused by name, before the optimizer is looked at."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.mcore.optimizer_state import load_optimizer_scalars

SCALER = {"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": 2}


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"step": 1}, "expected step and loss_scale"),
        ({"step": -1, "loss_scale": None}, "has step=-1, which is no count"),
        ({"step": 1.0, "loss_scale": None}, r"has step=1\.0, which is no count"),
        ({"step": True, "loss_scale": None}, "has step=True, which is no count"),
        ({"step": 1, "loss_scale": 65536.0}, "expected scale, growth_tracker and hysteresis_tracker"),
        ({"step": 1, "loss_scale": {"scale": 1.0}}, "expected scale, growth_tracker and hysteresis_tracker"),
        ({"step": 1, "loss_scale": {**SCALER, "scale": float("nan")}}, "loss scale of nan, not a positive"),
        ({"step": 1, "loss_scale": {**SCALER, "scale": 0}}, "loss scale of 0, not a positive"),
        ({"step": 1, "loss_scale": {**SCALER, "scale": "1"}}, "loss scale of '1', not a positive"),
        ({"step": 1, "loss_scale": {**SCALER, "growth_tracker": 0.5}}, "whose trackers are no counts"),
    ],
)
def test_scalars_that_cannot_be_are_refused(scalars: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_optimizer_scalars(cast(Any, None), scalars)
