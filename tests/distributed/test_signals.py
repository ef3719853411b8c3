"""Signals through the supervisor to the ranks, and the exit code back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import verify
from rlhf_mcore.cli.agent import supervisor_command
from tests.commands import ROOT, Started, start_command


@pytest.mark.parametrize("first, second", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_fault_16_a_second_signal_during_the_save_changes_nothing(first: int, second: int, tmp_path: Path) -> None:
    command = supervisor_command(["--ranks=2"], [str(tmp_path / "run")], "tests.distributed.signal_worker")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with start_command(command, tmp_path, environment) as agent:
        for word, ranks, signal_number in (("ready", 2, signal.SIGUSR2), ("asked", 2, first), ("saving", 1, second)):
            agent.wait_for(lambda word=word, ranks=ranks: count_lines(agent, word) >= ranks)
            agent.process.send_signal(signal_number)
        printed = agent.end()
    assert agent.process.returncode == 75 and "Error" not in printed, printed
    (checkpoint,) = scan(tmp_path / "run")
    assert verify(checkpoint.path) == []


def count_lines(agent: Started, word: str) -> int:
    """How many lines begin with a word."""
    return sum(line.startswith(word) for line in agent.output().splitlines())
