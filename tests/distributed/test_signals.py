"""Signals through the launcher's torchrun to the ranks, and the exit code back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore.checkpoint.manifest import verify
from tests.distributed.world import ROOT


@pytest.mark.parametrize("first, second", [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGTERM, signal.SIGUSR1)])
def test_fault_16_a_second_signal_during_the_save_changes_nothing(first: int, second: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlhf_mcore.cli.torchrun", "--nnodes=1:1", "--nproc-per-node=2"]
    command += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'rendezvous'}"]
    command += ["--rdzv-id=test", "--local-addr=127.0.0.1", str(ROOT / "tests" / "distributed" / "signal_worker.py")]
    command += [str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as agent:
        assert agent.stdout is not None and agent.stderr is not None
        try:
            wait_for(agent, "ready", 2)
            agent.send_signal(signal.SIGUSR2)
            wait_for(agent, "asked", 2)
            agent.send_signal(first)
            wait_for(agent, "saving", 1)
            agent.send_signal(second)
            assert agent.wait(timeout=240) == 75
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
        assert "Error" not in agent.stderr.read()
    (checkpoint,) = scan(tmp_path / "run")
    assert verify(checkpoint.path) == []


def wait_for(agent: subprocess.Popen[str], word: str, times: int) -> None:
    """Read until so many lines begin with a word."""
    assert agent.stdout is not None
    while times:
        line = agent.stdout.readline()
        assert line, "the run ended early"
        times -= line.startswith(word)
