"""Two nodes with two ranks each (agents on the loopback). After one agent is killed, the run ends as an undisturbed run."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from rlhf_mcore.checkpoint.layout import scan
from rlhf_mcore_contrib.ssh.tests.test_multinode import SSH, agent_of
from tests.commands import ROOT, start_command
from tests.tiny_training import CONFIG, SMALL, assert_same_end, make, run_directory, run_locally


def test_a_run_that_lost_a_node_ends_with_the_weights_of_one_that_did_not(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    script, hosts = (
        str(ROOT / "contrib" / "ssh" / "multinode.sh"),
        ["--hosts=localhost,localhost", f"--ssh={tmp_path}/ssh"],
    )
    arguments = [CONFIG, *SMALL, "experiment=cut", "trainer.max_restarts=1"]
    cut, environment = run_directory(tmp_path, "cut"), {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [script, *hosts, "--ranks-per-node=2", "--grace=5", *arguments]
    with start_command(command, tmp_path, environment | {"RLHF_MCORE_PYTHON": sys.executable}) as job:
        job.wait_for(lambda: scan(cut))
        (tmp_path / "hold").touch()  # the run must not end before the agent does
        os.kill(agent_of(job.process.pid, 1), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        printed = job.end()
    assert job.process.returncode == 0 and "restart 1 of 1" in printed, printed
    assert_same_end(cut, run_locally(tmp_path, "whole", environment, "trainer.world_size=4"))
