"""Call client programs with limits for time and output."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.environments.containers.container import CommandResult
from rlhf_mcore.environments.containers.docker import _call
from rlhf_mcore.own_processes import has_ended
from tests.commands import wait_for

pytestmark = pytest.mark.default


def run(script: str, **options: Any) -> CommandResult:
    return asyncio.run(_call("sh", "-c", script, **{"timeout_s": 60, **options}))


def test_a_program_gets_its_input_and_returns_its_outputs() -> None:
    assert run("cat; echo no >&2; exit 3", stdin=b"yes") == CommandResult(3, "yes", "no\n")
    assert run("exit 0", stdin=b"x" * 10**7) == CommandResult(0)  # it does not read its input


def test_a_program_that_prints_too_much_is_ended() -> None:
    assert run("yes") == CommandResult(None, reason="output")


def test_a_late_program_is_killed_with_the_processes_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {started}; sleep 600"
    assert run(script, timeout_s=5) == CommandResult(None, reason="timeout")
    wait_for(lambda: has_ended(int(started.read_text())))
