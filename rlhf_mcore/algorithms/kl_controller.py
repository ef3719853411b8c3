"""A weight of the KL that stays. Controllers that change it are in ``kl_schedules``, loaded where a run has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_mcore.config.errors import ConfigError


class FixedKL:
    """A constant weight ``coef``. The state of this and of the other controllers is plain JSON values."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float) -> None:
        """End a step in which the mean KL per response token was ``kl`` nats, the same on every rank. Local; here nothing changes."""

    def state_dict(self) -> dict[str, Any]:
        return {"name": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state_dict())


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse the state of another controller than ``own`` is of."""
    if state.get("name") != own["name"]:
        raise ConfigError(
            f"cannot resume: algorithm.kl.controller.name was {state.get('name')} and is now {own['name']}; "
            "restore it, or start a new experiment"
        )
    if set(state) != set(own):
        raise ConfigError(f"the state of the KL controller has the keys {sorted(state)}, expected {sorted(own)}")
