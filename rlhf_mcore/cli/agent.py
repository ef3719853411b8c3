"""Start one node of a run on several nodes: ``python -m rlhf_mcore.cli.agent ... CONFIG [a.b=c ...]``, once per node.

The agent starts the supervisor of this node's ranks. Scripts start the agent: ``launch/slurm/train.sbatch`` through srun,
``contrib/ssh`` through ssh. With ``--meet`` it only prints the rendezvous address of the nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.launch import FORWARDED, TRAIN, build_environment, run_child, supervisor_command
from rlhf_mcore.cli.preflight import KEPT_STARTS
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import shorten
from rlhf_mcore.own_files import refuse_link
from rlhf_mcore.parallel.addresses import LOOPBACK, free_port, interface_addresses, interface_of, source_address

OUTCOME = "outcome"


def main(argv: Sequence[str] | None = None) -> int:
    """Start this node's ranks and wait for them. Returns the exit code of the rank that failed first, or 0."""
    args = _parser().parse_intermixed_args(argv)
    try:
        cfg = load_config(args.config, args.overrides)
        if args.meet is not None:
            address = meeting_address(args.meet, args.interface)
            say(f"{address} {free_port(address)} {cfg.trainer.max_restarts} {logs_directory(cfg, args.run_id)}")
            return exit_codes.DONE
        return _run(cfg, args)
    except (ConfigError, OSError) as error:
        return exit_codes.report_of_tool(error)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "python -m rlhf_mcore.cli.agent",
        "Start the ranks of one node of a run on several nodes.",
        exits=exit_codes.EPILOG,
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
    with contextlib.suppress(OSError):
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
    if code != exit_codes.DONE:
        _record(logs / OUTCOME, code, args.node_rank, time.monotonic() - started)
    return code


def _record(path: Path, code: int, node_rank: int, seconds: float) -> None:
    """Write the exit code for the program that started the nodes. Only the first node that fails writes, as it is the cause."""
    line = f"{code} node {node_rank} ({socket.gethostname()}) ended with exit code {code} after {seconds:.0f} s\n"
    with contextlib.suppress(OSError):  # standard error may be a file on a full disk
        say(line.partition(" ")[2], end="", file=sys.stderr)
    with (
        contextlib.suppress(OSError),
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


if __name__ == "__main__":
    sys.exit(main())
