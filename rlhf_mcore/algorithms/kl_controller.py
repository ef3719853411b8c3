"""Controllers, which change the weight of the KL from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import KLConfig


def build_kl_controller(cfg: KLConfig) -> KLController:
    """Build the controller of a valid, resolved configuration.

    Raises:
        ConfigError: an unknown name, or a number that the controller needs is null.
    """
    controller = cfg.controller
    if controller.name == "fixed":
        return FixedKL(cfg.coef)
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
        _check(state, self.state_dict())


class AdaptiveKL:
    """A log-space proportional controller (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    coef <- coef (1 + gain clip(kl / target - 1, -0.2, 0.2)); the paper's gain is 0.1. The paper's KL is per response, this one per
    token, as it is logged.
    """

    def __init__(self, coef: float, target: float, gain: float) -> None:
        self.coef = coef
        self._target = target
        self._gain = gain

    def update(self, kl: float) -> None:
        # NaN has no direction.
        if math.isnan(kl):
            return
        error = min(max(kl / self._target - 1.0, -0.2), 0.2)
        self.coef *= 1.0 + self._gain * error

    def state_dict(self) -> dict[str, Any]:
        return {"name": "adaptive", "coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check(state, self.state_dict())
        self.coef = float(state["coef"])


class LinearKL:
    """A weight that moves linearly from ``start`` in the first step to ``final`` in step number ``steps``, then stays."""

    def __init__(self, start: float, final: float, steps: int) -> None:
        self._start = start
        self._final = final
        self._steps = steps
        self._num_steps = 0

    @property
    def coef(self) -> float:
        if self._num_steps >= self._steps - 1:
            return self._final
        return self._start + (self._final - self._start) * self._num_steps / (self._steps - 1)

    def update(self, kl: float) -> None:
        self._num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"name": "linear", "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        _check(state, self.state_dict())
        self._num_steps = int(state["num_steps"])


KLController = FixedKL | AdaptiveKL | LinearKL


def _check(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if state.get("name") != own["name"]:
        raise ConfigError(
            f"cannot resume: algorithm.kl.controller.name was {state.get('name')} and is now {own['name']}; "
            "restore it, or start a new experiment"
        )
    if set(state) != set(own):
        raise ConfigError(f"the state of the KL controller has the keys {sorted(state)}, expected {sorted(own)}")
