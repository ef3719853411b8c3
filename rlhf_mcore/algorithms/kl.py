"""The KL divergence between the policy and a reference: estimators per token, and controllers of its weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlhf_mcore.config.choices import KL_ESTIMATORS, registering
from rlhf_mcore.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


KLFunction = Callable[["Tensor", float], "Tensor"]  # (d = ref_logprobs - logprobs, limit) -> estimate
ESTIMATORS: dict[str, KLFunction] = {}
kl_estimator = registering(ESTIMATORS, KL_ESTIMATORS)

# exp(20) is 4.9e8: far outside the range of a healthy run, and far from the float32 overflow at exp(88).
MAX_LOG_RATIO = 20.0


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: str, *, mask: Tensor | None = None, clip: float | None = None
) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token (J. Schulman, "Approximating KL divergence", 2020).

    With d = ref_logprobs - logprobs for tokens sampled from the policy:

    - ``k1`` = -d: unbiased, high variance, may be negative;
    - ``k2`` = d^2 / 2: biased, low variance;
    - ``k3`` = exp(d) - 1 - d: unbiased and never negative (GRPO, arXiv 2402.03300, eq. 4).

    These properties refer to the value. As a loss, differentiated through ``logprobs``, k1 has an expected gradient of zero
    (E[grad logprobs] = 0), and k2 has the gradient of the KL itself.

    k3 grows as exp(d): at d = 12, one token outweighs 10^5 typical tokens. ``clip`` limits the value of ``k2`` and ``k3``; verl,
    OpenRLHF and slime use 10. A token beyond the limit has the value ``clip`` and no gradient. ``k1`` grows only linearly and is never
    limited. For k3, d is also clamped from above at ``MAX_LOG_RATIO``, so that k3 does not overflow without ``clip``.

    Args:
        logprobs, ref_logprobs: same shape, padded [B, T] or packed [1, N].
        estimator: one of ``ESTIMATORS``.
        mask: bool of the same shape. Outside the mask the result is 0, and the inputs affect neither value nor gradient.
        clip: largest value of a token in nats, above 0; None: no limit.

    Returns:
        The shape of the inputs, at least float32.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {estimator!r}: use one of {', '.join(ESTIMATORS)}")
    log_ratio = at_least_float32(ref_logprobs) - at_least_float32(logprobs)
    if mask is not None:
        log_ratio = torch.where(mask, log_ratio, 0)
    return ESTIMATORS[estimator](log_ratio, math.inf if clip is None else clip)


@kl_estimator("k1")
def k1(log_ratio: Tensor, limit: float) -> Tensor:
    return -log_ratio


@kl_estimator("k2")
def k2(log_ratio: Tensor, limit: float) -> Tensor:
    return (0.5 * log_ratio.square()).clamp(max=limit)


@kl_estimator("k3")
def k3(log_ratio: Tensor, limit: float) -> Tensor:
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=limit)


def at_least_float32(values: Tensor) -> Tensor:
    """Return ``values`` in float32, or unchanged if they are wider, because differences of bf16 logprobs have no precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class FixedKL:
    """A constant weight ``coef``. The state of every controller contains only JSON values."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl: float) -> None:
        """End a step with a mean KL of ``kl`` nats per response token, equal on every rank. Local. This controller ignores it."""

    def state_dict(self) -> dict[str, Any]:
        return {"name": "fixed"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self.state_dict())


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check that ``state`` belongs to the controller whose state is ``own``.

    Raises:
        ConfigError: it belongs to another controller, or has other keys.
    """
    if state.get("name") != own["name"]:
        raise ConfigError(
            f"cannot resume: algorithm.kl.controller was {state.get('name')} and is now {own['name']}; "
            "restore it, or start a new experiment"
        )
    if set(state) != set(own):
        raise ConfigError(f"the state of the KL controller has the keys {sorted(state)}, expected {sorted(own)}")


class AdaptiveKL:
    """A log-space proportional controller (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    coef <- coef (1 + gain clip(kl / target - 1, -0.2, 0.2)). The paper's gain is 0.1. The paper's KL is per response; this KL is per
    token, as in the logged metric.
    """

    def __init__(self, coef: float, target: float, gain: float) -> None:
        self.coef = coef
        self._target = target
        self._gain = gain

    def update(self, kl: float) -> None:
        # A NaN gives no direction for a change.
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
    """A weight that changes linearly from ``start`` in the first step to ``final`` in step number ``steps``, then stays constant."""

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
