"""Controllers that change the weight of the KL from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_mcore.algorithms.kl_controller import check_state


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
        check_state(state, self.state_dict())
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
        check_state(state, self.state_dict())
        self._num_steps = int(state["num_steps"])
