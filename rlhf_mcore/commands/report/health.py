"""Judge whether a run is healthy: the verdicts of the rules on its metrics, each with what to do where one is broken.

A rule judges only where a run has reported its metric. The rules are in ``config/metric_rules.py``; docs/report.md is checked against
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlhf_mcore.config.metric_rules import BAD, GOOD, MEASURES, RULES, UNKNOWN, WATCH, Rule, Series

SAMPLES = "progress/samples"
Column = Sequence["float | None"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold what a rule finds in a run. ``value`` is for people."""

    rule: str
    metric: str
    state: str  # GOOD, WATCH, BAD, UNKNOWN
    value: str
    meaning: str
    remedy: str


def verdicts(metrics: Mapping[str, Column], not_finite: Mapping[str, int] | None = None) -> list[Verdict]:
    """Judge a run by every rule: the worst verdict first, those without a metric last.

    ``not_finite``: metrics whose last reports are no numbers, and since which step. Older values of theirs say nothing of the run.
    """
    not_finite = not_finite or {}
    judged = [_verdict(rule, {n: c for n, c in metrics.items() if n not in not_finite}) for rule in RULES]
    if not_finite:
        judged.append(_spoil(not_finite))
    return sorted(judged, key=lambda verdict: (BAD, WATCH, GOOD, UNKNOWN).index(verdict.state))


def _verdict(rule: Rule, metrics: Mapping[str, Column]) -> Verdict:
    column = metrics.get(rule.metric, ())
    if rule.counts:
        column = _shares(column, metrics.get(SAMPLES, ()))
    values = [value for value in column if value is not None]
    if not values:
        return Verdict(rule.name, rule.metric, UNKNOWN, "not reported", rule.meaning, "")
    value = MEASURES[rule.measure].of_run(Series(values))
    state = rule.judge(value)
    return Verdict(rule.name, rule.metric, state, rule.shown(value), rule.meaning, rule.remedy if state != GOOD else "")


def _spoil(not_finite: Mapping[str, int]) -> Verdict:
    first = min(not_finite.values())
    names = sorted(not_finite, key=lambda name: (not_finite[name], name))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return Verdict(
        "numbers that are none",
        names[0],
        BAD,
        f"NaN from step {first}: {', '.join(names[:3])}{more}",
        "metrics whose last values are NaN or infinite",
        "begin again from a checkpoint before that step with a lower actor.optimizer.lr; look at the rollouts of that step",
    )


def _shares(counts: Column, samples: Column) -> list[float]:
    """Divide counts of responses by the responses of their steps. ``samples`` counts those of all steps so far."""
    shares, before = [], 0.0
    for count, so_far in zip(counts, samples, strict=False):
        if so_far is not None:
            if count is not None and so_far > before:
                shares.append(count / (so_far - before))
            before = so_far
    return shares
