"""``rlhf-mcore report RUN [RUN ...]``: write one HTML file about one or more runs. Needs no torch and no network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.commands.report.page import page
from rlhf_mcore.commands.report.run_data import find_runs, read_run
from rlhf_mcore.commands.report.server import ReportServer
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.observability.files import write_atomically
from rlhf_mcore.observability.run_directory import METRICS
from rlhf_mcore.own_files import check_output

PORT = 8321
MAX_ROLLOUTS = 10_000


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write the report and print its path. Returns the exit code."""
    args = _parser().parse_args(argv)
    check_options(args)
    if len(args.run) == 1 and not (args.run[0] / METRICS).is_file() and (runs_inside := find_runs(args.run[0])):
        if args.out is None:
            server = ReportServer([], args.rollouts, args.port, folder=args.run[0])
            return serve(server, f"all runs in {args.run[0]}")
        args.run = runs_inside
    out = args.out or args.run[0] / "report.html"
    if args.out is None and not args.run[0].is_dir():
        read_run(args.run[0], 0)  # raises an error that names the problem
    check_output("--out", out)
    with working("reading", len(args.run)) as begin:
        runs = []
        for run in args.run:
            begin(str(run))
            runs.append(read_run(run, args.rollouts))
        content = page(runs).encode("utf-8")
    write_atomically(out, content)
    say(f"{out} ({len(content) / 1e6:.1f} MB); open it in a browser")
    for run in runs:
        if run.num_rollouts > args.rollouts:
            say(f"{run.name}: the page contains about {args.rollouts} of {run.num_rollouts} rollouts (--rollouts)")
    return terminal.DONE


def serve(server: ReportServer, what: str) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    with server, suppress(KeyboardInterrupt):
        say(f"http://127.0.0.1:{server.server_port}/ shows {what}; Ctrl-C stops the server", flush=True)
        server.serve_forever()
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore report",
        "Write one HTML file about one or more runs: health, curves, time per phase, responses, and differences between "
        "configurations. The file needs no network and can be sent to others. For a folder of runs, this command serves a live "
        "index at http://127.0.0.1:8321/, or writes all runs to one file with --out.",
        examples=[
            "rlhf-mcore report outputs/quickstart/grpo",
            "rlhf-mcore report outputs/math/a outputs/math/b --out both.html",
            "rlhf-mcore report outputs/",
        ],
    )
    parser.add_argument(
        "run", type=Path, nargs="+", metavar="RUN", help="directory of a run, which may be running, or a folder of runs"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write (default: report.html in the directory of the first run)",
    )
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that this command shares with ``watch``."""
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help="port; 0: any free port (default: %(default)s)"
    )
    parser.add_argument(
        "--rollouts",
        type=int,
        default=MAX_ROLLOUTS,
        metavar="N",
        help="maximum number of rollouts per run, from the first and the newest steps (default: %(default)s)",
    )


def check_options(args: argparse.Namespace) -> None:
    """Check the values of these options.

    Raises:
        ConfigError: a value is out of range.
    """
    if not 0 <= args.port <= 65535:
        raise ConfigError(f"--port {args.port} is out of range; give a number from 0 (any free port) to 65535")
    if args.rollouts < 0:
        raise ConfigError(f"--rollouts {args.rollouts} is out of range; give 0 or a larger number")
