"""``rlhf-mcore completion bash|zsh``: print the script that makes the shell ask ``cli.main`` for completions on a TAB."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import argcomplete

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script that the shell must run once. Returns the exit code."""
    args = _parser().parse_args(argv)
    print(argcomplete.shellcode(["rlhf-mcore"], shell=args.shell))  # noqa: T201 (the shell runs it)
    return terminal.DONE


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


if __name__ == "__main__":
    sys.exit(main())
