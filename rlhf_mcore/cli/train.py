"""``rlhf-mcore train CONFIG.yaml [a.b=c ...]``, and ``-m rlhf_mcore.cli.train`` under the user's own torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial

from rlhf_mcore.cli import exit_codes, rank
from rlhf_mcore.cli.arguments import accept_document, command_parser, configuration
from rlhf_mcore.cli.rendezvous import torchrun_world_size
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.own_files import shown_path


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then train: in this process under torchrun, else in a torchrun of our own.

    Returns the exit code (see ``exit_codes``). No traceback is printed for a ConfigError, wherever it was raised.
    """
    args = _parser().parse_intermixed_args(argv)
    args.overrides += ["logging.console=off"] * args.quiet + ["logging.console=json"] * args.json
    try:
        if args.resolved:
            return _run_rank(configuration(args), args.announced)
        return _train(args)
    except ConfigError as error:
        return exit_codes.report(error)


def preload(argv: Sequence[str]) -> None:
    """Import what a rank with these arguments will, in the process that it is to be a fork of."""
    from rlhf_mcore.config.engine_kinds import engine_kind
    from rlhf_mcore.config.run_kinds import run_kind
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
        "Train a policy. Without torchrun, this starts as many processes on this machine as the layouts ask for "
        "(trainer.world_size); under torchrun or SLURM it is one of the processes.",
        examples=[
            "rlhf-mcore train configs/quickstart/grpo.yaml",
            "rlhf-mcore train my_run.yaml trainer.num_steps=50 experiment=short",
            "rlhf-mcore train my_run.yaml --print-config",
            "rlhf-mcore train model.path=my/model data.train=prompts.jsonl reward.rules=final_number",
            "torchrun --nproc-per-node 8 -m rlhf_mcore.cli.train my_run.yaml",
        ],
        exits=exit_codes.EPILOG,
        config="YAML file; see configs/base.yaml for all keys. Settings alone do, too",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print errors alone (logging.console=off)")
    shown.add_argument("--json", action="store_true", help="print an object per line (logging.console=json)")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    # From the launcher to its ranks: the step after which the run continues, printed already.
    parser.add_argument("--announced", type=int, default=0, help=argparse.SUPPRESS)
    accept_document(parser)
    return parser


def _train(args: argparse.Namespace) -> int:
    from rlhf_mcore.config.derive import epochs_text, resolve
    from rlhf_mcore.config.document import offer
    from rlhf_mcore.config.hub import localize, notes_of
    from rlhf_mcore.config.validate import validate

    cfg, world_size = configuration(args), torchrun_world_size()
    local = localize(cfg, download=not args.print_config)
    try:
        validate(cfg, world_size)
    except ConfigError:
        if args.print_config:
            show(cfg)  # what is wrong with it is easier to see beside it
        raise
    epochs, cfg = epochs_text(cfg), resolve(cfg)
    if args.print_config:
        show(cfg)
        return exit_codes.DONE
    from rlhf_mcore.cli import preflight

    preflight.check_packages(cfg)
    preflight.check_engine(cfg)
    if world_size is None:
        for note in (*notes_of(local), *([epochs] if epochs else [])):
            preflight.say(cfg, note)
        with offer(cfg) as document:
            return _launch(cfg, [args.config, *args.overrides, f"--resolved={document}"])
    return _run_rank(cfg)


def _run_rank(cfg: Config, announced: int = 0) -> int:
    quiet()
    from rlhf_mcore.cli.progress import of_run, working
    from rlhf_mcore.platform import eager_imports

    with working("importing torch and Megatron-core", console=of_run(cfg.logging.console)), eager_imports():
        from rlhf_mcore.cli.compose import run

    with rank.no_early_exit():
        return run(cfg, announced)


def _launch(cfg: Config, arguments: Sequence[str]) -> int:
    """Find mistakes that need no process to be found, then start the ranks."""
    from rlhf_mcore.cli import preflight
    from rlhf_mcore.cli.launch import launch
    from rlhf_mcore.config.derive import default_world_size, short_episodes
    from rlhf_mcore.config.rules.data import check_fills_a_step
    from rlhf_mcore.config.run_kinds import run_kind
    from rlhf_mcore.data.first_rows import check_first_rows
    from rlhf_mcore.rewards.trial import check_reward

    world_size = default_world_size(cfg)
    with preflight.no_empty_directory(cfg):
        continues_after = preflight.announce(cfg)
        if continues_after is None:
            return exit_codes.DONE
        preflight.check_devices(cfg, world_size)
        preflight.check_world(world_size)
        if run_kind(cfg).generates:
            if cfg.rollout.placement == "disaggregated" and cfg.rollout.ray.address is None:
                engine_ranks = cfg.rollout.num_engines * cfg.rollout.layout.tp
                preflight.check_world(engine_ranks, "rollout.num_engines x rollout.layout.tp")
            check_fills_a_step(cfg.data, cfg.trainer.prompts_per_step)
            check_first_rows(cfg)
            verdict = check_reward(cfg, "data.train", partial(preflight.say, cfg))
            for warning in filter(None, (verdict, short_episodes(cfg))):
                preflight.say(cfg, f"warning: {warning}")
            preflight.check_environment(cfg)
    logs = preflight.logs_directory(cfg)
    count = "one process" if world_size == 1 else f"{world_size} processes"
    preflight.say(cfg, f"starting {count}; logs are in {shown_path(logs)}")
    return launch(
        [*arguments, *([f"--announced={continues_after}"] if continues_after else [])],
        world_size,
        cfg.trainer.threads_per_rank,
        max_restarts=cfg.trainer.max_restarts,
        logs=logs,
        console=cfg.logging.console,
        engines=cfg.rollout.ray.address,
    )


def quiet() -> None:
    """The libraries' import-time notes on absent kernels would drown the display of a run. RLHF_MCORE_DEBUG keeps them."""
    if "RLHF_MCORE_DEBUG" not in os.environ:
        warnings.filterwarnings("ignore")
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


def show(cfg: Config) -> None:
    """Print a configuration, on rank 0 only."""
    from rlhf_mcore.config.show import to_yaml

    if os.environ.get("RANK", "0") == "0":
        say(to_yaml(cfg), end="")


if __name__ == "__main__":
    sys.exit(rank.run(main))
