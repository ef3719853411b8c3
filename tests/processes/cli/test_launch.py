"""Test the supervisor's command, environment, signals and exit code. No rank is started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlhf_mcore.cli import agent, supervisor
from rlhf_mcore.cli.agent import build_environment, run_child, supervisor_command, with_restarts
from rlhf_mcore.observability.rank_file import RankFiles
from rlhf_mcore.own_processes import STARTED_BY, has_ended
from rlhf_mcore.parallel.addresses import interface_of, listener, source_address
from tests.commands import descendants, wait_for

ROOT = Path(__file__).resolve().parents[3]


def test_the_command_hands_the_arguments_on() -> None:
    command = supervisor_command(["--ranks=4", "--terminal"], ["a b.yaml", "x=${seed}", "--resolved=/proc/1/fd/3"])
    assert command[:3] == [sys.executable, "-m", "rlhf_mcore.cli.supervisor"]
    args = supervisor._parser().parse_args(command[3:])
    assert (args.ranks, args.nodes, args.node_rank, args.address, args.port) == (4, 1, 0, "127.0.0.1", 0)
    assert (args.module, args.terminal) == ("rlhf_mcore.cli.train", True)
    assert args.arguments == ["a b.yaml", "x=${seed}", "--resolved=/proc/1/fd/3"]


def test_the_environment_binds_to_the_loopback_unless_the_user_says_otherwise() -> None:
    child = build_environment({"OMP_NUM_THREADS": "64", "GLOO_SOCKET_IFNAME": "eth7", "PATH": "/bin"}, 2)
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
time.sleep(600)
"""
PARENT = f"""
import os, sys
from rlhf_mcore.cli.agent import run_child
sys.exit(run_child([sys.executable, "-c", {CHILD!r}], os.environ))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_reach_the_child(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(number)
        assert parent.wait(timeout=120) == 40 + number


def test_nodes_use_the_interface_that_they_meet_on_and_keep_the_users_choice() -> None:
    settings = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    child = build_environment(settings, 1, "10.0.0.7", "eth1")
    assert (child["GLOO_SOCKET_IFNAME"], child["NCCL_SOCKET_IFNAME"]) == ("eth1", "ib0")
    assert child["VLLM_HOST_IP"] == "10.0.0.7"


def test_engines_of_other_machines_are_reached_by_nccl_too(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []
    monkeypatch.setattr(agent, "run_child", lambda _, environment: started.append(environment) or 0)
    monkeypatch.setattr(agent, "source_address", {"head": "10.0.0.7"}.__getitem__)
    monkeypatch.setattr(agent, "interface_of", {"10.0.0.7": "eth1"}.__getitem__)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert agent.launch([], 1, 1, engines="head:6379") == 0
    assert (started[0]["NCCL_SOCKET_IFNAME"], started[0]["GLOO_SOCKET_IFNAME"]) == (
        "eth1",
        "lo",
    )  # the ranks are all here
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    agent.launch([], 1, 1, engines="head:6379")
    assert started[1]["NCCL_SOCKET_IFNAME"] == "ib0"


def test_the_store_listens_on_one_address_only() -> None:
    with listener("127.0.0.1") as made:
        address, port = made.getsockname()
        assert (address, port > 0) == ("127.0.0.1", True)


def test_the_way_to_a_host_gives_address_and_interface() -> None:
    assert source_address("localhost") == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    with pytest.raises(ValueError, match=r"192\.0\.2\.1"):  # the network is reserved for documentation (RFC 5737)
        interface_of("192.0.2.1")


@pytest.mark.parametrize(
    ("codes", "max_restarts", "expected"),
    [
        ([1, 0], 2, (0, 2)),  # the second attempt succeeds
        ([1, 137, 1], 2, (1, 3)),  # at most the allowed number of attempts
        ([1], 0, (1, 1)),
        ([2], 5, (2, 1)),  # a user's mistake does not go away
        ([76], 5, (76, 1)),  # stopped by an alarm
        ([75], 5, (75, 1)),  # saved on request, so the supervisor does not restart it
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
from rlhf_mcore.checkpoint.triggers import SignalRequests
print("starting", flush=True)
sys.stdin.readline()
with SignalRequests().listening() as requests:
    print(requests.stop_requested, flush=True)
"""
HOLDER = f"""
import subprocess, sys, time
from rlhf_mcore.cli.supervisor import forward_signals
forward_signals()
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
        assert parent.wait(timeout=120) == 0


def failure(exitcode: int, timestamp: int, local_rank: int = 0) -> SimpleNamespace:
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, local_rank=local_rank)


def test_the_exit_code_is_that_of_the_cause_not_of_those_that_were_ended_for_it() -> None:
    """torch ends the other ranks with SIGTERM. Their order within the same second says nothing."""
    assert supervisor.find_first_failure({0: failure(-15, 100), 1: failure(75, 100)})[0] == 1
    assert supervisor.find_first_failure({0: failure(-15, 99), 1: failure(-9, 100), 2: failure(1, 101)})[0] == 1
    assert supervisor.find_first_failure({0: failure(-15, 101), 1: failure(-15, 100)})[0] == 1


def test_workers_are_found_whatever_their_name() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in list(supervisor.children())
            assert os.getppid() not in list(supervisor.children())
        finally:
            child.kill()


def test_signals_that_ask_for_a_save_end_nothing() -> None:
    assert {number.name for number in supervisor.FORWARDED} == {"SIGUSR1", "SIGUSR2", "SIGTERM"}
    assert not {number.name for number in supervisor.FORWARDED} & set(supervisor.ENDING)
    assert set(supervisor.FORWARDED) <= set(agent.FORWARDED)


class Files(RankFiles):
    """Files of ranks in phase update. Some ranks report an error."""

    def __init__(self, *errors: dict[str, Any], ranks: int = 2, done: bool = False) -> None:
        super().__init__(has_ended=lambda pid: False)
        self.told = {rank: {"local_rank": rank, "phase": "update", "done": done} for rank in range(ranks)}
        for time, error in enumerate(errors):
            self.told[error["rank"]] |= {**error, "time": float(time)}

    def read(self) -> dict[int, dict[str, Any]]:
        return self.told


BAD = {"rank": 1, "kind": "failure", "message": "KeyError: 'answer' (reward.py:3, in score)"}
MISTAKE = {"rank": 1, "kind": "user", "message": "reward.function=... returned None; return a number"}
LOST = {"rank": 0, "kind": "consequence", "message": "RuntimeError: Connection closed by peer"}


@pytest.mark.parametrize(
    ("told", "failures", "code", "words"),
    [
        # the rank that lost its peer reports first, and torchrun's seconds are equal
        ([LOST, BAD], {0: failure(1, 100), 1: failure(1, 100)}, 1, BAD["message"]),
        ([MISTAKE, LOST], {0: failure(1, 100), 1: failure(2, 100)}, 2, MISTAKE["message"]),
        ([BAD], {0: failure(-9, 130), 1: failure(1, 100)}, 1, BAD["message"]),  # torchrun had to kill the other rank
        (
            [MISTAKE],
            {0: failure(-9, 130), 1: failure(-15, 100)},
            2,
            MISTAKE["message"],
        ),  # or torchrun ended both because of a third rank
        ([LOST], {0: failure(1, 100), 1: failure(-9, 101)}, 137, "rank 1 was ended by SIGKILL"),
        ([], {0: failure(-15, 100), 1: failure(-11, 100)}, 139, "rank 1 was ended by SIGSEGV"),
        ([LOST], {0: failure(1, 100)}, 1, "rank 1 ended with exit code 0 before the run was done"),
        ([], {0: failure(7, 100), 1: failure(-15, 100)}, 7, "rank 0 ended with exit code 7"),
    ],
)
def test_one_message_names_the_cause_and_its_rank(
    told: list[dict[str, Any]], failures: dict[int, Any], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert supervisor.Supervisor(Files(*told)).report(failures) == code
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: {words}") and printed.count("error: ") == 1
    rank = 0 if 7 in (found.exitcode for found in failures.values()) else 1
    assert f"(rank {rank} in phase update)" in printed


def test_a_run_that_saved_and_asks_to_be_started_again_says_nothing_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert supervisor.Supervisor(Files()).report({0: failure(75, 100), 1: failure(-15, 100)}) == 75  # type: ignore[dict-item]
    assert supervisor.Supervisor(Files()).report({0: failure(-15, 100), 1: failure(76, 100)}) == 76  # type: ignore[dict-item]
    assert capsys.readouterr().err == ""


def test_exit_code_0_needs_the_word_of_every_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert supervisor.Supervisor(Files(done=True)).check_done() == 0
    assert supervisor.Supervisor(Files(ranks=0)).check_done() == 0  # a module without rank files
    assert capsys.readouterr().err == ""
    assert supervisor.Supervisor(Files()).check_done() == 1
    assert "rank 0 ended with exit code 0 before the run was done" in capsys.readouterr().err


def test_the_log_of_a_killed_rank_is_named_and_its_end_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "logs" / "run_x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    agent = supervisor.Supervisor(Files(), logs=tmp_path / "logs")
    agent.report({1: failure(-11, 100, local_rank=1)})  # type: ignore[dict-item]
    lines = capsys.readouterr().err.splitlines()
    assert (lines[1].strip(), lines[-2].strip(), len(lines)) == ("line 80", "line 99", 22)
    assert lines[-1] == "(rank 1 in phase update; its log: logs/run_x/attempt_0/1/stderr.log)"


ORPHANS = """
import os, subprocess, sys
from rlhf_mcore.cli import agent
from rlhf_mcore.cli.agent import run_child
agent._GRACE_S = 0.1
code = 'import os, subprocess as s; print(s.Popen(["sleep", "60"], start_new_session=True).pid, flush=True); os.kill(os.getpid(), 9)'
print(run_child([sys.executable, "-c", code], os.environ), flush=True)
"""


def test_what_a_killed_child_leaves_running_is_ended_before_anything_else_starts() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS], cwd=ROOT, capture_output=True, text=True, timeout=240)
    orphan, code = map(int, done.stdout.split())
    assert code == 137 and not Path(f"/proc/{orphan}").exists()


DIES_WITH_PARENT = """
import signal, sys, time
from rlhf_mcore.own_processes import end_with_parent
end_with_parent(signal.SIGKILL)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    start = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {DIES_WITH_PARENT!r}]); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, cwd=ROOT) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        (child,) = descendants(parent.pid)
        parent.kill()
        wait_for(lambda: has_ended(child))


def test_a_parent_that_has_ended_before_is_noticed() -> None:
    environment = os.environ | {STARTED_BY: "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", DIES_WITH_PARENT], env=environment, capture_output=True, timeout=240)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@pytest.mark.parametrize(
    ("saves", "code", "printed"), [(False, 143, b""), (True, 0, b"SIGUSR1\n")], ids=["an evaluation", "a training"]
)
def test_sigterm_asks_ranks_to_save_and_ends_those_that_save_nothing(saves: bool, code: int, printed: bytes) -> None:
    terminated = f"""
import signal
from rlhf_mcore.cli.supervisor import Supervisor
agent = Supervisor(None, saves={saves})
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
agent._terminate(signal.SIGTERM, None)
print(*(number.name for number in signal.sigpending()))
"""
    done = subprocess.run([sys.executable, "-c", terminated], stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (code, printed)


def test_only_a_training_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(agent, "run_child", lambda command, _: commands.append(command) or 0)
    agent.launch([], 1, 1)
    agent.launch([], 1, 1, module="rlhf_mcore.commands.evaluate.command")
    assert ["--unsaved" in command for command in commands] == [False, True]


INTERRUPTED = """
from rlhf_mcore.observability.rank_file import RankFiles
from rlhf_mcore.cli.supervisor import Supervisor
agent = Supervisor(RankFiles(lambda pid: True), "rlhf_mcore.cli.train")
agent._interrupt(2, None)
"""


def test_on_a_terminal_the_message_of_ctrl_c_has_a_line_of_its_own() -> None:
    ours, its = os.openpty()  # if ^C or the edge of the live display is already on the line
    try:
        done = subprocess.run([sys.executable, "-c", INTERRUPTED], stderr=its)
        shown = os.read(ours, 4096)
    finally:
        os.close(ours)
        os.close(its)
    assert done.returncode == 130
    assert shown == b"\r\ninterrupted: ended before the first step; there was nothing to save\r\n"
    logged = subprocess.run([sys.executable, "-c", INTERRUPTED], stderr=subprocess.PIPE)
    assert logged.stderr == b"interrupted: ended before the first step; there was nothing to save\n"
