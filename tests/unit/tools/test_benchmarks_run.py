"""Test the table of all benchmarks: a goal is an upper or a lower bound, and unmeasured rows state the reason."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.run import BEGIN, END, ROWS, Outcome, Row, judge, page, table

LOW, HIGH = Row("low", "is small"), Row("high", "is large", at_least=True)


@pytest.mark.parametrize(
    ("row", "ratio", "expected"),
    [(LOW, 0.9, "met"), (LOW, 1.0, "met"), (LOW, 1.01, "missed"), (HIGH, 0.9, "missed"), (HIGH, 1.0, "met")],
)
def test_a_goal_is_a_bound_on_one_side(row: Row, ratio: float, expected: str) -> None:
    assert judge(row, ratio, 1.0) == expected


def test_the_table_has_a_line_for_each_and_the_page_keeps_what_people_wrote() -> None:
    outcomes = [Outcome(LOW, 0.5, 1.0, "met", 3.2), Outcome(HIGH, None, None, "not there yet")]
    lines = table(outcomes).splitlines()
    assert lines[2] == "| low | is small | 0.500 | ≤ 1 | met | 3 |"
    assert lines[3] == "| high | is large | - | - | not there yet | - |"
    first = page("# Performance\n\nWords.\n", outcomes, [1.5])
    assert first.startswith("# Performance\n\nWords.\n\n" + BEGIN) and lines[2] in first
    again = page(first.replace(END, END + "\nMore words.\n"), outcomes[1:], [])
    assert lines[2] not in again and lines[3] in again and again.endswith("\nMore words.\n") and again.count(BEGIN) == 1


def test_the_page_has_each_row_of_vs_trl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.against_trl() == ""
    pairs = [{"ours": {"wall_s": ours}, "theirs": {"wall_s": 4.0}} for ours in (1.0, 2.0, 3.0)]
    ratios, median = {"wall_s": [0.25, 0.5, 0.75]}, {"wall_s": 0.5, "cpu_s": 0.4}
    row = {"row": {"goal": 0.85}, "pairs": pairs, "ratios": ratios, "median": median}
    (tmp_path / "vs_trl.json").write_text(json.dumps({"rows": {"small": row}}))
    assert run.against_trl().splitlines()[3] == "| small | 0.500 | 0.250 to 0.750 | 0.400 | ≤ 0.85 | 2.00 s | 4.00 s |"


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["met", "missed", "not compared: needs --against"], 0),
        (["met", "failed: x"], 1),
        (["stopped after 5 s", "met"], 1),
    ],
)
def test_a_benchmark_that_fails_is_an_error_and_a_missed_goal_is_none(
    monkeypatch: pytest.MonkeyPatch, verdicts: list[str], code: int
) -> None:
    found = iter(verdicts)
    monkeypatch.setattr(run, "ROWS", tuple(Row(f"row{number}", "") for number in range(len(verdicts))))
    monkeypatch.setattr(run, "run", lambda row, *_: Outcome(row, None, None, next(found), 1.0, 2.0))
    assert run.main(["--quick"]) == code


def test_every_benchmark_there_is_has_a_row() -> None:
    shared = {"__init__", "common", "models", "one_process", "synthetic", "run"}
    there = {path.stem for path in run.ROOT.glob("benchmarks/*.py")} - shared
    assert there - {row.name for row in ROWS} == set()
    assert all(find_spec(row.module) for row in ROWS)
    assert run.run(Row("never_there", ""), quick=True, timeout_s=1).verdict == "not there yet"
