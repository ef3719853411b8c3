"""``rlhf-mcore evaluate CONFIG.yaml evaluate.checkpoint=DIR [a.b=c ...]``, with or without the user's torchrun."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rlhf_mcore.checkpoint.layout import CONFIG
from rlhf_mcore.cli import preflight, rank, terminal
from rlhf_mcore.cli.agent import launch
from rlhf_mcore.cli.arguments import accept_document, command_parser, configuration, offer
from rlhf_mcore.cli.rank import torchrun_world_size
from rlhf_mcore.cli.terminal import find_console, say, working
from rlhf_mcore.cli.train import quiet
from rlhf_mcore.commands.evaluate.checkpoints import default_checkpoint, validate_evaluation
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import grades
from rlhf_mcore.config.resolve import default_world_size
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import warnings_of
from rlhf_mcore.readers.hub import MODEL_KEYS, localize

MODULE = "rlhf_mcore.commands.evaluate.command"
EPILOG = """\
exit codes:
  0          done: all responses are scored and the results are written
  2          an error in the configuration, the command line or the data; the message names it
  130        Ctrl-C; scored prompts are kept, start the same command again
  others     failure (128 + N: ended by signal N)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the configuration, then evaluate: in this process under torchrun, else under a torchrun that this process starts.

    Returns the exit code (see ``terminal``). A ConfigError is printed without a traceback, even if a rank raised it.
    """
    args = _parser().parse_intermixed_args(argv)
    try:
        return _run_rank(configuration(args)) if args.resolved else _evaluate(args)
    except ConfigError as error:
        return terminal.report(error)


def preload(argv: Sequence[str]) -> None:
    """Import the modules that a rank with these arguments needs, in the process that forks the ranks."""
    from rlhf_mcore.platform import eager_imports

    cfg = configuration(_parser().parse_intermixed_args(argv))
    quiet()
    with eager_imports():
        import rlhf_mcore.commands.evaluate.evaluation  # noqa: F401
    engine_kind(cfg.rollout.engine).preload()


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore evaluate",
        "Score a model on the prompts of data.eval with the reward of the configuration. evaluate.checkpoint=DIR names "
        "a Hugging Face directory, a checkpoint, a run directory, or shards of FSDP or Megatron (default: the latest "
        "checkpoint of the configuration's own run). evaluate.compare=DIR names a second model to compare with; positive "
        "differences mean that the first model is better. A killed evaluation continues when the command is started again.",
        examples=[
            "rlhf-mcore evaluate configs/quickstart/grpo.yaml",
            "rlhf-mcore evaluate outputs/my/run",
            "rlhf-mcore evaluate my_run.yaml evaluate.checkpoint=outputs/my/run/checkpoint-100 evaluate.compare=models/Qwen3-1.7B",
            "rlhf-mcore evaluate my_run.yaml evaluate.samples=8 evaluate.temperature=1.0",
        ],
        exits=EPILOG,
        config="YAML file, such as the training run's; or a run directory or checkpoint, which contains its configuration",
    )
    accept_document(parser)
    return parser


def _evaluate(args: argparse.Namespace) -> int:
    if os.path.isdir(args.config):
        _take_directory(args)
    cfg = configuration(args)
    localize(cfg, (*MODEL_KEYS, "data.eval"))
    if cfg.evaluate.checkpoint is None:
        cfg.evaluate.checkpoint = default_checkpoint(cfg)
    validate_evaluation(cfg, torchrun_world_size())

    preflight.check_engine(cfg)
    if torchrun_world_size() is None:
        from rlhf_mcore.rewards.start_trial import check_reward

        size, shown = default_world_size(cfg, evaluates=True), cfg.logging.console
        preflight.check_devices(cfg, size)
        preflight.check_world(size)
        verdict = check_reward(cfg.reward, cfg.data, "data.eval", say) if grades(cfg) else None
        for warning in filter(None, (verdict, *warnings_of(cfg))):
            say(f"warning: {warning}")
        preflight.check_environment(cfg)
        logs = preflight.logs_directory(cfg)
        with offer(cfg) as document:
            arguments = [args.config, *args.overrides, f"--resolved={document}"]
            return launch(arguments, size, cfg.trainer.threads_per_rank, MODULE, logs=logs, console=shown)
    return _run_rank(cfg)


def _take_directory(args: argparse.Namespace) -> None:
    """Evaluate the run or checkpoint in directory ``args.config`` with the configuration that it contains.

    Raises:
        ConfigError: the directory contains no configuration.
    """
    directory, config = args.config, os.path.join(args.config, CONFIG)
    if not os.path.isfile(config):
        raise ConfigError(
            f"{directory} contains no {CONFIG}; give the configuration first: "
            f"rlhf-mcore evaluate run.yaml evaluate.checkpoint={directory}"
        )
    args.config, args.overrides = config, [f"evaluate.checkpoint={directory}", *args.overrides]


def _run_rank(cfg: Config) -> int:
    quiet()
    from rlhf_mcore.platform import eager_imports

    with working("importing torch", console=find_console(cfg.logging.console)), eager_imports():
        from rlhf_mcore.commands.evaluate.evaluation import run

    with rank.forbid_early_exit():
        run(cfg)
    return terminal.DONE


if __name__ == "__main__":
    sys.exit(rank.run(main))
