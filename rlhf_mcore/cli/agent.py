"""Start the supervisor of the ranks on this machine, forward signals to it, and return its exit code, without importing torch.

``launch`` starts a run on one machine, which listens on the loopback only.

``python -m rlhf_mcore.cli.agent ... CONFIG [a.b=c ...]`` starts one node of a run on several nodes, once per node. Scripts start
this agent: ``launch/slurm/train.sbatch`` through srun, ``contrib/ssh`` through ssh. With ``--meet`` it only prints the rendezvous
address of the nodes.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.preflight import KEPT_STARTS
from rlhf_mcore.cli.terminal import DONE, EPILOG, REQUEUE, STOPPED, USER_ERROR, report_of_tool, say, to_shell_code
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import shorten
from rlhf_mcore.own_files import refuse_link
from rlhf_mcore.own_processes import STARTED_BY, adopt_orphans, children, end_all, has_ended, start
from rlhf_mcore.parallel.addresses import LOOPBACK, free_port, interface_addresses, interface_of, source_address
from rlhf_mcore.redaction import REDACTED, redact_arguments

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TRAIN = "rlhf_mcore.cli.train"
_GRACE_S = 5.0
SHOW_CURSOR = b"\x1b[?25h"
ENDED_FROM_OUTSIDE = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
# Exit codes without a restart: the run is over, a restart would not help, or a signal from outside ended it.
FINAL = (DONE, USER_ERROR, REQUEUE, STOPPED, *ENDED_FROM_OUTSIDE)
OUTCOME = "outcome"  # file with the exit code of the first node that failed


def main(argv: Sequence[str] | None = None) -> int:
    """Start this node's ranks and wait for them. Returns the exit code of the rank that failed first, or 0."""
    args = _parser().parse_intermixed_args(argv)
    try:
        cfg = load_config(args.config, args.overrides)
        if args.meet is not None:
            address = meeting_address(args.meet, args.interface)
            say(f"{address} {free_port(address)} {cfg.trainer.max_restarts} {logs_directory(cfg, args.run_id)}")
            return DONE
        return _run(cfg, args)
    except (ConfigError, OSError) as error:
        return report_of_tool(error)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "python -m rlhf_mcore.cli.agent",
        "Start the ranks of one node of a run on several nodes.",
        exits=EPILOG,
        config="YAML file, as for train",
    )
    parser.add_argument(
        "--run-id", required=True, metavar="NAME", help="name of this attempt; its logs are in logs/NAME"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N")
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="K", help="0 to N-1; ranks are numbered in this order"
    )
    parser.add_argument("--ranks-per-node", type=int, default=1, metavar="M")
    parser.add_argument("--address", default=LOOPBACK, help="address of the first node")
    parser.add_argument("--port", type=int, default=0, help="port of the store on the first node")
    parser.add_argument("--module", default=TRAIN, help=f"module that every rank runs (default: {TRAIN})")
    parser.add_argument(
        "--control", action="store_true", help="read signal names from stdin, and end when stdin closes"
    )
    parser.add_argument(
        "--meet",
        metavar="PEER",
        help="print 'ADDRESS PORT MAX_RESTARTS LOGS' with the address of this node on the route to the node PEER, and stop",
    )
    parser.add_argument("--interface", help="with --meet: network interface (default: the interface towards PEER)")
    return parser


def logs_directory(cfg: Config, run_id: str) -> Path:
    """Return the directory for an attempt's logs, which is inside the run directory.

    Raises:
        ConfigError: a name leads out of the run directory, or ``logs`` is a link.
    """
    root = Path(os.path.realpath(cfg.output_dir))
    logs = Path(os.path.realpath(root / cfg.project / cfg.experiment)) / "logs"
    if root not in logs.parent.parents or os.path.basename(run_id) != run_id or run_id in ("", ".", ".."):
        raise ConfigError(
            f"project={cfg.project!r}, experiment={cfg.experiment!r} and --run-id={run_id!r} must name directories inside "
            f"output_dir={cfg.output_dir!r}; use plain names"
        )
    refuse_link(logs)
    return logs / run_id


def prune_logs(logs: Path) -> None:
    """Remove old logs, so that ``KEPT_STARTS`` attempts remain with the next attempt. Directories of other programs stay."""
    with suppress(OSError):
        attempts = [path for path in logs.iterdir() if not path.is_symlink() and (path / "node-0").is_dir()]
        for path in sorted(attempts, key=lambda path: path.stat().st_mtime)[: -(KEPT_STARTS - 1)]:
            shutil.rmtree(path, ignore_errors=True)


def meeting_address(peer: str, interface: str | None) -> str:
    """Return this node's address for other nodes: the address of ``interface``, or of the interface towards ``peer``.

    Raises:
        ConfigError: there is no such interface, or no such host.
    """
    if interface is not None:
        addresses = interface_addresses()
        if interface not in addresses:
            raise ConfigError(
                f"--interface {interface}: not an interface of {socket.gethostname()}; use {', '.join(addresses)}"
            )
        return addresses[interface]
    try:
        return source_address(peer)
    except OSError as error:
        raise ConfigError(
            f"{socket.gethostname()} cannot resolve the host {peer!r} ({error}); check the name"
        ) from error


def _run(cfg: Config, args: argparse.Namespace) -> int:
    local = source_address(args.address)
    interface = None if local == LOOPBACK else interface_of(local)
    logs = logs_directory(cfg, args.run_id)
    if args.node_rank == 0:
        prune_logs(logs.parent)
    mine = logs / f"node-{args.node_rank}"
    mine.mkdir(parents=True, exist_ok=True)
    options = [f"--ranks={args.ranks_per_node}", f"--nodes={args.nodes}", f"--node-rank={args.node_rank}"]
    options += [f"--address={args.address}", f"--port={args.port}", f"--logs={mine}"]
    command = supervisor_command(options, [args.config, *args.overrides], args.module)
    environment = build_environment(os.environ, cfg.trainer.threads_per_rank, local, interface)
    started = time.monotonic()
    unknown: list[str] = []
    code = run_child(command, environment, partial(obey_stdin, unknown) if args.control else None)
    if unknown:
        names = ", ".join(number.name for number in FORWARDED)
        raise ConfigError(
            f"--control: unknown signal {shorten(unknown[0], 80)!r} on standard input; write one of {names} per line"
        )
    if code != DONE:
        _record(logs / OUTCOME, code, args.node_rank, time.monotonic() - started)
    return code


def _record(path: Path, code: int, node_rank: int, seconds: float) -> None:
    """Write the exit code for the program that started the nodes. Only the first node that fails writes, as it is the cause."""
    line = f"{code} node {node_rank} ({socket.gethostname()}) ended with exit code {code} after {seconds:.0f} s\n"
    with suppress(OSError):  # standard error may be a file on a full disk
        say(line.partition(" ")[2], end="", file=sys.stderr)
    with (
        suppress(OSError),
        path.open("x", encoding="utf-8") as file,
    ):  # the file exists already, or the disk is full
        file.write(line)


def obey_stdin(unknown: list[str]) -> None:
    """Read signal names from stdin and send these signals to this process; send SIGHUP when stdin closes.

    An unknown name is added to ``unknown``, and ends the reading as a closed stdin does.
    """
    signals = {number.name: number for number in FORWARDED}
    # Do not read stdin's buffer: the reading thread would hold a lock, and Python aborts if the process ends meanwhile.
    assert isinstance(sys.stdin, io.TextIOWrapper)
    sys.stdin.reconfigure(errors="replace")
    for line in sys.stdin:
        name = line.strip()
        if name not in signals:
            unknown.append(name)
            break
        os.kill(os.getpid(), signals[name])
    os.kill(os.getpid(), signal.SIGHUP)


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


if __name__ == "__main__":
    sys.exit(main())
