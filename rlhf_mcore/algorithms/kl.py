"""The KL divergence from a reference or a teacher: estimators per token, distillation, and controllers of the weight of a penalty."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlhf_mcore.algorithms.interfaces import AdvantageInputs, Advantages, advantage_estimator
from rlhf_mcore.config.choices import KL_ESTIMATORS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.plugins import registering

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema import AlgorithmConfig


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


@advantage_estimator("distillation")
def distillation(inputs: AdvantageInputs, cfg: AlgorithmConfig) -> Advantages:
    """Ignore the scores and use only the teacher's advantages (Thinking Machines Lab 2025, On-Policy Distillation)."""
    return Advantages(torch.zeros(inputs.rewards.shape, dtype=torch.float32))


def reverse_kl(logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Estimate KL(student || teacher) at each sampled token: log pi_student - log pi_teacher, zero outside ``mask`` (k1).

    If the advantage is minus this estimate, the policy gradient is the gradient of the reverse KL of a token's distribution, with
    discount 0 (Agarwal et al. 2023, arXiv 2306.13649, without the gradient through the sampling of earlier tokens; Gu et al. 2023,
    arXiv 2306.08543, eq. 4). Its expectation is zero exactly if student and teacher agree.

    Args:
        logprobs: [N] logprobs of the student that has sampled the tokens, over the whole vocabulary.
        teacher_logprobs: [N], at the same temperature.
        mask: [N] bool.
    """
    return kl_penalty(logprobs, teacher_logprobs, "k1", mask=mask)


@dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence D: the sum over events of a term that depends on the teacher's probability t and the student's probability p.

    ``forward_kl`` is t log(t / p), ``reverse_kl`` p log(p / t). ``jsd`` is beta t log(t / m) + (1 - beta) p log(p / m) with
    m = beta t + (1 - beta) p: the generalised Jensen-Shannon divergence (Agarwal et al. 2023, arXiv 2306.13649, eq. 1). Divided by
    beta, it tends to the forward KL for small beta. Divided by 1 - beta, it tends to the reverse KL for beta near 1.
    """

    kind: str
    beta: float = 0.5
    coef: float = 1.0  # weight in the loss

    def terms(self, log_t: Tensor, log_p: Tensor) -> Tensor:
        """Compute the term of each event from finite logprobs. The result has their shape."""
        if self.kind == "forward_kl":
            return log_t.exp() * (log_t - log_p)
        if self.kind == "reverse_kl":
            return log_p.exp() * (log_p - log_t)
        log_m = self._log_mixture(log_t, log_p)
        return self.beta * log_t.exp() * (log_t - log_m) + (1 - self.beta) * log_p.exp() * (log_p - log_m)

    def slopes(self, log_t: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Compute p times the derivative of each term with respect to p [n, k + 1], and this derivative of the last event [n].

        Both results leave out a constant that is equal for all events. It does not change the gradient, because the probabilities of
        all events add up to 1.
        """
        if self.kind == "forward_kl":
            # The last event is the rest of the vocabulary. The clamp bounds its derivative if the student's probability is near 0.
            return -log_t.exp(), -(log_t[:, -1] - log_p[:, -1]).clamp(max=80.0).exp()
        slopes = log_p - log_t
        if self.kind == "jsd":
            slopes = (1 - self.beta) * (log_p - self._log_mixture(log_t, log_p))
        return log_p.exp() * slopes, slopes[:, -1]

    def _log_mixture(self, log_t: Tensor, log_p: Tensor) -> Tensor:
        return torch.logaddexp(math.log(self.beta) + log_t, math.log1p(-self.beta) + log_p)


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
