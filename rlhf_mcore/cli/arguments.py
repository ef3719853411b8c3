"""Command lines: what all commands have in common."""

from __future__ import annotations

import argparse


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
