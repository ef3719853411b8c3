"""Ray's head of a job reserves its port, prints its address, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.commands import descendants, environment, start_command, wait_for

CLIENT = re.compile(r"--ray-client-server-port=(\d+)")


def test_fault_26_the_ports_of_rays_head_are_held_or_chosen_when_they_are_bound(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("rlhf-ray-*"))
    command = [sys.executable, "-m", "rlhf_mcore.rollout.remote.node", "--address=127.0.0.1", "--head"]
    token = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
    with start_command(command, tmp_path, {**environment(tmp_path), **token}) as head:
        words = []

        def asks_for_a_port() -> bool:
            for pid in descendants(head.process.pid):
                with suppress(OSError):  # it has ended
                    words.extend(CLIENT.findall(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")))
            return bool(words)

        head.wait_for(asks_for_a_port, 60)
        # No other process can bind Ray's port, before Ray listens or after.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(words[0])))
        head.wait_for(lambda: "\nray " in f"\n{head.output()}", 120)
        host, _, port = head.output().partition("ray ")[2].split()[0].rpartition(":")
        socket.create_connection((host, int(port)), timeout=10).close()
        begun = [psutil.Process(pid) for pid in descendants(head.process.pid) if psutil.pid_exists(pid)]
        head.process.send_signal(signal.SIGTERM)
        head.end(60)
    assert (host, head.process.returncode) == ("127.0.0.1", 0)
    wait_for(lambda: not [process for process in begun if _runs(process)], 60, lambda: str(begun))
    left = set(Path("/tmp").glob("rlhf-ray-*")) - before
    assert not [folder for folder in left if str(folder) in head.output() or os.stat(folder).st_uid != os.getuid()]


def _runs(process: psutil.Process) -> bool:
    """Return whether the process runs. A new process with the same number does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
