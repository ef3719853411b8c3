"""Command lines: what all commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rlhf_mcore.cli.exit_codes import TOOL_EPILOG

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


class _SettingsParser(argparse.ArgumentParser):
    """The parser of a command that takes a configuration: an unknown option is most likely a setting with dashes."""

    def error(self, message: str) -> NoReturn:
        """Name the setting that an unknown option stands for. Ends the process with exit code 2."""
        start, _, unknown = message.partition("unrecognized arguments: ")
        is_option = (
            any(known.startswith(unknown.split()[0]) for known in self._option_string_actions) if unknown else True
        )
        if start or is_option or not unknown.startswith("--"):
            super().error(message)
        self.exit(2, f"error: {_meant_setting(unknown.split())}\n")


def _meant_setting(unknown: Sequence[str]) -> str:
    from rlhf_mcore.config.keys import DESCRIPTIONS
    from rlhf_mcore.config.other_names import hint

    option, has_value, value = unknown[0].partition("=")
    key = option.lstrip("-").replace("-", "_")
    value = value if has_value else next((word for word in unknown[1:2] if not word.startswith("-")), "VALUE")
    known = f"write {key}={value}" if key in DESCRIPTIONS else hint(key)
    return f"{option}: unknown option; settings are written KEY=VALUE without dashes: {known}"


def command_parser(
    prog: str, description: str, *, examples: Sequence[str] = (), exits: str = TOOL_EPILOG, config: str = ""
) -> argparse.ArgumentParser:
    """Build the parser of a command.

    Args:
        examples: command lines for the end of its help.
        exits: the part of the help about exit codes.
        config: help of the first argument, for a command that takes a configuration and overrides.
    """
    shown = ["examples:", *(f"  {line}" for line in examples), ""] if examples else []
    parser = (_SettingsParser if config else argparse.ArgumentParser)(
        prog=prog,
        description=description,
        epilog="\n".join([*shown, exits]),
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
    """Add the option with the address of the resolved CONFIG: ranks take it from their starter and do not read it again."""
    parser.add_argument("--resolved", metavar="DOCUMENT", help=argparse.SUPPRESS)


def configuration(args: argparse.Namespace) -> Config:
    """Return the starter's document, or without one what the file and the settings come to."""
    if args.resolved:
        from rlhf_mcore.cli.document import receive

        return receive(args.resolved)
    from rlhf_mcore.config.load import load_config

    return load_config(args.config, args.overrides)
