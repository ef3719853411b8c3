"""Start the supervisor of the ranks on this machine, forward signals to it, and return its exit code, without importing torch.

A run on one machine listens on the loopback only. For several machines see ``agent``.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rlhf_mcore.cli.exit_codes import DONE, REQUEUE, STOPPED, USER_ERROR, to_shell_code
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.own_processes import STARTED_BY, adopt_orphans, children, end_all, has_ended, start
from rlhf_mcore.parallel.addresses import LOOPBACK, interface_of, source_address
from rlhf_mcore.redaction import REDACTED, redact_arguments

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TRAIN = "rlhf_mcore.cli.train"
_GRACE_S = 5.0
SHOW_CURSOR = b"\x1b[?25h"
ENDED_FROM_OUTSIDE = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
# Exit codes without a restart: the run is over, a restart would not help, or a signal from outside ended it.
FINAL = (DONE, USER_ERROR, REQUEUE, STOPPED, *ENDED_FROM_OUTSIDE)


def launch(
    arguments: Sequence[str],
    world_size: int,
    threads_per_rank: int,
    module: str = TRAIN,
    max_restarts: int = 0,
    logs: Path | None = None,
    console: str = "off",
    engines: str | None = None,
) -> int:
    """Run ``python -m module *arguments`` in ``world_size`` processes. Returns the exit code of the last attempt.

    Args:
        logs: directory for files with the stderr of all ranks, and the stdout of all ranks except the first.
        console: the run's ``logging.console``. If the run has a live display, the start has one too.
        engines: address of Ray's head, if engines may run on other machines.
    """

    def attempt(_number: int) -> int:
        options = [f"--ranks={world_size}", "--terminal"]
        options += [f"--logs={logs}"] if logs is not None else []
        options += ["--shown"] if console in ("auto", "rich") and sys.stdout.isatty() else []
        options += ["--unsaved"] if module != TRAIN else []
        environment = build_environment(os.environ, threads_per_rank, nccl_interface=_interface_to(engines))
        return run_child(supervisor_command(options, arguments, module), environment)

    code = with_restarts(attempt, max_restarts)
    if code in (REQUEUE, STOPPED):
        again = format_command()
        hidden = f"  (replace {REDACTED} with your own value)" if REDACTED in again else ""
        say(f"to continue: {again}{hidden}", file=sys.stderr)
    return code


def format_command() -> str:
    """Return the command line of this process for the user to repeat. Secrets are redacted."""
    is_script = os.access(sys.argv[0], os.X_OK) and not sys.argv[0].endswith(".py")
    return shlex.join(redact_arguments(sys.argv if is_script else sys.orig_argv))


def with_restarts(attempt: Callable[[int], int], max_restarts: int) -> int:
    """Call ``attempt`` with 0, 1, ... until its exit code is in ``FINAL`` or no restart is left. Returns the last exit code."""
    for number in range(max_restarts):
        code = attempt(number)
        if code in FINAL:
            return code
        say(f"ended with exit code {code}; restart {number + 1} of {max_restarts}", file=sys.stderr)
    return attempt(max_restarts)


def supervisor_command(options: Sequence[str], arguments: Sequence[str], module: str = TRAIN) -> list[str]:
    """Return the command line that starts ranks of ``module``. It returns the exit code of the rank that failed first."""
    return [sys.executable, "-m", "rlhf_mcore.cli.supervisor", *options, module, *arguments]


def _interface_to(address: str | None) -> str | None:
    """Return the network interface towards ``host:port``; None without an address or host. Connecting reports a wrong host."""
    if address is None:
        return None
    with suppress(OSError, ValueError):
        return interface_of(source_address(address.rpartition(":")[0]))
    return None


def build_environment(
    environment: Mapping[str, str],
    threads_per_rank: int,
    address: str = LOOPBACK,
    interface: str | None = None,
    nccl_interface: str | None = None,
) -> dict[str, str]:
    """Return the environment of the supervisor and its ranks, which communicate over one interface (None: the loopback).

    NCCL reads its variable once per process, so ranks that send weights to other machines need ``nccl_interface`` from the start.

    The user's settings take precedence, except the number of threads, and an interface that reaches only this machine.
    """
    child = dict(environment)
    child["OMP_NUM_THREADS"] = str(threads_per_rank)
    names = [name for _, name in socket.if_nameindex()]
    loopbacks = [name for name in ("lo", "lo0") if name in names]
    for variable, value in (
        ("VLLM_HOST_IP", address),
        ("GLOO_SOCKET_IFNAME", interface or next(iter(loopbacks), None)),
        ("NCCL_SOCKET_IFNAME", nccl_interface or interface or next(iter(loopbacks), None)),
    ):
        if interface is not None and child.get(variable) in (*loopbacks, LOOPBACK):
            del child[variable]
        if value is not None:
            child.setdefault(variable, value)
    return child


def run_child(command: Sequence[str], environment: Mapping[str, str], beside: Callable[[], None] | None = None) -> int:
    """Run a command to its end, and forward the signals in ``FORWARDED`` to it. Returns its exit code.

    ``beside`` is called in a separate thread as soon as signals are forwarded.

    Processes that the command leaves running are ended, even if the command was killed. A rank that outlives the command would still
    write to the run directory.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    adopt_orphans()
    others = set(children())
    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        if beside is not None:
            threading.Thread(target=beside, daemon=True).start()
        # The child gets its own session, so that Ctrl-C at the terminal reaches it once, through this process.
        environment = {**environment, STARTED_BY: str(os.getpid())}
        child = start(command, env=environment)
        for number in early:
            child.send_signal(number)
        return to_shell_code(child.wait())
    finally:
        end_rest(others)
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), SHOW_CURSOR)  # a killed live display leaves the cursor hidden
        for number, handler in previous.items():
            signal.signal(number, handler)


def end_rest(others: set[int]) -> None:
    """Stop the processes that a child has left running, except ``others``.

    First wait at most ``_GRACE_S`` seconds for them to end by themselves, because Ray removes its files when it ends.
    """
    end = time.monotonic() + _GRACE_S
    while not all(map(has_ended, set(children()) - others)) and time.monotonic() < end:
        time.sleep(0.05)
    for _ in range(3):  # children of an ended process become children of this one
        end_all(set(children()) - others)
