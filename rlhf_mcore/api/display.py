"""HTML tables that show results in notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import isfinite
from pathlib import Path
from typing import Any

SHOWN_METRICS = (
    "reward/mean",
    "evaluate/accuracy",
    "evaluate/reward",
    "actor/approx_kl",
    "rollout/response_length_mean",
)
_WIDTH, _HEIGHT = 240, 40


def of_run(finished: bool, directory: Path, model: Path, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table with a run's paths and curves."""
    rows = [
        ("run", "finished" if finished else "ended early"),
        ("directory", directory),
        ("model", model),
        ("steps", len(metrics)),
    ]
    cells = [_row(escape(str(name)), escape(str(value))) for name, value in rows]
    for name in SHOWN_METRICS:
        values = [float(row[name]) for row in metrics if isinstance(row.get(name), int | float) and isfinite(row[name])]
        if values:
            cells.append(_row(escape(name), f"{values[0]:.4g} &rarr; {values[-1]:.4g} {_curve(values)}"))
    return _table(cells)


def of_evaluation(results: Mapping[str, Any], comparison: Mapping[str, Any], directory: Path | None) -> str:
    """Return an HTML table with figures and their intervals, and with differences if there is a comparison."""
    cells = [_row(escape(name), _figure(value)) for name, value in results.items()]
    for name, value in comparison.items():
        if isinstance(value, Mapping) and isinstance(value.get("difference"), Mapping):
            cells.append(_row(f"{escape(name)}, difference", _figure(value["difference"])))
    return _table([*cells, _row("directory", escape(str(directory)))])


def _figure(value: Any) -> str:
    if isinstance(value, Mapping) and {"value", "low", "high"} <= value.keys():
        return f"{_number(value['value'])} ({_number(value['low'])} to {_number(value['high'])})"
    return _number(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def _curve(values: Sequence[float]) -> str:
    low, span = min(values), (max(values) - min(values)) or 1.0
    across = _WIDTH / max(len(values) - 1, 1)
    points = " ".join(
        f"{index * across:.1f},{_HEIGHT * (1 - (value - low) / span):.1f}" for index, value in enumerate(values)
    )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="-1 -1 {_WIDTH + 2} {_HEIGHT + 2}" style="vertical-align: middle">'
        f'<polyline points="{points}" fill="none" stroke="currentColor"/></svg>'
    )


def _row(name: str, value: str) -> str:
    return f'<tr><th style="text-align: left">{name}</th><td style="text-align: left">{value}</td></tr>'


def _table(rows: Sequence[str]) -> str:
    return f"<table>{''.join(rows)}</table>"
