"""Ctrl-C of a process that saves, and a run directory whose process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.run_directory import RunDirectory

pytestmark = pytest.mark.default
INTERRUPTED = """
import os, signal, sys
from rlhf_mcore.checkpoint.triggers import SignalRequests
with SignalRequests().listening() as requests:
    if sys.argv[1] == "training":
        requests.begin()
        os.kill(os.getpid(), signal.SIGINT)
        print("first", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("not reached", flush=True)
"""


@pytest.mark.parametrize(("when", "printed"), [("training", "first\n"), ("starting", "")])
def test_fault_30_the_second_ctrl_c_and_one_before_the_first_step_end_at_once(when: str, printed: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, when], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, printed, "")


HOLDER = """
import os, sys, time
from rlhf_mcore.observability.run_directory import RunDirectory
run = RunDirectory.create(sys.argv[1], "p", "e")
child = os.fork()
if child == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_killed_run_leaves_no_lock_even_if_its_child_lives_on(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(ConfigError, match=rf"process {holder.pid} on"):
            RunDirectory.create(str(tmp_path), "p", "e")
        holder.kill()
        holder.wait()
        os.kill(child, 0)  # still there
        RunDirectory.create(str(tmp_path), "p", "e").close()
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
