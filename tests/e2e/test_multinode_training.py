"""Two nodes of two ranks each (agents on the loopback): one agent is killed, and the run ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rlhf_mcore.checkpoint.layout import scan
from tests.distributed.test_multinode import SSH, agent_of
from tests.processes import descendants, wait_for
from tests.tiny_training import CONFIG, ROOT, SMALL, assert_same_end, make, run_directory, run_locally


def test_a_run_that_lost_a_node_ends_with_the_weights_of_one_that_did_not(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    script, hosts = str(ROOT / "launch" / "multinode.sh"), ["--hosts=localhost,localhost", f"--ssh={tmp_path}/ssh"]
    arguments = [CONFIG, *SMALL, "experiment=cut", "trainer.max_restarts=1"]
    cut, environment = run_directory(tmp_path, "cut"), {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [script, *hosts, "--ranks-per-node=2", "--grace=5", *arguments],
            cwd=tmp_path,
            env=environment | {"RLHF_MCORE_PYTHON": sys.executable},
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: scan(cut), 240, (tmp_path / "log").read_text)
        (tmp_path / "hold").touch()  # the run must not end before the agent does
        os.kill(agent_of(process.pid, 1), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        assert process.wait(timeout=240) == 0, (tmp_path / "log").read_text()
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
    assert "restart 1 of 1" in (tmp_path / "log").read_text()
    assert_same_end(cut, run_locally(tmp_path, "whole", environment, "trainer.world_size=4"))
