"""Start torchrun on this machine as a child, without torch in this process: signals go in, the exit code comes out.

A run on one machine listens on the loopback only. torchrun's usual stores listen on every interface, and its rendezvous
unpickles what it finds there; so the rendezvous is a file in a private directory, and ``rendezvous.connect`` makes the
store of the workers. For several machines see ``agent``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from rlhf_mcore.cli.exit_codes import DONE, REQUEUE, USER_ERROR, of_process
from rlhf_mcore.cli.rendezvous import LOOPBACK

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TRAIN = "rlhf_mcore.cli.train"
SHARE_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # torchrun's own name for it
# Exit codes after which nothing is started again: the run has said so itself, or somebody has ended it.
FINAL = (DONE, USER_ERROR, REQUEUE, *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)))


def launch(
    arguments: Sequence[str], world_size: int, threads_per_rank: int, module: str = TRAIN, max_restarts: int = 0
) -> int:
    """Run ``python -m module *arguments`` in ``world_size`` processes. Returns the exit code of the last attempt."""

    def attempt(_number: int) -> int:
        with TemporaryDirectory(prefix="rlhf_mcore-") as folder:  # readable by this user only
            options = local_rendezvous(Path(folder) / "rendezvous")
            command = torchrun_command(options, world_size, arguments, module)
            return run_child(command, child_environment(os.environ, threads_per_rank) | {SHARE_NO_STORE: "1"})

    return with_restarts(attempt, max_restarts)


def with_restarts(attempt: Callable[[int], int], max_restarts: int) -> int:
    """Call ``attempt`` (with 0, 1, ...) until it ends in a way that another attempt would not change. Returns its exit code."""
    for number in range(max_restarts):
        code = attempt(number)
        if code in FINAL:
            return code
        print(f"ended with exit code {code}; restart {number + 1} of {max_restarts}", file=sys.stderr, flush=True)
    return attempt(max_restarts)


def torchrun_command(
    options: Sequence[str], ranks_per_node: int, arguments: Sequence[str], module: str = TRAIN
) -> list[str]:
    """The command line of torchrun, through the module that keeps the workers' exit code."""
    torchrun = [sys.executable, "-m", "rlhf_mcore.cli.torchrun", f"--nproc-per-node={ranks_per_node}"]
    return [*torchrun, *options, "-m", module, *arguments]


def local_rendezvous(path: Path) -> list[str]:
    """Options of torchrun for a run on this machine alone that meets in a file."""
    return [
        "--nnodes=1:1",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={path}",
        f"--rdzv-id={path.parent.name}",
        f"--local-addr={LOOPBACK}",
    ]


def child_environment(
    environment: Mapping[str, str], threads_per_rank: int, address: str = LOOPBACK, interface: str | None = None
) -> dict[str, str]:
    """The environment of torchrun and its workers, which talk over one interface (None: the loopback).

    What the user has set wins, except for the number of threads, and for an interface that only reaches this machine.
    """
    child = dict(environment)
    child["OMP_NUM_THREADS"] = str(threads_per_rank)
    names = [name for _, name in socket.if_nameindex()]
    loopbacks = [name for name in ("lo", "lo0") if name in names]
    for variable, value in (
        ("VLLM_HOST_IP", address),
        ("GLOO_SOCKET_IFNAME", interface or next(iter(loopbacks), None)),
        ("NCCL_SOCKET_IFNAME", interface or next(iter(loopbacks), None)),
    ):
        if interface is not None and child.get(variable) in (*loopbacks, LOOPBACK):
            del child[variable]
        if value is not None:
            child.setdefault(variable, value)
    return child


def run_child(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a command to its end, handing on the signals that ask us to stop. Returns its exit code."""
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        # A session of its own: Ctrl-C at the terminal then reaches the child once, through us, and not twice.
        child = subprocess.Popen(list(command), env=dict(environment), start_new_session=True)
        for number in early:
            child.send_signal(number)
        return of_process(child.wait())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
