"""The parent of torchrun: its command, its environment, signals in and exit code out. torchrun itself is not started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlhf_mcore.cli import launch, torchrun
from rlhf_mcore.cli.launch import child_environment, local_rendezvous, run_child, torchrun_command, with_restarts
from rlhf_mcore.cli.rendezvous import interface_of, listener, source_address
from tests.processes import descendants, wait_for

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_hands_the_arguments_on() -> None:
    command = torchrun_command(local_rendezvous(Path("/private/rendezvous")), 4, ["a b.yaml", "x=${seed}"])
    assert command[:3] == [sys.executable, "-m", "rlhf_mcore.cli.torchrun"]
    assert command[-4:] == ["-m", "rlhf_mcore.cli.train", "a b.yaml", "x=${seed}"]
    assert "--nproc-per-node=4" in command
    assert "--local-addr=127.0.0.1" in command
    assert {"--rdzv-conf=store_type=file", "--rdzv-endpoint=/private/rendezvous"} <= set(command)


def test_the_environment_binds_to_the_loopback_unless_the_user_says_otherwise() -> None:
    child = child_environment({"OMP_NUM_THREADS": "64", "GLOO_SOCKET_IFNAME": "eth7", "PATH": "/bin"}, 2)
    assert child["OMP_NUM_THREADS"] == "2"
    assert child["GLOO_SOCKET_IFNAME"] == "eth7"
    assert child["NCCL_SOCKET_IFNAME"] in ("lo", "lo0")
    assert (child["VLLM_HOST_IP"], child["PATH"]) == ("127.0.0.1", "/bin")


@pytest.mark.parametrize(("code", "expected"), [("exit(0)", 0), ("exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_the_exit_code_of_the_child_comes_out(code: str, expected: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert run_child([sys.executable, "-c", f"import os\n{code}"], os.environ) == expected
    assert signal.getsignal(signal.SIGTERM) is before


CHILD = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: sys.exit(40 + number))
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, sys
from rlhf_mcore.cli.launch import run_child
sys.exit(run_child([sys.executable, "-c", {CHILD!r}], os.environ))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_child(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(number)
        assert parent.wait(timeout=30) == 40 + number


def test_nodes_use_the_interface_that_they_meet_on_and_keep_the_users_choice() -> None:
    settings = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    child = child_environment(settings, 1, "10.0.0.7", "eth1")
    assert (child["GLOO_SOCKET_IFNAME"], child["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")
    assert child["VLLM_HOST_IP"] == "10.0.0.7"


def test_the_store_listens_on_one_address_only() -> None:
    with listener("127.0.0.1") as made:
        address, port = made.getsockname()
        assert (address, port > 0) == ("127.0.0.1", True)


def test_the_way_to_a_host_gives_address_and_interface() -> None:
    assert source_address("localhost") == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    with pytest.raises(ValueError, match=r"192\.0\.2\.1"):  # of a network for documentation, RFC 5737
        interface_of("192.0.2.1")


@pytest.mark.parametrize(
    ("codes", "max_restarts", "expected"),
    [
        ([1, 0], 2, (0, 2)),  # the second attempt goes through
        ([1, 137, 1], 2, (1, 3)),  # as many as allowed, and no more
        ([1], 0, (1, 1)),
        ([2], 5, (2, 1)),  # a mistake stays one
        ([75], 5, (75, 1)),  # saved because somebody asked: not ours to start again
        ([130], 5, (130, 1)),  # Ctrl-C
        ([143], 5, (143, 1)),
    ],
)
def test_what_is_started_again(codes: list[int], max_restarts: int, expected: tuple[int, int]) -> None:
    attempts: list[int] = []

    def attempt(number: int) -> int:
        attempts.append(number)
        return codes[number]

    assert (with_restarts(attempt, max_restarts), len(attempts)) == expected


WORKER_THAT_LISTENS_LATE = """
import os, signal, sys, time
from rlhf_mcore.checkpoint.signals import SignalRequests
print("starting", flush=True)
sys.stdin.readline()
with SignalRequests().listening() as requests:
    print(requests.stop_requested, flush=True)
"""
HOLDER = f"""
import subprocess, sys, time
from rlhf_mcore.cli.torchrun import hand_on_held
hand_on_held()
subprocess.run([sys.executable, "-c", {WORKER_THAT_LISTENS_LATE!r}], check=True)
"""


def test_a_signal_that_comes_before_a_worker_listens_is_kept_for_it() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        assert parent.stdout.readline() == "starting\n"
        parent.send_signal(signal.SIGUSR1)
        (worker,) = descendants(parent.pid)
        pending = re.compile(r"^ShdPnd:\s0*[1-9a-f]", re.MULTILINE)
        wait_for(lambda: pending.search(Path(f"/proc/{worker}/status").read_text()))
        parent.stdin.write("go on\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "True\n"
        assert parent.wait(timeout=30) == 0


def test_the_end_of_a_failed_ranks_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "run_x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    text = torchrun.tail_of_log(tmp_path, rank=5, local_rank=1)
    assert text.splitlines()[0] == f"rank 5, the end of {log}:"
    assert [text.splitlines()[1].strip(), text.splitlines()[-1].strip()] == ["line 80", "line 99"]
    assert "rank 4 has left no log" in torchrun.tail_of_log(tmp_path, rank=4, local_rank=0)


def failure(exitcode: int, timestamp: int) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp)


def test_the_exit_code_is_that_of_the_cause_not_of_those_that_were_ended_for_it() -> None:
    """torchrun ends the others by SIGTERM; in the same second their order says nothing."""
    assert torchrun.first_failure({0: failure(-15, 100), 1: failure(75, 100)})[0] == 1
    assert torchrun.first_failure({0: failure(-15, 99), 1: failure(-9, 100), 2: failure(1, 101)})[0] == 1
    assert torchrun.first_failure({0: failure(-15, 101), 1: failure(-15, 100)})[0] == 1


def test_workers_are_found_whatever_their_name() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in list(torchrun.children())
            assert os.getppid() not in list(torchrun.children())
        finally:
            child.kill()


def test_signals_that_ask_for_a_save_end_nothing() -> None:
    assert {number.name for number in torchrun.HANDED_ON} == {"SIGUSR1", "SIGUSR2", "SIGTERM"}
    assert not {number.name for number in torchrun.HANDED_ON} & set(torchrun.ENDING)
    assert set(torchrun.HANDED_ON) <= set(launch.FORWARDED)


def test_the_rank_that_failed_first_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def report(failures: dict[int, SimpleNamespace]) -> tuple[int, str]:
        error = Exception("two workers")
        error.failures = failures  # type: ignore[attr-defined]
        return torchrun._report(error, None), capsys.readouterr().err  # type: ignore[arg-type]

    killed = "two workers\nrank 1 failed first: ended by SIGKILL\n"
    assert report({0: failure(-15, 100), 1: failure(-9, 100)}) == (137, killed)
    failed = "two workers\nrank 0 failed first: exit code 1\n"
    assert report({0: failure(1, 100), 1: failure(-15, 100)}) == (1, failed)
    assert report({0: failure(75, 100), 1: failure(-15, 100)}) == (75, "")
