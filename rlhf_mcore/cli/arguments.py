"""Parsers and arguments that all commands share, and the resolved configuration that a run passes to its ranks.

The resolved document is an unnamed file in the memory of the process that starts a run. If that process is killed, no file
remains, and other users cannot read the secrets in it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.cli.terminal import TOOL_EPILOG
from rlhf_mcore.config.keys import DESCRIPTIONS, KEYS, choices_of, is_group
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.other_names import hint
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.redaction import FromEnvironment

Completer = Callable[..., Iterable[str]]  # called with the text before the cursor as ``prefix``
_ENVIRONMENT = "!environment"  # a value from an environment variable, with its original notation


class _Dumper(yaml.SafeDumper):
    """Dump plain values, and values from environment variables."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Load documents of ``_Dumper``."""


_Dumper.add_representer(
    FromEnvironment, lambda dumper, text: dumper.represent_sequence(_ENVIRONMENT, [str(text), text.shown])
)
_Loader.add_constructor(_ENVIRONMENT, lambda loader, node: FromEnvironment(*loader.construct_sequence(node)))


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
        add_overrides(parser)
    return parser


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the argument for settings that override the file."""
    what = "settings that override the file"
    add_completed(parser, complete_settings, "overrides", metavar="a.b=c", nargs="*", default=[], help=what)


def add_completed(parser: argparse.ArgumentParser, completer: Completer, name: str, **options: Any) -> None:
    """Add an argument whose values the shell completes on a TAB, with the library argcomplete."""
    parser.add_argument(name, **options).completer = completer  # type: ignore[attr-defined]


def complete_settings(prefix: str, **_: object) -> Iterable[str]:
    """List ``key=`` for every key, or ``key=value`` for every allowed value if ``prefix`` contains a key."""
    key, equals, _value = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in DESCRIPTIONS if not is_group(name)]
    if key not in DESCRIPTIONS:
        return []
    if DESCRIPTIONS[key].choices is not None:
        return [f"{key}={choice}" for choice in choices_of(key)]
    return [f"{key}={value}" for value in ("true", "false")] if KEYS[key] is bool else []


def accept_document(parser: argparse.ArgumentParser) -> None:
    """Add the option with the path of the resolved CONFIG, so that ranks do not read and resolve CONFIG again."""
    parser.add_argument("--resolved", metavar="DOCUMENT", help=argparse.SUPPRESS)


def configuration(args: argparse.Namespace) -> Config:
    """Return the resolved configuration of the parent process, else load CONFIG with the overrides."""
    if args.resolved:
        return receive(args.resolved)
    return load_config(args.config, args.overrides)


@contextmanager
def offer(cfg: Config) -> Iterator[Path]:
    """Offer ``cfg`` to child processes within the block. Yields the path that they pass to ``receive``."""
    with os.fdopen(os.memfd_create("rlhf_mcore-config"), "w", encoding="utf-8") as file:
        yaml.dump(to_dict(cfg), file, _Dumper)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")


def receive(path: str | Path) -> Config:
    """Return the configuration that the parent process offers at ``path``."""
    text = Path(path).read_text(encoding="utf-8")
    return Config.read(yaml.load(text, _Loader))  # noqa: S506 (a SafeLoader with one more tag)
