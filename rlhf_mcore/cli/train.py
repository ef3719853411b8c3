"""``rlhf-mcore train CONFIG.yaml [a.b=c ...]``, and ``-m rlhf_mcore.cli.train`` under the user's own torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from rlhf_mcore.cli import agent, preflight, rank, terminal
from rlhf_mcore.cli.arguments import accept_document, command_parser, configuration, offer
from rlhf_mcore.cli.rank import torchrun_world_size
from rlhf_mcore.cli.terminal import find_console, say, working
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import WrongValues
from rlhf_mcore.config.questions import grades
from rlhf_mcore.config.resolve import default_world_size, num_steps, resolve
from rlhf_mcore.config.rules.data import check_fills_a_step
from rlhf_mcore.config.rules.rollout import engine_keys
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.settings import to_yaml
from rlhf_mcore.config.validate import report_all, validate, warnings_of
from rlhf_mcore.data.first_rows import check_first_rows
from rlhf_mcore.own_files import shown_path
from rlhf_mcore.readers.data_rows import count_rows
from rlhf_mcore.readers.hub import localize, notes_of


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then train: in this process under torchrun, else under a torchrun that this process starts.

    Returns the exit code (see ``terminal``). A ConfigError is printed without a traceback, even if a rank raised it.
    """
    args = _parser().parse_intermixed_args(argv)
    args.overrides += ["logging.console=off"] * args.quiet + ["logging.console=json"] * args.json
    try:
        if args.resolved:
            return _run_rank(configuration(args), args.announced)
        if args.dry_run:
            quiet()
        return _start(args)
    except ConfigError as error:
        return terminal.report(error)


def _start(args: argparse.Namespace) -> int:
    """Check the configuration of ``args``, then start its ranks, or run as a rank under torchrun. Returns the exit code.

    Raises:
        ConfigError: the configuration is invalid.
    """
    world_size = torchrun_world_size()
    try:
        cfg = configuration(args)
    except WrongValues as error:
        raise report_all(error, world_size) from None
    if args.dry_run and world_size is not None:
        raise ConfigError("--dry-run starts no ranks; run `rlhf-mcore train CONFIG --dry-run` without torchrun")
    local = localize(cfg, download=not args.print_config)
    try:
        validate(cfg, world_size)
    except ConfigError:
        if args.print_config:
            _show(cfg)  # the error is easier to understand with the configuration
        raise
    epochs, cfg = epochs_text(cfg), resolve(cfg)
    if args.print_config:
        _show(cfg)
        return terminal.DONE
    preflight.check_engine(cfg)
    if world_size is None:
        for note in (*notes_of(local), *([epochs] if epochs else [])):
            preflight.say(cfg, note)
        with offer(cfg) as document:
            return _launch(cfg, [args.config, *args.overrides, f"--resolved={document}"], is_dry=args.dry_run)
    return _run_rank(cfg)


def epochs_text(cfg: Config) -> str | None:
    """Return a text with the number of steps of ``trainer.num_epochs``, or None if it is not set."""
    if cfg.trainer.num_epochs is None:
        return None
    leaves_out = cfg.data.transform is not None or cfg.data.overlong_prompts == "drop"
    more = "; rows that data.transform or data.overlong_prompts=drop skips are counted" if leaves_out else ""
    return (
        f"trainer.num_epochs={cfg.trainer.num_epochs:g}: {num_steps(cfg)} steps of {cfg.trainer.prompts_per_step} for "
        f"{count_rows(cfg.data.train) or 0} rows{more}"
    )


def _launch(cfg: Config, arguments: Sequence[str], *, is_dry: bool) -> int:
    """Check everything that needs no ranks, then start the ranks unless this is a dry run."""
    from rlhf_mcore.rewards.start_trial import check_reward

    world_size = default_world_size(cfg)
    with ExitStack() as held:
        with preflight.remove_empty_directory(cfg, is_kept=not is_dry):
            directory = held.enter_context(preflight.take_directory(cfg))
            continues_after = preflight.announce(cfg, directory)
            if continues_after is None:
                return terminal.DONE
            preflight.check_devices(cfg, world_size)
            preflight.check_world(world_size)
            if run_kind(cfg).generates:
                if cfg.rollout.placement == "disaggregated" and cfg.rollout.ray.address is None:
                    engine_ranks = cfg.rollout.num_engines * cfg.rollout.layout.num_ranks
                    preflight.check_world(engine_ranks, f"rollout.num_engines x {engine_keys(cfg.rollout.layout)}")
                check_fills_a_step(cfg.data, cfg.trainer.prompts_per_step)
                check_first_rows(cfg.data, cfg.model.tokenizer_path or cfg.model.path)
                verdict = None
                if grades(cfg):
                    verdict = check_reward(cfg.reward, cfg.data, "data.train", partial(preflight.say, cfg))
                for warning in filter(None, (verdict, *warnings_of(cfg))):
                    preflight.say(cfg, f"warning: {warning}")
                preflight.check_environment(cfg)
            if is_dry:
                from rlhf_mcore.cli.run_context import check_as_ranks

                notes = check_as_ranks(cfg, directory, continues_after)
                preflight.say(cfg, "\n  ".join(["the run would print:", *"\n".join(notes).splitlines()]))
                preflight.say(cfg, "dry run: no error was found; nothing was started or changed")
                return terminal.DONE
        logs = preflight.logs_directory(cfg)
        count = "one process" if world_size == 1 else f"{world_size} processes"
        preflight.say(cfg, f"starting {count}; logs are in {shown_path(logs)}")
        return agent.launch(
            [*arguments, *([f"--announced={continues_after}"] if continues_after else [])],
            world_size,
            cfg.trainer.threads_per_rank,
            max_restarts=cfg.trainer.max_restarts,
            logs=logs,
            console=cfg.logging.console,
            engines=cfg.rollout.ray.address,
        )


def _show(cfg: Config) -> None:
    """Print a configuration on rank 0."""
    if os.environ.get("RANK", "0") == "0":
        say(to_yaml(cfg), end="")


def preload(argv: Sequence[str]) -> None:
    """Import the modules that a rank with these arguments needs, in the process that forks the ranks."""
    from rlhf_mcore.platform import eager_imports

    cfg = configuration(_parser().parse_intermixed_args(argv))
    quiet()
    with eager_imports():
        import rlhf_mcore.cli.compose  # noqa: F401
    if run_kind(cfg).generates and cfg.rollout.placement == "colocated":
        engine_kind(cfg.rollout.engine).preload()


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore train",
        "Train a policy. Without torchrun, this command starts one process per rank (trainer.world_size) on this machine. "
        "Under torchrun or SLURM, it runs as one of the ranks.",
        examples=[
            "rlhf-mcore train configs/quickstart/grpo.yaml",
            "rlhf-mcore train my_run.yaml trainer.num_steps=50 experiment=short",
            "rlhf-mcore train my_run.yaml --print-config",
            "rlhf-mcore train model.path=my/model data.train=prompts.jsonl reward.rules=final_number",
            "torchrun --nproc-per-node 8 -m rlhf_mcore.cli.train my_run.yaml",
        ],
        exits=terminal.EPILOG,
        config="YAML file (configs/base.yaml lists all keys); optional if the settings are complete",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print only errors (logging.console=off)")
    shown.add_argument("--json", action="store_true", help="print one JSON object per line (logging.console=json)")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything that needs no ranks, including all data and the checkpoint to resume, and stop",
    )
    # The launcher passes this to its ranks: the step after which the run continues, which it has already printed.
    parser.add_argument("--announced", type=int, default=0, help=argparse.SUPPRESS)
    accept_document(parser)
    return parser


def _run_rank(cfg: Config, announced: int = 0) -> int:
    quiet()
    from rlhf_mcore.platform import eager_imports

    with _show_on_terminal(cfg.logging.console), eager_imports():
        from rlhf_mcore.cli.compose import run

    with rank.forbid_early_exit():
        return run(cfg, announced)


def _show_on_terminal(mode: str) -> AbstractContextManager[Any]:
    """Show a line while libraries are imported, if stdout is a terminal."""
    if not sys.stdout.isatty():
        return nullcontext()
    return working("importing torch and Megatron-core", console=find_console(mode))


def quiet() -> None:
    """Silence the libraries' import-time notes about missing kernels, which would hide the output of a run.

    If the variable RLHF_MCORE_DEBUG is set, the notes are printed.
    """
    if "RLHF_MCORE_DEBUG" not in os.environ:
        warnings.filterwarnings("ignore")
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(rank.run(main))
