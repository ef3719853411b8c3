"""``rlhf-mcore completion bash|zsh``, and the answers to the shell on a TAB: commands, options, files, keys and values.

The library argcomplete is imported only for these two uses.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.config.keys import DESCRIPTIONS, KEYS, choices_of, is_group
from rlhf_mcore.metrics.catalogue import GROUPS


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script that the shell must run once. Returns the exit code."""
    args = _parser().parse_args(argv)
    import argcomplete

    print(argcomplete.shellcode(["rlhf-mcore"], shell=args.shell))  # noqa: T201 (the shell runs it)
    return exit_codes.DONE


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore completion",
        "Print a script that makes TAB complete commands, options, files, and the keys and values of a configuration.",
        examples=[
            'eval "$(rlhf-mcore completion bash)"    # to keep it, add this line to ~/.bashrc',
            'eval "$(rlhf-mcore completion zsh)"     # in ~/.zshrc, after compinit',
        ],
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that will run the script")
    return parser


def answer(commands: Mapping[str, str], module_of: Callable[[str], str]) -> None:
    """Answer the shell's request for completions, and end the process.

    Only the parser of the command on the line is built, because building all parsers would import all commands.
    """
    import argcomplete

    words = os.environ.get("COMP_LINE", "").split()
    parser = argparse.ArgumentParser(prog="rlhf-mcore")
    parser.add_argument("--version", action="store_true")
    chosen = parser.add_subparsers()
    for name, summary in commands.items():
        chosen.add_parser(name, help=summary)
    command = next((word for word in words[1:] if word in commands), None)
    if command is not None:
        own = import_module(module_of(command))._parser()
        _teach(own)
        chosen.choices[command] = own
    argcomplete.autocomplete(parser, default_completer=argcomplete.FilesCompleter())
    sys.exit(exit_codes.DONE)  # reached only if the shell asked for nothing


def _teach(parser: argparse.ArgumentParser) -> None:
    """Add completers to the arguments for keys and metrics, including arguments of subcommands."""
    completers: dict[str, Any] = {"overrides": _settings, "key": _keys}
    if parser.prog == "rlhf-mcore metrics":
        completers["name"] = _metrics
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _teach(inner)
        elif action.dest in completers:
            action.completer = completers[action.dest]  # type: ignore[attr-defined]


def _settings(prefix: str, **_: object) -> Iterable[str]:
    """List ``key=`` for every key, or ``key=value`` for every allowed value if ``prefix`` contains a key."""
    key, equals, _value = prefix.partition("=")
    if not equals:
        return [f"{name}=" for name in DESCRIPTIONS if not is_group(name)]
    if key not in DESCRIPTIONS:
        return []
    if DESCRIPTIONS[key].choices is not None:
        return [f"{key}={choice}" for choice in choices_of(key)]
    return [f"{key}={value}" for value in ("true", "false")] if KEYS[key] is bool else []


def _keys(**_: object) -> Iterable[str]:
    return KEYS


def _metrics(**_: object) -> Iterable[str]:
    return [metric.name for metrics in GROUPS.values() for metric in metrics]


if __name__ == "__main__":
    sys.exit(main())
