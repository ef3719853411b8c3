"""Start torchrun on this machine as a child, without torch in this process: signals go in, the exit code comes out.

Everything listens on the loopback only. torchrun's usual stores listen on every interface, and its rendezvous unpickles
what it finds there; so the rendezvous is a file in a private directory, and ``rendezvous.connect`` makes the store of
the workers.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from rlhf_mcore.cli.exit_codes import of_process

LOOPBACK = "127.0.0.1"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TRAIN = "rlhf_mcore.cli.train"


def launch(arguments: Sequence[str], world_size: int, threads_per_rank: int, module: str = TRAIN) -> int:
    """Run ``python -m module *arguments`` in ``world_size`` processes. Returns the exit code."""
    with TemporaryDirectory(prefix="rlhf_mcore-") as folder:  # readable by this user only
        command = torchrun_command(arguments, world_size, Path(folder) / "rendezvous", module)
        return run_child(command, child_environment(os.environ, threads_per_rank))


def torchrun_command(arguments: Sequence[str], world_size: int, rendezvous: Path, module: str = TRAIN) -> list[str]:
    """The command line of torchrun, through the module that keeps the workers' exit code."""
    options = [
        "--nnodes=1:1",
        f"--nproc-per-node={world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-conf=store_type=file",
        f"--rdzv-endpoint={rendezvous}",
        f"--rdzv-id={rendezvous.parent.name}",
        f"--local-addr={LOOPBACK}",
    ]
    return [sys.executable, "-m", "rlhf_mcore.cli.torchrun", *options, "-m", module, *arguments]


def child_environment(environment: Mapping[str, str], threads_per_rank: int) -> dict[str, str]:
    """The environment of torchrun and its workers. What the user has set wins, except for the number of threads."""
    child = dict(environment)
    child["OMP_NUM_THREADS"] = str(threads_per_rank)
    child["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    child.setdefault("VLLM_HOST_IP", LOOPBACK)
    names = [name for _, name in socket.if_nameindex()]
    for interface in ("lo", "lo0"):
        if interface in names:
            child.setdefault("GLOO_SOCKET_IFNAME", interface)
            child.setdefault("NCCL_SOCKET_IFNAME", interface)
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
