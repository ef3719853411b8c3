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


_SHOWN = {"number": "{:.3g}".format, "times": "{:.2f} times".format, "share": _percent, "count": _percent}


def read_table(text: str) -> list[list[str]]:
    """Return the cells of a table. A row is a line with ` | ` between its cells, and continues on indented lines. - is empty."""
    rows = text.strip().replace("\n    ", " ").splitlines()
    return [["" if cell == "-" else cell for cell in row.split(" | ")] for row in rows]


# Metric, name, measure, watch, bad, kind of number, alarm_steps, meaning, remedy. A "count" is judged as a share.
_TABLE = """
actor/approx_kl | KL of an update | mean | 0.05 | 0.3 | number | 3
    | change of the policy by one step's updates | lower actor.optimizer.lr, or make fewer updates per rollout
    (trainer.ppo_epochs, trainer.minibatch_size)
kl/mean | KL to the reference | mean | 1 | 10 | number | 3
    | distance of the policy from its starting point, per token | raise algorithm.kl.coef, or lower the learning rate; read
    responses, because the policy may exploit the reward
actor/entropy | remaining entropy | growth | 0.3 | 0.05 | share | 3
    | recent entropy divided by the early entropy; without entropy the policy does not explore | lower the learning rate, raise
    the upper clip bound (algorithm.clip_high), or set algorithm.entropy_coef
rollout/response_length_mean | response length | growth | 2.5 | 5 | times | 0
    | recent length divided by the early length | read the longest responses; if they ramble, penalise lengths near the limit
    (algorithm.overlong)
rollout/truncated_fraction | truncated responses | mean | 0.2 | 0.5 | share | 0
    | responses that reach rollout.sampling.max_new_tokens | raise rollout.sampling.max_new_tokens, or discourage length in the
    reward
reward/share_zero | zero rewards | mean | 0.98 | 1 | share | 10
    | responses with a reward of exactly 0; if all are 0, the policy does not learn | test the reward on the data (rlhf-mcore
    reward-test), read responses, or start with easier prompts
reward/share_same | groups without signal | mean | 0.6 | 0.9 | share | 0
    | groups whose responses all have the same reward; the policy learns nothing from them | use harder or easier prompts, more
    samples per prompt, or algorithm.dynamic_sampling.enabled=true
rollout/logprob_diff_mean | engine against trainer | mean | 0.02 | 0.1 | number | 3
    | mean difference of a token's logprob between the engine that sampled it and the trainer | compare dtypes and kernels of
    both (rlhf-mcore doctor); with asynchronous engines the policy's own steps add to it: lower trainer.max_staleness or the
    learning rate; use algorithm.rollout_correction
reward/errors | reward errors | mean | 0.001 | 0.05 | count | 2
    | responses whose reward raised an error | check the failures in the rollouts, and the run's log
reward/timeouts | reward timeouts | mean | 0.001 | 0.05 | count | 2
    | responses whose reward timed out | raise reward.timeout_s (environment.timeout_s, environment.agent.timeout_s), or make
    the reward faster
reward/parse_failures | answers not found | mean | 0.3 | 0.8 | count | 0
    | responses in which the rules found no answer | check responses with reward 0; the prompt may ask for a format that the
    rule does not read
actor/clip_fraction_high | clipped at the upper bound | mean | 0.2 | 0.4 | share | 0
    | tokens whose ratio exceeds the clip range | lower the learning rate, or make fewer updates per rollout
actor/grad_norm | gradient spikes | spike | 20 | 200 | times | 1
    | largest gradient norm divided by the median | check the rollouts of that step; actor.optimizer.clip_grad limits the effect
actor/skipped_updates | skipped updates | value | 0.001 | 0.5 | share | 3
    | updates of a step that were skipped because the loss or the gradient is not finite | lower the learning rate; use bfloat16
    instead of float16
rollout/staleness_mean | stale tokens | mean | 2 | 4 | number | 0
    | policy versions between sampling and training | lower trainer.max_staleness, or add engine devices
"""
RULES = tuple(
    MetricRule(
        name, metric, measure, float(low), float(high), _SHOWN[kind], meaning, remedy, kind == "count", int(steps)
    )
    for metric, name, measure, low, high, kind, steps, meaning, remedy in read_table(_TABLE)
)
