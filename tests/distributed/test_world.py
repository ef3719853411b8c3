"""A world that fails is one error, with the words of the rank that failed first."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.world import run_world


def test_the_message_and_the_traceback_are_those_of_the_rank_that_raised(tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as raised:
        run_world("distributed.failing_worker", 2, tmp_path)
    text = str(raised.value)
    assert text.startswith("the weights of layer 3 are gone\nrank 1 raised this:\nTraceback")
    assert text.count("Traceback") == 1 and "in main\n" in text and "ChildFailedError" not in text


def test_without_an_exception_the_output_is_shown(tmp_path: Path) -> None:
    (tmp_path / "kill").touch()
    with pytest.raises(AssertionError, match="failing_worker ended with exit code"):
        run_world("distributed.failing_worker", 2, tmp_path)
