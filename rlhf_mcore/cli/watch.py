"""``rlhf-mcore watch RUN [RUN ...]``: the report of runs that are going on, served to a browser on this machine only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.report import add_rollouts, check_rollouts
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError

PORT = 8321


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C. Returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        from rlhf_mcore.report.server import ReportServer

        check_rollouts(args.rollouts)
        if not 0 <= args.port <= 65535:
            raise ConfigError(f"--port {args.port} is out of range; give a number from 0 (any free port) to 65535")
        server = ReportServer(args.run, args.rollouts, args.port)
    except (ConfigError, OSError) as error:
        return exit_codes.report_of_tool(error)
    with server:
        say(
            f"http://127.0.0.1:{server.server_port}/ shows {', '.join(map(str, args.run))}; Ctrl-C ends it", flush=True
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return exit_codes.DONE
    return exit_codes.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore watch",
        "Show the report of runs in a browser while they go on. It is served on the loopback interface only; from another machine "
        "use ssh -L 8321:127.0.0.1:8321.",
        "examples:\n  rlhf-mcore watch outputs/quickstart/grpo\n\n" + exit_codes.TOOL_EPILOG,
    )
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help="0: any free one (default: %(default)s)")
    add_rollouts(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
