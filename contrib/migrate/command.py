"""``rlhf-mcore migrate``: convert a configuration, write it, report lost keys, and plan the run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.validate import validate
from rlhf_mcore.planning.inputs import GPUS, Assumptions
from rlhf_mcore.planning.known_models import with_known_configs
from rlhf_mcore.planning.plan import make_plan
from rlhf_mcore.planning.report import as_text, refusal
from rlhf_mcore_contrib.migrate.convert import format_key, migrate, to_text

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Convert a configuration, write it and report lost keys. Returns the exit code."""
    args = _parser().parse_args(argv)
    return _migrate(args.source, args.output, args.kind)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore migrate",
        "Convert a configuration of verl (YAML, or a launch script with key=value overrides), OpenRLHF (a launch script) or TRL (a "
        "Python script with a GRPOConfig, or a launch script with `trl grpo`). Keys without a counterpart are listed in the file and "
        "in the output. Then the result is validated and planned. Bash runs a launch script in a sandbox without your variables, "
        "programs and files; a Python script is only parsed.",
        examples=[
            "rlhf-mcore migrate run_qwen2-7b_math_megatron.sh -o my_run.yaml",
            "rlhf-mcore migrate train_grpo.py -o my_run.yaml",
        ],
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="YAML file, launch script or Python script")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="file to write")
    parser.add_argument("--from", dest="kind", choices=("auto", "verl", "openrlhf", "trl"), default="auto")
    return parser


def _migrate(source: Path, output: Path, kind: str) -> int:
    if output.exists():
        raise ConfigError(f"-o {output}: the file exists; remove it or name another file")
    migration = migrate(source, kind)
    output.write_text(to_text(migration), encoding="utf-8")
    say(f"{len(migration.carried)} keys of {migration.source} carried over to {output}")
    for note in migration.decisions:
        say(f"decided: {note}")
    for key, (value, reason) in migration.lost.items():
        say(f"not carried over: {format_key(key, value)}: {reason}")
    for note in migration.notes:
        say(f"to do: {note}")
    try:
        cfg = load_config(output)
    except ConfigError as error:
        say("\n".join(f"to correct: {problem}" for problem in error.problems))
        return terminal.DONE
    try:
        validate(cfg)
    except ConfigError as error:
        say("\n".join(f"to correct: {problem}" for problem in error.problems))
    say(_plan(cfg, output))
    return terminal.DONE


def _plan(cfg: Config, output: Path) -> str:
    """Plan the run if its model is here or well known. Otherwise describe how to plan it."""
    command = f"rlhf-mcore plan {output}"
    with with_known_configs(cfg) as notes:
        text = _plan_text(cfg, command)
    return "\n".join([*(f"plan: {note}" for note in notes), text])


def _plan_text(cfg: Config, command: str) -> str:
    if not Path(cfg.model.path, "config.json").is_file():
        return (
            f"plan: not made, because {cfg.model.path} is not here; a directory with its config.json is enough: `{command} "
            "model.path=DIRECTORY`, with --gpu for your devices and --suggest for layouts that fit"
        )
    try:
        world_size = default_world_size(cfg)
        validate(cfg, world_size, check_files=False)
        plan = make_plan(resolve(cfg), world_size, GPUS["H100"], Assumptions())
    except ConfigError:
        return f"plan: not made; correct the problems above, then run `{command}`"
    fits = "" if plan.fits else f"\nplan: {refusal(plan)}; `{command} --suggest` lists layouts that fit"
    return f"plan, for H100 (other devices: `{command} --gpu`):\n{as_text(plan)}{fits}"
