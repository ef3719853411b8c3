"""A test over many cells of a world names all that fail, the worst first."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.cells import check_all, check_below, check_close


def test_all_failing_cells_are_named_and_the_worst_is_first() -> None:
    cells = {"dp4": 1.0, "tp2": 1.1, "pp2": 3.0, "cp4": 1.000001}
    with pytest.raises(AssertionError) as raised:
        check_all(cells, lambda found: check_close("loss", found, 1.0, rel=1e-3))
    first, second, *others = str(raised.value).splitlines()
    assert first.startswith("2 of 4 cells fail, the worst is pp2: loss is 3.0, expected 1.0")
    assert "tp2" in second and others == []


def test_a_plain_assertion_and_a_missing_finding_count_as_failures() -> None:
    findings: dict[str, Any] = {"a": {"weights": "w is 1.0"}, "b": {}, "c": {"weights": ""}}

    def check(found: Any) -> None:
        assert found["weights"] == ""

    with pytest.raises(AssertionError, match="2 of 3 cells fail"):
        check_all(findings, check)


@pytest.mark.parametrize("found", [float("nan"), float("inf"), 2.0])
def test_values_that_are_not_close_fail(found: float) -> None:
    with pytest.raises(AssertionError):
        check_close("loss", found, 1.0, rel=1e-3, abs_=1e-3)
    with pytest.raises(AssertionError):
        check_below("distance", found, 1.0)


def test_no_cells_is_a_failure() -> None:
    with pytest.raises(AssertionError):
        check_all({}, lambda found: None)
