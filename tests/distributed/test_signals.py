"""Signals through the launcher's torchrun to the ranks, and the exit code back."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import verify
from tests.commands import ROOT, Started, started


@pytest.mark.parametrize("first, second", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_fault_16_a_second_signal_during_the_save_changes_nothing(first: int, second: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_mcore.cli.torchrun", "--nnodes=1:1", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'rendezvous'}"]
    command += ["--rdzv-id=test", "--local-addr=127.0.0.1", str(ROOT / "tests" / "distributed" / "signal_worker.py")]
    command += [str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with started(command, tmp_path, environment) as agent:
        for word, ranks, signal_number in (("ready", 2, signal.SIGUSR2), ("asked", 2, first), ("saving", 1, second)):
            agent.wait_for(lambda word=word, ranks=ranks: counted(agent, word) >= ranks)
            agent.process.send_signal(signal_number)
        printed = agent.end()
    assert agent.process.returncode == 75 and "Error" not in printed, printed
    (checkpoint,) = scan(tmp_path / "run")
    assert verify(checkpoint.path) == []


def counted(agent: Started, word: str) -> int:
    """How many lines begin with a word."""
    return sum(line.startswith(word) for line in agent.output().splitlines())
