"""Names are found whole, and each that is missing fails."""

from __future__ import annotations

import pytest

from tests.messages import assert_names, expect_error

MESSAGE = "trainer.steps=10 is more than 1.5; lower it, or set trainer.epochs"


def test_whole_names_are_found() -> None:
    assert_names(MESSAGE, field="trainer.steps", value=(10, 1.5), remedy=("lower", "trainer.epochs"))


@pytest.mark.parametrize(
    "missing",
    [
        dict(field="steps"),
        dict(field="trainer.step"),
        dict(value=1),
        dict(value="1.50"),
        dict(remedy="low"),
        dict(remedy=("lower", "raise")),
    ],
)
def test_a_part_of_a_name_is_none(missing: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        assert_names(MESSAGE, **missing)
    with pytest.raises(AssertionError), expect_error(ValueError, **missing):
        raise ValueError(MESSAGE)


def test_another_error_is_not_taken_and_something_is_to_be_named() -> None:
    with pytest.raises(KeyError), expect_error(ValueError, field="a"):
        raise KeyError("a")
    with pytest.raises(AssertionError), expect_error(ValueError):
        raise ValueError(MESSAGE)
