"""The console script ``rlhf-mcore COMMAND ...``.

Exit codes: 0 is success. 2 is a user error (configuration, command line or data), with one readable message. 75 means that the
run was saved and should be started again. Other codes are failures; 128 + N means that signal N ended the run.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import rlhf_mcore
from rlhf_mcore.cli.terminal import DONE, EPILOG, INTERRUPTED, OF_OUTPUT, USER_ERROR, report, report_of_tool, say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import shorten
from rlhf_mcore.plugins import find_plugins, missing_plugin

SUMMARIES = {
    "train": "train a policy, with one process per rank on this machine",
    "completion": "make TAB complete commands, options, keys and values in bash and zsh",
    "config": "show a resolved configuration, compare two, explain a key",
    "convert": "convert a model between formats: Hugging Face, Megatron, FSDP, our checkpoints",
    "doctor": "check versions, kernels, the machine, its disk and the network between ranks",
    "evaluate": "score a model on held-out prompts, or two side by side",
    "metrics": "explain a metric: meaning, healthy range, remedy",
    "plan": "estimate memory, traffic and time of a run, without a GPU",
    "prepare-data": "make training data from GSM8K, MATH, DAPO, OpenAssistant, chats, preference pairs",
    "push": "upload the trained model of a run to the Hugging Face hub, with a model card",
    "report": "write one HTML file about one or more runs: health, curves, time, responses",
    "reward-test": "test the reward on the data: it must accept ground truths and reject other answers",
    "rollouts": "list, add, drain or remove the engines of a running job",
    "verify-checkpoint": "name every damaged file of a checkpoint, or of all checkpoints of a run",
    "watch": "show the page of report in a browser during a run",
}
ASKED = "_ARGCOMPLETE"  # the shell sets this variable when it asks for completions
CONTRIB = {  # the commands of contrib/, each with the folder that contains it
    "migrate": "migrate",
    "multinode": "ssh",
    "serve-containers": "containers",
    "serve-reward": "serve_reward",
    "simulate": "simulate",
}
# Packages of the installed plug-ins. A plug-in is imported for the help of all commands, and when its command is named.
PLUGINS = {name: point.value for name, point in find_plugins("commands").items()}
COMMANDS = sorted((*SUMMARIES, *PLUGINS), key=lambda name: (name != "train", name))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names, with the remaining arguments. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if ASKED in os.environ:
        _answer_shell()
    if not args:
        _parser().print_help(sys.stderr)
        return USER_ERROR
    if args[0].startswith("-"):
        _parser().parse_args(args[:1])  # prints the help, the version or an error, and ends the process
    if args[0] not in COMMANDS:
        say(f"error: {_explain_missing(args[0])}", file=sys.stderr)
        return USER_ERROR
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may contain bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except FileNotFoundError:
        say("error: the working directory has been removed; change into another one", file=sys.stderr)
        return USER_ERROR
    try:
        code = int(_import_command(args[0]).main(args[1:]))
        sys.stdout.flush()
    except ConfigError as error:
        return report(error)
    except KeyboardInterrupt:
        say("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in OF_OUTPUT:
            raise
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes stdout again when the process ends
        return 128 + signal.SIGPIPE if error.errno == errno.EPIPE else report_of_tool(error)
    return code


def _explain_missing(name: str) -> str:
    """Describe why there is no command of this name: its plug-in is not installed, or the name is wrong."""
    if name in CONTRIB:
        return str(missing_plugin("commands", name, f"rlhf-mcore {name}", CONTRIB[name]))
    meant = difflib.get_close_matches(name, [*COMMANDS, *CONTRIB], n=1, cutoff=0.5)
    hint = f"did you mean {meant[0]}?" if meant else f"there are: {', '.join(COMMANDS)}"
    return f"there is no command {shorten(name)}; {hint}"


def _answer_shell() -> None:
    """Answer the shell's request for completions, and end the process.

    Only the parser of the command on the line is built, because building all parsers would import all commands.
    """
    import argcomplete  # only for this use

    parser = argparse.ArgumentParser(prog="rlhf-mcore")
    parser.add_argument("--version", action="store_true")
    chosen = parser.add_subparsers()
    for name in COMMANDS:
        chosen.add_parser(name, help=SUMMARIES.get(name))
    words = os.environ.get("COMP_LINE", "").split()
    command = next((word for word in words[1:] if word in COMMANDS), None)
    if command is not None:
        chosen.choices[command] = _import_command(command)._parser()
    argcomplete.autocomplete(parser, default_completer=argcomplete.FilesCompleter())
    sys.exit(DONE)  # reached only if the shell asked for nothing


def module_of(command: str) -> str:
    """Return the module of a command: a file, or ``command`` in a package. It defines ``main`` and ``_parser``."""
    if command in PLUGINS:
        return f"{PLUGINS[command]}.command"
    room = "cli" if command == "train" else "commands"
    module = f"rlhf_mcore.{room}.{command.replace('-', '_')}"
    is_package = (spec := find_spec(module)) is not None and spec.submodule_search_locations is not None
    return f"{module}.command" if is_package else module


def _import_command(command: str) -> ModuleType:
    """Import the module of a command.

    Raises:
        ConfigError: a package that the command's plug-in imports is missing.
    """
    try:
        return import_module(module_of(command))
    except ModuleNotFoundError as error:
        if command not in PLUGINS:
            raise
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(
            f"rlhf-mcore {command} needs {PLUGINS[command]} and the package {missing}: pip install {missing}"
        ) from error


def _summary(command: str) -> str:
    """Return the summary of a command, or the error of a plug-in that cannot be imported."""
    if command in SUMMARIES:
        return SUMMARIES[command]
    try:
        return str(import_module(PLUGINS[command]).SUMMARY)
    except Exception as error:  # the plug-in is someone else's code, and the help must list the other commands
        return f"(broken) {PLUGINS[command]}: {shorten(f'{type(error).__name__}: {error}')}"


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:<18} {_summary(name)}" for name in COMMANDS)
    parser = argparse.ArgumentParser(
        prog="rlhf-mcore",
        description=f"Reinforcement learning on Megatron-core with vLLM rollouts.\n\ncommands:\n{listed}",
        epilog=f"`rlhf-mcore COMMAND --help` explains a command.\n\n{EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--help] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"rlhf-mcore {rlhf_mcore.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
