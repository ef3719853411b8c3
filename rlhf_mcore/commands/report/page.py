"""The report as one HTML file, which contains data, styles, scripts and the chart library (uPlot, MIT).

Text from models and users is stored as JSON in a script element that is not executed, and is shown only as text. The content security
policy of the page forbids all other scripts and all requests.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

from rlhf_mcore import __version__
from rlhf_mcore.commands.report.run_data import RunData, different_keys, same_but_for_seeds
from rlhf_mcore.metrics.rules import BAD, GOOD, MEASURES, RULES, UNKNOWN, WATCH, MetricRule, Series
from rlhf_mcore.observability.files import json_line

FORMAT = "rlhf_mcore.report"
_NAMED = 4  # maximum number of runs that the title names


def content(runs: Sequence[RunData], links: Sequence[str] = ()) -> dict[str, Any]:
    """Return the data of the page: the runs in the given order, their verdicts, and the keys in which their configurations differ.

    Runs with the same name are shown with their paths. ``links``: the address of each run's own page, if there is one.
    """
    names = [run.name for run in runs]
    runs = [replace(run, name=run.path) if names.count(run.name) > 1 else run for run in runs]
    return {
        "format": FORMAT,
        "version": __version__,
        "runs": [
            asdict(run) | {"verdicts": [asdict(verdict) for verdict in verdicts(run.metrics, run.not_finite)]}
            for run in runs
        ],
        "seeds": same_but_for_seeds([run.config for run in runs]),
        "links": list(links) or None,
        "different": different_keys([run.config for run in runs]) if runs else [],
    }


def as_json(runs: Sequence[RunData], links: Sequence[str] = ()) -> str:
    """Return ``content`` as JSON. "<" is escaped, so that no string can close the HTML element around the JSON."""
    return json.dumps(json.loads(json_line(content(runs, links))), ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )


def page(runs: Sequence[RunData], live: bool = False, links: Sequence[str] = ()) -> str:
    """Return the whole page. ``live``: the page asks its server for newer data."""
    scripts = [_asset("uPlot.iife.min.js"), _asset("report.js")]
    hashes, own_server = " ".join(map(_hash, scripts)), "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; connect-src {own_server}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": escape(", ".join(run.name for run in runs) if len(runs) <= _NAMED else f"{len(runs)} runs"),
        "STYLE": _asset("uPlot.min.css") + _asset("report.css"),
        "LIVE": "true" if live else "false",
        "DATA": as_json(runs, links),
        "CHARTS": scripts[0],
        "SCRIPT": scripts[1],
    }
    pieces = _asset("report.html").split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return files("rlhf_mcore.commands.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


# ------------------------------------------------------------------------------------------------------------- health
# A rule applies only if a run has reported its metric. The rules are in metrics/rules.py; a test compares
# docs/operations/report.md with them.
SAMPLES = "progress/samples"
Column = Sequence["float | None"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a rule for a run. ``value`` is formatted for display."""

    rule: str
    metric: str
    state: str  # GOOD, WATCH, BAD, UNKNOWN
    value: str
    meaning: str
    remedy: str


def verdicts(metrics: Mapping[str, Column], not_finite: Mapping[str, int] | None = None) -> list[Verdict]:
    """Return the verdict of every rule, the worst first and rules without a metric last.

    ``not_finite``: metrics whose last values are NaN or infinite, with the first such step. Their older values are ignored.
    """
    not_finite = not_finite or {}
    judged = [_verdict(rule, {n: c for n, c in metrics.items() if n not in not_finite}) for rule in RULES]
    if not_finite:
        judged.append(_spoil(not_finite))
    return sorted(judged, key=lambda verdict: (BAD, WATCH, GOOD, UNKNOWN).index(verdict.state))


def _verdict(rule: MetricRule, metrics: Mapping[str, Column]) -> Verdict:
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
        "non-finite metrics",
        names[0],
        BAD,
        f"NaN from step {first}: {', '.join(names[:3])}{more}",
        "metrics whose last values are NaN or infinite",
        "restart from a checkpoint before that step with a lower actor.optimizer.lr, and read the rollouts of that step",
    )


def _shares(counts: Column, samples: Column) -> list[float]:
    """Divide the count of each step by its number of responses. ``samples`` is the number of responses of all steps so far."""
    shares, before = [], 0.0
    for count, so_far in zip(counts, samples, strict=False):
        if so_far is not None:
            if count is not None and so_far > before:
                shares.append(count / (so_far - before))
            before = so_far
    return shares
