"""Command lines: what all commands have in common."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


def examples(*lines: str) -> str:
    """The part of an epilog that shows how a command is called."""
    return "\n".join(["examples:", *(f"  {line}" for line in lines), "", ""])


def command_parser(prog: str, description: str, epilog: str, config: str = "") -> argparse.ArgumentParser:
    """The parser of a command. ``config``: help of its first argument, where that is a configuration with overrides behind it."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if config:
        parser.add_argument("config", metavar="CONFIG", help=config)
        parser.add_argument(
            "overrides", metavar="a.b=c", nargs="*", default=[], help="settings that win over the file's"
        )
    return parser


def accept_document(parser: argparse.ArgumentParser) -> None:
    """Let ranks be told where their starter offers what CONFIG has come to, so that they do not read it again."""
    parser.add_argument("--resolved", metavar="DOCUMENT", help=argparse.SUPPRESS)


def configuration(args: argparse.Namespace) -> Config:
    """Return the starter's document, or without one what the file and the settings come to."""
    if args.resolved:
        from rlhf_mcore.config.document import receive

        return receive(args.resolved)
    from rlhf_mcore.config.load import load_config

    return load_config(args.config, args.overrides)
