"""The weight of the KL in each step, by a controller. Those that change it are in ``kl_schedules``, loaded where a run has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import KLConfig

if TYPE_CHECKING:
    from rlhf_mcore.algorithms.kl_schedules import AdaptiveKL, LinearKL

KLController = Union["FixedKL", "AdaptiveKL", "LinearKL"]


def build_kl_controller(cfg: KLConfig) -> KLController:
    """Build the controller of a valid, resolved configuration.

    Raises:
        ConfigError: an unknown name, or a number that the controller needs is null.
    """
    controller = cfg.controller
    if controller.name == "fixed":
        return FixedKL(cfg.coef)
    if controller.name != "fixed":
        from rlhf_mcore.algorithms.kl_schedules import AdaptiveKL, LinearKL
    if controller.name == "adaptive" and controller.target is not None:
        return AdaptiveKL(cfg.coef, controller.target, controller.gain)
    if controller.name == "linear" and controller.final is not None and controller.steps is not None:
        return LinearKL(cfg.coef, controller.final, controller.steps)
    raise ConfigError(
        f"algorithm.kl.controller={controller}: name must be fixed, adaptive (with target) or linear (with final and steps)"
    )


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
