"""``rlhf-mcore train CONFIG.yaml [a.b=c ...]``, and ``-m rlhf_mcore.cli.train`` under the user's own torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlhf_mcore.cli import exit_codes, rank
from rlhf_mcore.cli.arguments import accept_document, command_parser, configuration
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then train: in this process under torchrun, else in a torchrun of our own.

    Returns the exit code (see ``exit_codes``). No traceback is printed for a ConfigError, wherever it was raised.
    """
    args = _parser().parse_intermixed_args(argv)
    args.overrides += ["logging.console=off"] * args.quiet + ["logging.console=json"] * args.json
    try:
        if args.resolved:
            return _run_rank(configuration(args), args.announced)
        from rlhf_mcore.cli.starting import start

        return start(args, _run_rank)
    except ConfigError as error:
        return exit_codes.report(error)


def preload(argv: Sequence[str]) -> None:
    """Import the modules of a rank with these arguments, in the process that it will be forked from."""
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


def _run_rank(cfg: Config, announced: int = 0) -> int:
    quiet()
    from rlhf_mcore.platform import eager_imports

    with _show_on_terminal(cfg.logging.console), eager_imports():
        from rlhf_mcore.cli.compose import run

    with rank.no_early_exit():
        return run(cfg, announced)


def _show_on_terminal(mode: str) -> AbstractContextManager[Any]:
    """Show that libraries are imported, where a person sees it."""
    if not sys.stdout.isatty():
        return nullcontext()
    from rlhf_mcore.cli.progress import of_run, working

    return working("importing torch and Megatron-core", console=of_run(mode))


def quiet() -> None:
    """Silence the libraries' import-time notes on absent kernels: they would drown the display of a run.

    RLHF_MCORE_DEBUG keeps them.
    """
    if "RLHF_MCORE_DEBUG" not in os.environ:
        warnings.filterwarnings("ignore")
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)


if __name__ == "__main__":
    sys.exit(rank.run(main))
