"""Parsers and arguments that all commands share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from rlhf_mcore.cli.document import receive
from rlhf_mcore.cli.exit_codes import TOOL_EPILOG
from rlhf_mcore.config.keys import DESCRIPTIONS
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.other_names import hint

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


class _SettingsParser(argparse.ArgumentParser):
    """The parser of a command with a configuration. It assumes that an unknown option is a setting with dashes."""

    def error(self, message: str) -> NoReturn:
        """Name the setting that an unknown option probably means. Ends the process with exit code 2."""
        start, _, unknown = message.partition("unrecognized arguments: ")
        is_option = (
            any(known.startswith(unknown.split()[0]) for known in self._option_string_actions) if unknown else True
        )
        if start or is_option or not unknown.startswith("--"):
            super().error(message)
        self.exit(2, f"error: {_meant_setting(unknown.split())}\n")


def _meant_setting(unknown: Sequence[str]) -> str:
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
        config: help of the argument CONFIG; "" for a command without a configuration and overrides.
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
        parser.add_argument("overrides", metavar="a.b=c", nargs="*", default=[], help="settings that override the file")
    return parser


def accept_document(parser: argparse.ArgumentParser) -> None:
    """Add the option with the path of the resolved CONFIG, so that ranks do not read and resolve CONFIG again."""
    parser.add_argument("--resolved", metavar="DOCUMENT", help=argparse.SUPPRESS)


def configuration(args: argparse.Namespace) -> Config:
    """Return the resolved configuration of the parent process, else load CONFIG with the overrides."""
    if args.resolved:
        return receive(args.resolved)
    return load_config(args.config, args.overrides)
