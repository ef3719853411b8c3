"""``rlhf-mcore rollouts RUN_DIR list|add [N]|drain ID|remove ID``: list or change the engines of a running job."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import align_columns, say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rollout.remote.control import ask

_COLUMNS = {
    "name": "engine",
    "state": "state",
    "version": "weights",
    "requests": "requests",
    "tokens": "sampled tokens",
    "failures": "failures",
}
_MOST = 256  # engines added by one command


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Send the command to the job, then print its engines. Returns the exit code."""
    args = _parser().parse_args(argv)
    engines = _ask(Path(args.directory), args.command, args.argument)
    say(json.dumps(engines, indent=1) if args.json else "\n".join(_table(engines)))
    return terminal.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore rollouts",
        "List, add, drain or remove the engines of a job that runs on this machine with rollout.placement=disaggregated. An added "
        "engine answers requests after the next weight sync. A drained engine finishes its requests first. The requests of a "
        "removed engine go to other engines. The configuration does not change: a restarted run starts rollout.num_engines engines.",
        examples=["rlhf-mcore rollouts outputs/my/run list", "rlhf-mcore rollouts outputs/my/run add 2"],
    )
    parser.add_argument("directory", metavar="RUN_DIR", help="<output_dir>/<project>/<experiment> of the job")
    parser.add_argument("command", choices=("list", "add", "drain", "remove"), help="command for the job")
    parser.add_argument(
        "argument",
        nargs="?",
        metavar="N|ID",
        help="add: number of engines (default: 1); drain, remove: name of the engine",
    )
    parser.add_argument("--json", action="store_true", help="print the engines as JSON")
    return parser


def _ask(directory: Path, command: str, argument: str | None) -> list[dict[str, Any]]:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory; give the run directory of a job")
    if command == "list":
        if argument is not None:
            raise ConfigError(f"list takes no argument, found {argument!r}; leave it out")
        return ask(directory, command)
    if command == "add":
        if not (argument or "1").isdecimal() or not 1 <= int(argument or 1) <= _MOST:
            raise ConfigError(f"add {argument!r}: not a number of engines; use a number from 1 to {_MOST}")
        return ask(directory, command, number=int(argument or 1))
    if argument is None:
        raise ConfigError(
            f"{command}: the name of an engine is missing; `rlhf-mcore rollouts {directory} list` shows the names"
        )
    return ask(directory, command, name=argument)


def _table(engines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a header and one line per engine. An engine without weights has the version -1."""
    shown = [{**engine, "version": "none" if engine["version"] < 0 else engine["version"]} for engine in engines]
    return align_columns([[*_COLUMNS.values()], *([str(engine[key]) for key in _COLUMNS] for engine in shown)])
