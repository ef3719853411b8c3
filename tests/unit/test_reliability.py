"""docs/reliability.md names the tests of every fault, and the names of tests cite no fault that is not there."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROWS = dict(
    re.findall(r"^\| (\d\d) \|.*\| (.+?) \|$", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)
)  # number -> where its tests are


@cache
def cited() -> dict[str, set[str]]:
    """Number of a fault -> files with tests of its name: test_fault_05_and_08_... is of two."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        for numbers in re.findall(r"def test_fault_(\d\d(?:_and_\d\d)*)", path.read_text(encoding="utf-8")):
            for number in numbers.split("_and_"):
                found[number].add(str(path.relative_to(ROOT)))
    return found


def test_the_catalogue_is_numbered_without_gaps() -> None:
    assert sorted(ROWS) == [f"{number:02}" for number in range(1, len(ROWS) + 1)]
    assert len(ROWS) >= 34


def test_every_fault_of_a_test_is_in_the_catalogue() -> None:
    assert set(cited()) - set(ROWS) == set()


def test_the_catalogue_names_where_a_fault_is_tested() -> None:
    for number in sorted(ROWS):
        found, files = cited().get(number, set()), set(re.findall(r"`(tests/[^`]+)`", ROWS[number]))
        if ROWS[number].startswith("not yet"):
            assert not found, f"name them in docs/reliability.md: {sorted(found)}"
        else:
            assert files and files <= found
