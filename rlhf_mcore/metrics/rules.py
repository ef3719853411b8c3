"""Rules for unhealthy metrics, with remedies: for the report's verdicts, alarms and docs/reference/metrics.md.

The bounds are rules of thumb for policy-gradient training of language models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

RECENT_SHARE, RECENT_MOST = 0.1, 20  # share and maximum number of values in the "recent" mean
GOOD, WATCH, BAD, UNKNOWN = "good", "watch", "bad", "unknown"


@dataclass(frozen=True, slots=True)
class Series:
    """The reported values of a metric, in order; at least one."""

    values: Sequence[float]

    @property
    def recent(self) -> float:
        """Mean of the last tenth of the values, at least one and at most 20."""
        return fmean(self.values[-self._window :])

    @property
    def early(self) -> float:
        """Mean of the first tenth, with the same limits."""
        return fmean(self.values[: self._window])

    @property
    def _window(self) -> int:
        return min(max(int(len(self.values) * RECENT_SHARE), 1), RECENT_MOST)


@dataclass(frozen=True, slots=True)
class Measure:
    """The number that a rule judges: ``of_run`` for a whole run, ``now`` for its last step, which requires ``least`` values."""

    text: str
    of_run: Callable[[Series], float]
    now: Callable[[Series], float]
    least: int = 1


def _growth(series: Series) -> float:
    return series.recent / series.early if series.early > 0 else 1.0


def _over_median(value: float, series: Series) -> float:
    middle = median(series.values)
    return value / middle if middle > 0 else 1.0


MEASURES = {
    "value": Measure("the largest value", lambda series: max(series.values), lambda series: series.values[-1]),
    "mean": Measure("the recent mean", lambda series: series.recent, lambda series: series.recent),
    "growth": Measure("the recent mean divided by the early mean", _growth, _growth, least=20),
    "spike": Measure(
        "the largest value divided by the median",
        lambda series: _over_median(max(series.values), series),
        lambda series: _over_median(series.values[-1], series),
        least=20,
    ),
}


@dataclass(frozen=True, slots=True)
class MetricRule:
    """Judges the ``measure`` of ``metric``: a run needs attention from ``watch`` on, and is bad from ``bad`` on.

    If ``watch`` is above ``bad``, small numbers are bad. ``counts``: the metric is a number of responses, judged as a share
    of the step's responses. ``alarm_steps``: number of consecutive bad steps that raise an alarm; 0: no alarm by default.
    """

    name: str
    metric: str
    measure: str  # a key of MEASURES
    watch: float
    bad: float
    shown: Callable[[float], str]
    meaning: str
    remedy: str
    counts: bool = False
    alarm_steps: int = 0

    def judge(self, value: float) -> str:
        sign = 1.0 if self.bad > self.watch else -1.0
        if sign * value >= sign * self.bad or math.isnan(value):
            return BAD
        return WATCH if sign * value >= sign * self.watch else GOOD


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_times, _plain = "{:.2f} times".format, "{:.3g}".format


RULES = (
    MetricRule(
        "KL of an update",
        "actor/approx_kl",
        "mean",
        0.05,
        0.3,
        _plain,
        "change of the policy by one step's updates",
        "lower actor.optimizer.lr, or make fewer updates per rollout (trainer.ppo_epochs, trainer.minibatch_size)",
        alarm_steps=3,
    ),
    MetricRule(
        "KL to the reference",
        "kl/mean",
        "mean",
        1.0,
        10.0,
        _plain,
        "distance of the policy from its starting point, per token",
        "raise algorithm.kl.coef, or lower the learning rate; read responses, because the policy may exploit the reward",
        alarm_steps=3,
    ),
    MetricRule(
        "remaining entropy",
        "actor/entropy",
        "growth",
        0.3,
        0.05,
        _percent,
        "recent entropy divided by the early entropy; without entropy the policy does not explore",
        "lower the learning rate, raise the upper clip bound (algorithm.clip_high), or set algorithm.entropy_coef",
        alarm_steps=3,
    ),
    MetricRule(
        "response length",
        "rollout/response_length_mean",
        "growth",
        2.5,
        5.0,
        _times,
        "recent length divided by the early length",
        "read the longest responses; if they ramble, penalise lengths near the limit (algorithm.overlong)",
    ),
    MetricRule(
        "truncated responses",
        "rollout/truncated_fraction",
        "mean",
        0.2,
        0.5,
        _percent,
        "responses that reach rollout.sampling.max_new_tokens",
        "raise rollout.sampling.max_new_tokens, or discourage length in the reward",
    ),
    MetricRule(
        "zero rewards",
        "reward/share_zero",
        "mean",
        0.98,
        1.0,
        _percent,
        "responses with a reward of exactly 0; if all are 0, the policy does not learn",
        "test the reward on the data (rlhf-mcore reward-test), read responses, or start with easier prompts",
        alarm_steps=10,
    ),
    MetricRule(
        "groups without signal",
        "reward/share_same",
        "mean",
        0.6,
        0.9,
        _percent,
        "groups whose responses all have the same reward; the policy learns nothing from them",
        "use harder or easier prompts, more samples per prompt, or algorithm.dynamic_sampling.enabled=true",
    ),
    MetricRule(
        "engine against trainer",
        "rollout/logprob_diff_mean",
        "mean",
        0.02,
        0.1,
        _plain,
        "mean difference of a token's logprob between the engine that sampled it and the trainer",
        "compare dtypes and kernels of both (rlhf-mcore doctor); with asynchronous engines the policy's own steps add to it: lower "
        "trainer.max_staleness or the learning rate; use algorithm.rollout_correction",
        alarm_steps=3,
    ),
    MetricRule(
        "reward errors",
        "reward/errors",
        "mean",
        0.001,
        0.05,
        _percent,
        "responses whose reward raised an error",
        "check the failures in the rollouts, and the run's log",
        counts=True,
        alarm_steps=2,
    ),
    MetricRule(
        "reward timeouts",
        "reward/timeouts",
        "mean",
        0.001,
        0.05,
        _percent,
        "responses whose reward timed out",
        "raise reward.timeout_s (environment.timeout_s, environment.agent.timeout_s), or make the reward faster",
        counts=True,
        alarm_steps=2,
    ),
    MetricRule(
        "answers not found",
        "reward/parse_failures",
        "mean",
        0.3,
        0.8,
        _percent,
        "responses in which the rules found no answer",
        "check responses with reward 0; the prompt may ask for a format that the rule does not read",
        counts=True,
    ),
    MetricRule(
        "clipped at the upper bound",
        "actor/clip_fraction_high",
        "mean",
        0.2,
        0.4,
        _percent,
        "tokens whose ratio exceeds the clip range",
        "lower the learning rate, or make fewer updates per rollout",
    ),
    MetricRule(
        "gradient spikes",
        "actor/grad_norm",
        "spike",
        20.0,
        200.0,
        _times,
        "largest gradient norm divided by the median",
        "check the rollouts of that step; actor.optimizer.clip_grad limits the effect",
        alarm_steps=1,
    ),
    MetricRule(
        "skipped updates",
        "actor/skipped_updates",
        "value",
        0.001,
        0.5,
        _percent,
        "updates of a step that were skipped because the loss or the gradient is not finite",
        "lower the learning rate; use bfloat16 instead of float16",
        alarm_steps=3,
    ),
    MetricRule(
        "stale tokens",
        "rollout/staleness_mean",
        "mean",
        2.0,
        4.0,
        _plain,
        "policy versions between sampling and training",
        "lower trainer.max_staleness, or add engine devices",
    ),
)
