"""The fault table (tests/faults.py) and the names of the tests agree."""

from __future__ import annotations

from tests.faults import FAULTS, find_fault_tests

WITHOUT_TESTS = {40, 41}  # remove a number when its first test exists


def test_faults_are_numbered_without_gaps() -> None:
    assert list(FAULTS) == list(range(1, len(FAULTS) + 1))
    assert len(FAULTS) >= 42


def test_every_fault_but_the_known_ones_has_a_test() -> None:
    assert set(find_fault_tests()) == set(FAULTS) - WITHOUT_TESTS
