"""contrib/ssh/multinode.sh with two agents on the loopback instead of two hosts. A shell replaces ssh."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.commands import ROOT, Started, descendants, start_command, wait_for

SSH = """#!/usr/bin/env bash
# ssh HOST COMMAND, without the host: what a login shell would do with the command there
shift
exec bash -c "$*"
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    (tmp_path / "run.yaml").write_text("model: {path: model}\nproject: multi\nexperiment: run\n")
    return tmp_path


def command(workspace: Path, *arguments: str, module: str = "tests.stand_in") -> list[str]:
    options = ["--hosts=localhost,localhost", "--ranks-per-node=2", f"--ssh={workspace}/ssh", "--grace=5"]
    return [str(ROOT / "contrib" / "ssh" / "multinode.sh"), *options, f"--module={module}", *arguments]


def running(workspace: Path, *arguments: str, **variables: str) -> AbstractContextManager[Started]:
    environment = {**os.environ, "RLHF_MCORE_PYTHON": sys.executable, **variables}
    return start_command(command(workspace, *arguments), workspace, environment)


def counts(workspace: Path) -> list[int]:
    folder = workspace / "outputs" / "multi" / "run"
    return [int(path.read_text()) for path in sorted(folder.glob("count-*"))]


def agent_of(launcher: int, node: int) -> int:
    """Return the process of a node's agent among the children of the launcher."""
    for pid in descendants(launcher):
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if "rlhf_mcore.cli.agent" in words and f"--node-rank={node}" in words:
            return pid
    raise AssertionError("not running")


def test_four_ranks_on_two_nodes_and_the_logs_of_each(workspace: Path) -> None:
    with running(workspace, "run.yaml", "trainer.num_steps=3", "experiment='a b'") as job:
        output = job.end()
    assert job.process.returncode == 0, output
    logs = sorted((workspace / "outputs" / "multi" / "a b" / "logs").glob("*/node-*/*/attempt_0/*/stderr.log"))
    assert len(logs) == 4
    begun = [re.findall(r"rank (\d) of (\d) begins at 0", log.read_text()) for log in logs]
    assert begun == [[(str(rank), "4")] for rank in range(4)]  # node 0 runs ranks 0 and 1


TAKES_PORTS = """#!/usr/bin/env bash
# ssh HOST COMMAND, where another program takes the port of the first attempt's meeting as soon as it is known
shift
if [[ "$*" != *--meet=* || "$*" == *--run-id=meeting* || -e taken ]]; then exec bash -c "$*"; fi
told="$(bash -c "$*")"
setsid {python} -c "import socket, time
s = socket.create_server(('127.0.0.1', $(cut -d ' ' -f 2 <<<"$told")))
open('taken', 'w'); time.sleep(120)" >/dev/null 2>&1 </dev/null &
while [[ ! -e taken ]]; do sleep 0.05; done
printf '%s\\n' "$told"
"""


def test_fault_26_nodes_meet_again_where_their_port_was_taken_before_its_use(workspace: Path) -> None:
    (workspace / "ssh").write_text(TAKES_PORTS.format(python=sys.executable))
    with running(workspace, "run.yaml", "trainer.num_steps=3") as job:
        output = job.end()
    assert job.process.returncode == 0, output
    assert (workspace / "taken").exists() and "Traceback" not in output
    assert re.findall(r"error: the nodes cannot meet at 127\.0\.0\.1:\d+ \((.*)\)", output) == [
        "Address already in use"
    ]
    assert output.count("the nodes meet again, at another port") == 1
    assert counts(workspace) == [3] * 4


def test_a_killed_agent_ends_the_job_with_its_cause_and_leaves_nothing_behind(workspace: Path) -> None:
    with running(workspace, "run.yaml", "trainer.num_steps=100000") as job:
        job.wait_for(lambda: len(counts(workspace)) == 4)
        begun = descendants(job.process.pid)
        os.kill(agent_of(job.process.pid, 1), signal.SIGKILL)
        output = job.end()
        assert job.process.returncode == 128 + signal.SIGKILL, output
        assert "node 1 (localhost) ended with exit code 137" in output
        wait_for(lambda: not [pid for pid in begun if Path(f"/proc/{pid}").exists()])


def test_a_killed_agent_is_started_again_and_the_count_goes_on(workspace: Path) -> None:
    with running(workspace, "run.yaml", "trainer.num_steps=80", "trainer.max_restarts=1") as job:
        job.wait_for(lambda: len(counts(workspace)) == 4 and min(counts(workspace)) >= 2)
        os.kill(agent_of(job.process.pid, 1), signal.SIGKILL)
        output = job.end()
    assert job.process.returncode == 0, output
    assert "ended with exit code 137; restart 1 of 1" in output
    assert counts(workspace) == [80] * 4


def test_a_failing_ranks_code_and_last_words_come_out(workspace: Path) -> None:
    with running(workspace, "run.yaml", "trainer.num_steps=100000", STAND_IN_FAILS="3:2:7") as job:
        output = job.end()
    assert job.process.returncode == 7, output
    assert "the stand-in fails as it was told" in output
    assert "node 1" in output


def test_a_signal_reaches_every_rank_and_the_job_asks_to_be_started_again(workspace: Path) -> None:
    with running(workspace, "run.yaml", "trainer.num_steps=100000") as job:
        job.wait_for(lambda: len(counts(workspace)) == 4)
        job.process.send_signal(signal.SIGUSR1)
        output = job.end()
    assert job.process.returncode == 75, output
    assert "Traceback" not in output


def test_junk_on_the_control_line_is_a_mistake_that_ends_the_node(workspace: Path) -> None:
    arguments = ["--control", "--run-id=1.0.0", "--module=tests.stand_in", "run.yaml", "trainer.num_steps=100000"]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_mcore.cli.agent", *arguments],
        cwd=workspace,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=b"SIGUSR\xff\nSIGUSR1\n",
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 2 and b"Traceback" not in done.stderr, done.stderr
    told = [line for line in done.stderr.decode().splitlines() if line.startswith("error:")]
    assert told == [
        "error: --control: unknown signal 'SIGUSR\ufffd' on standard input; write one of SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 "
        "per line"
    ]


def test_a_mistake_is_told_before_anything_starts(workspace: Path) -> None:
    with running(workspace, "run.yaml", "trainer.nun_steps=1") as job:
        output = job.end()
    assert job.process.returncode == 2
    assert "trainer.nun_steps" in output and "Traceback" not in output
