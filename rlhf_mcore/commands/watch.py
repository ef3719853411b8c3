"""``rlhf-mcore watch RUN [RUN ...]``: serve the report of running runs to a browser on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.commands.report.command import add_options, check_options, serve
from rlhf_mcore.commands.report.server import ReportServer


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    args = _parser().parse_args(argv)
    check_options(args)
    return serve(ReportServer(args.run, args.rollouts, args.port), ", ".join(map(str, args.run)))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore watch",
        "Show the report of runs in a browser while they are running. The page is served on the loopback interface only; from "
        "another machine, use ssh -L 8321:127.0.0.1:8321.",
        examples=["rlhf-mcore watch outputs/quickstart/grpo"],
    )
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    add_options(parser)
    return parser
