"""``rlhf-mcore metrics [NAME]``: print meaning, unit, healthy range and remedy of a metric. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import add_completed, command_parser
from rlhf_mcore.cli.terminal import align_columns, say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import shorten
from rlhf_mcore.metrics.catalogue import GROUPS, matching, nearest_metric


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print the description of the metrics. Returns the exit code."""
    say("\n".join(_lines(_parser().parse_args(argv).name)))
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore metrics",
        "Explain the metrics of a run: meaning, unit, healthy range and remedy.",
        examples=["rlhf-mcore metrics", "rlhf-mcore metrics kl/mean", "rlhf-mcore metrics entropy"],
    )
    what = "a metric or a part of its name (default: list all)"
    add_completed(parser, _list_names, "name", metavar="NAME", nargs="?", help=what)
    return parser


def _list_names(**_: object) -> list[str]:
    return [metric.name for metrics in GROUPS.values() for metric in metrics]


def _lines(name: str | None) -> Iterator[str]:
    """Yield lines that describe the metrics that match ``name``, or one line per metric if ``name`` is None.

    Raises:
        ConfigError: no metric matches the name.
    """
    if name is None:
        for title, group in GROUPS.items():
            yield f"{title}:"
            yield from align_columns(((metric.name, metric.meaning) for metric in group), indent="  ")
        return
    metrics = list(matching(name))
    if not metrics:
        meant = nearest_metric(name)
        hint = f"did you mean {meant}?" if meant else "rlhf-mcore metrics lists them all"
        raise ConfigError(f"there is no metric {shorten(name)}; {hint}")
    for metric in metrics:
        yield f"{metric.name}: {metric.meaning}"
        for label, text in (("unit", metric.unit), ("healthy", metric.range), ("else", metric.advice)):
            if text:
                yield f"  {label:<8} {text}"
