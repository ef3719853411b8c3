"""The text of a trial of a reward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlhf_mcore.cli.terminal import aligned
from rlhf_mcore.rewards.trial import Report, Row, answered_text, shorten


def as_text(report: Report, shown: int = 10) -> str:
    """Write a table of the data sources, and the first disagreements under it."""
    table: list[tuple[str, ...]] = [("data source", "rows", "truth right", "empty right", "others right", "no score")]
    for source in sorted({row.prompt.data_source for row in report.rows}):
        all_rows, tried, wrong, empty, others = (
            [row for row in rows if row.prompt.data_source == source]
            for rows in (report.rows, report.tried, report.wrong_truths, report.paid_empty, report.paid_others)
        )
        scores = [score for row in all_rows for score in (row.truth, row.empty, row.other) if score is not None]
        right = f"{len(tried) - len(wrong)} of {len(tried)}" if tried else "not known"
        without = sum(score.failure is not None for score in scores)
        table.append((source, *map(str, (len(all_rows), right, len(empty), len(others), without))))
    lines = [f"{report.key}: {len(report.rows)} of {report.seen} rows", "", *aligned(table)]
    if warning := answered_text(report.rows, report.key):
        lines += ["", f"warning: {warning}"]
    if report.tops and not report.is_sound:
        tops = ", ".join(f"{top:g}" + f" ({source})" * (len(report.tops) > 1) for source, top in report.tops.items())
        lines += ["", f"right is the highest score that a ground truth has: {tops}"]
    lines += _disagreements("ground truths that are not right", report.wrong_truths, "truth", shown)
    lines += _disagreements("empty responses that are right", report.paid_empty, "empty", shown)
    lines += _disagreements("answers of other rows that are right", report.paid_others, "other", shown)
    return "\n".join(lines)


def _disagreements(title: str, rows: Sequence[Row], kind: str, shown: int) -> Iterator[str]:
    if rows:
        yield f"\n{title} ({len(rows)}):"
    problems: list[tuple[str, str, str]] = []
    for row in rows:
        score = getattr(row, kind)
        said = "" if kind == "empty" else f", response {shorten(getattr(row, f'{kind}_text'))}"
        parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
        cause, error = "", ""
        if score.failure:
            cause = f" ({score.cause or score.failure})"
            error = cause.replace(repr(row.prompt.prompt_id), "")
        text = f"ground truth {shorten(row.prompt.ground_truth)}{said}: {score.value:g}{parts}{cause}"
        problems.append((row.place, text, error))
    lines = once_each(problems)
    yield from (f"  {line}" for _, line in lines[:shown])
    if rest := sum(count for count, _ in lines[shown:]):
        yield f"  and {rest} more"


def once_each(problems: Iterable[tuple[str, str, str]]) -> list[tuple[int, str]]:
    """Write lines of rows, each with its number of rows: where an error repeats, there is one line, with the first row.

    ``problems``: a row's place, a text, and the error that it may share with other rows ("": none).
    """
    groups: dict[str | int, list[tuple[str, str]]] = {}
    for number, (place, text, error) in enumerate(problems):
        groups.setdefault(error or number, []).append((place, text))
    return [
        (len(rows), f"{f'{len(rows)} rows, the first is ' if len(rows) > 1 else ''}{rows[0][0]}: {rows[0][1]}")
        for rows in groups.values()
    ]
