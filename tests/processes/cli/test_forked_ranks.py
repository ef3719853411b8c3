"""Check that forked ranks behave like separate processes for the run and for torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_mcore.cli import forked_ranks
from rlhf_mcore.cli.preflight import has_gpu
from tests.commands import ROOT, run_command

MODULE = "tests.processes.cli.forkable"
# Like torchrun's agent: with its own handler, a thread, and signals that ranks receive blocked.
AGENT = f"""
import json, os, signal, subprocess, sys, threading, time
from pathlib import Path

from rlhf_mcore.cli import forked_ranks

signal.signal(signal.SIGTERM, lambda *_: os._exit(99))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
assert forked_ranks.preload("{MODULE}", sys.argv[1:])
forked_ranks.fork_ranks()
start = forked_ranks.api.get_subprocess_handler
del os.environ["LEFT_OUT"]
world = {{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}}
codes = {{}}
for what in sys.argv[1:]:
    os.mkdir(what)
    ranks = [
        start(
            sys.executable, ("-u", "-m", "{MODULE}", what, what), world | {{"RANK": str(rank), "LOCAL_RANK": str(rank)}},
            f"{{what}}/out-{{rank}}", f"{{what}}/err-{{rank}}", rank, None,
        )
        for rank in range(2)
    ]
    if what == "sleep":
        while len(list(Path(what).glob("found-*"))) < 2:
            time.sleep(0.02)
        try:
            ranks[0].proc.wait(0.1)
        except subprocess.TimeoutExpired:
            assert ranks[0].proc.poll() is None
        for rank, number in zip(ranks, (signal.SIGTERM, signal.SIGKILL)):
            rank.close(death_sig=number)
    codes[what] = [rank.proc.wait(30) for rank in ranks]
print(json.dumps(codes))
"""


def terminal(folder: Path, *ends: str) -> dict[str, list[int]]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LEFT_OUT": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONIOENCODING"] = "ascii"  # a locale without all letters
    ended = run_command([sys.executable, "-W", "ignore", "-c", AGENT, *ends], folder, environment, 60)
    assert ended.returncode == 0, ended.stderr
    codes: dict[str, list[int]] = json.loads(ended.stdout)
    return codes


@pytest.mark.skipif(has_gpu(), reason="ranks are forked on a CPU only")
def test_forks_have_what_torchrun_gives_to_a_rank_and_their_exit_codes_come_out(tmp_path: Path) -> None:
    assert terminal(tmp_path, "end", "sleep", "raise") == {
        "end": [0, 7],
        "sleep": [-signal.SIGTERM, -signal.SIGKILL],
        "raise": [1, 1],
    }
    folder = tmp_path / "end"
    for rank in ("0", "1"):
        assert json.loads((folder / f"found-{rank}").read_text()) == {
            "forked": True,
            "leads its session": True,
            "environment": {"RANK": rank, "LEFT_OUT": None},
            "name": f"rank {rank}",
            "default": True,
            "held": [signal.SIGUSR1],  # until the rank handles signals
        }
        assert (folder / f"out-{rank}").read_text() == f"rank {rank} prints \\u2581\n"
        assert (folder / f"err-{rank}").read_text() == f"rank {rank} complains\n"
        assert (folder / f"at-exit-{rank}").exists() and (folder / f"thread-{rank}").exists()
    assert "rank 1: ValueError: a mistake in a rank" in (tmp_path / "raise" / "err-1").read_text()


WITH_A_THREAD = f"""
import ctypes, os
from rlhf_mcore.cli import forked_ranks
print(forked_ranks.preload("{MODULE}", []), forked_ranks.preload("{MODULE}", ["broken"]), forked_ranks.preload("json", []))
library, started = ctypes.CDLL(None), ctypes.c_ulong()
library.pthread_create(ctypes.byref(started), None, library.pause, None)  # which Python does not know of
print(forked_ranks.preload("{MODULE}", []))
"""


@pytest.mark.skipif(has_gpu(), reason="ranks are forked on a CPU only")
def test_a_process_with_a_thread_of_a_library_is_not_forked() -> None:
    told = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITH_A_THREAD], capture_output=True, text=True, cwd=ROOT
    )
    assert told.stdout.splitlines() == ["True False False", "False"], told.stderr


def test_a_signal_in_the_middle_of_a_fork_meets_the_handler_that_is_set_there() -> None:
    heard: list[str] = []
    before = signal.signal(signal.SIGUSR2, lambda *_: heard.append("the agent's"))
    try:
        with forked_ranks._block_signals():
            signal.raise_signal(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, lambda *_: heard.append("the rank's"))
            assert heard == []
        assert heard == ["the rank's"]
    finally:
        signal.signal(signal.SIGUSR2, before)
