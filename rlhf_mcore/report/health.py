"""Whether a run is healthy: rules on its metrics, each with what to do where one is broken.

The bounds are rules of thumb of the field for policy-gradient training of language models; a rule speaks only where a run has
reported its metric. They are stated once, here; docs/report.md is checked against this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

RECENT_SHARE, RECENT_MOST = 0.1, 20  # of the reported values: what "recent" is the mean of
SAMPLES = "progress/samples"
GOOD, WATCH, BAD, UNKNOWN = "good", "watch", "bad", "unknown"
Column = Sequence["float | None"]


@dataclass(frozen=True, slots=True)
class Series:
    """The reported values of a metric, in order; at least one."""

    values: Sequence[float]

    @property
    def recent(self) -> float:
        """Mean of the last tenth, at most 20 and at least one."""
        return fmean(self.values[-self._window :])

    @property
    def early(self) -> float:
        """Mean of the first tenth."""
        return fmean(self.values[: self._window])

    @property
    def _window(self) -> int:
        return min(max(int(len(self.values) * RECENT_SHARE), 1), RECENT_MOST)


@dataclass(frozen=True, slots=True)
class Rule:
    """``measure`` makes a number of the series; the run should be watched from ``watch`` on, and is in trouble from ``bad`` on.

    Where ``watch`` is above ``bad``, small numbers are the trouble. ``counts``: the metric is a number of responses, and judged as a
    share of those of the step.
    """

    name: str
    metric: str
    measure: Callable[[Series], float]
    watch: float
    bad: float
    shown: Callable[[float], str]
    meaning: str
    remedy: str
    counts: bool = False

    def judge(self, value: float) -> str:
        sign = 1.0 if self.bad > self.watch else -1.0
        if sign * value >= sign * self.bad:
            return BAD
        return WATCH if sign * value >= sign * self.watch else GOOD


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule finds in a run. ``value`` is for people."""

    rule: str
    metric: str
    state: str  # GOOD, WATCH, BAD, UNKNOWN
    value: str
    meaning: str
    remedy: str


def _recent(series: Series) -> float:
    return series.recent


def _growth(series: Series) -> float:
    return series.recent / series.early if series.early > 0 else 1.0


def _spike(series: Series) -> float:
    middle = median(series.values)
    return max(series.values) / middle if middle > 0 else 1.0


def _most(series: Series) -> float:
    return max(series.values)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


_times, _plain = "{:.2f} times".format, "{:.3g}".format


RULES = (
    Rule(
        "KL of an update",
        "actor/approx_kl",
        _recent,
        0.05,
        0.3,
        _plain,
        "how far one step's updates move the policy",
        "lower actor.optimizer.lr, or make fewer updates per rollout (trainer.ppo_epochs, trainer.minibatch_size)",
    ),
    Rule(
        "KL to the reference",
        "kl/mean",
        _recent,
        1.0,
        10.0,
        _plain,
        "how far the policy is from where it began, per token",
        "raise algorithm.kl.coef, or lower the learning rate; read responses: the reward may be exploited",
    ),
    Rule(
        "entropy that is left",
        "actor/entropy",
        _growth,
        0.3,
        0.05,
        _percent,
        "recent entropy over that of the beginning; without entropy nothing new is tried",
        "lower the learning rate, raise the upper clip bound (algorithm.clip_high), or set algorithm.entropy_coef",
    ),
    Rule(
        "length of responses",
        "rollout/response_length_mean",
        _growth,
        2.5,
        5.0,
        _times,
        "recent length over that of the beginning",
        "read the longest responses; punish what comes close to the limit (algorithm.overlong) if they ramble",
    ),
    Rule(
        "cut off by the limit",
        "rollout/truncated_fraction",
        _recent,
        0.2,
        0.5,
        _percent,
        "responses that reach rollout.sampling.max_new_tokens",
        "raise rollout.sampling.max_new_tokens, or discourage length in the reward",
    ),
    Rule(
        "groups without signal",
        "reward/share_same",
        _recent,
        0.6,
        0.9,
        _percent,
        "groups whose responses all have the same reward; nothing is learned from them",
        "use harder or easier prompts, more samples per prompt, or algorithm.dynamic_sampling.enabled=true",
    ),
    Rule(
        "engine against trainer",
        "rollout/logprob_diff_mean",
        _recent,
        0.02,
        0.1,
        _plain,
        "mean difference of a token's logprob between the engine that sampled it and the trainer",
        "compare dtypes and kernels of both (rlhf-mcore doctor); correct by algorithm.rollout_correction",
    ),
    Rule(
        "reward errors",
        "reward/errors",
        _recent,
        0.001,
        0.05,
        _percent,
        "responses whose reward raised an error",
        "look at the failures among the rollouts, and at the run's log",
        counts=True,
    ),
    Rule(
        "reward timeouts",
        "reward/timeouts",
        _recent,
        0.001,
        0.05,
        _percent,
        "responses whose reward was not there in time",
        "raise reward.timeout_s or make the reward faster",
        counts=True,
    ),
    Rule(
        "answers not found",
        "reward/parse_failures",
        _recent,
        0.3,
        0.8,
        _percent,
        "responses in which the rules found no answer",
        "look at responses with reward 0: the format that the prompt asks for may not be the one that the rule reads",
        counts=True,
    ),
    Rule(
        "clipped upwards",
        "actor/clip_fraction_high",
        _recent,
        0.2,
        0.4,
        _percent,
        "tokens whose ratio left the clip range at the top",
        "lower the learning rate, or make fewer updates per rollout",
    ),
    Rule(
        "gradient spikes",
        "actor/grad_norm",
        _spike,
        20.0,
        200.0,
        _times,
        "largest gradient norm over the median",
        "look at the rollouts of that step; actor.optimizer.clip_grad bounds the harm",
    ),
    Rule(
        "skipped updates",
        "actor/skipped_updates",
        _most,
        1.0,
        5.0,
        _plain,
        "updates of one step that were left out because the gradient was not finite",
        "lower the learning rate; with float16 use bfloat16",
    ),
    Rule(
        "stale tokens",
        "rollout/staleness_mean",
        _recent,
        2.0,
        4.0,
        _plain,
        "policy versions between sampling and learning",
        "lower trainer.max_staleness, or give the engines more devices",
    ),
)


def verdicts(metrics: Mapping[str, Column]) -> list[Verdict]:
    """Every rule's verdict on a run: the worst first, those without a metric last."""
    found = [_verdict(rule, metrics) for rule in RULES]
    return sorted(found, key=lambda verdict: (BAD, WATCH, GOOD, UNKNOWN).index(verdict.state))


def _verdict(rule: Rule, metrics: Mapping[str, Column]) -> Verdict:
    column = metrics.get(rule.metric, ())
    if rule.counts:
        column = _shares(column, metrics.get(SAMPLES, ()))
    values = [value for value in column if value is not None]
    if not values:
        return Verdict(rule.name, rule.metric, UNKNOWN, "not reported", rule.meaning, "")
    value = rule.measure(Series(values))
    state = rule.judge(value)
    return Verdict(rule.name, rule.metric, state, rule.shown(value), rule.meaning, rule.remedy if state != GOOD else "")


def _shares(counts: Column, samples: Column) -> list[float]:
    """Counts of responses over the responses of their steps. ``samples`` counts those of all steps so far."""
    shares, before = [], 0.0
    for count, so_far in zip(counts, samples, strict=False):
        if so_far is not None:
            if count is not None and so_far > before:
                shares.append(count / (so_far - before))
            before = so_far
    return shares
