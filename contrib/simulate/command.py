"""``rlhf-mcore simulate CONFIG``: find the fastest schedule and split of the devices. It starts no processes and needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.observability.files import pretty_json, write_atomically
from rlhf_mcore.own_files import check_output
from rlhf_mcore.planning.inputs import GPUS, device_and_assumptions, num_devices
from rlhf_mcore_contrib.simulate.compare import as_json, compare, read_schedule, schedules
from rlhf_mcore_contrib.simulate.lengths import read_lengths
from rlhf_mcore_contrib.simulate.measured import fit_runs
from rlhf_mcore_contrib.simulate.picture import check_can_draw, draw
from rlhf_mcore_contrib.simulate.report import WIDTH, tables
from rlhf_mcore_contrib.simulate.times import configured_split, measured_times, planned_times, splits


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Simulate and print. Returns the exit code."""
    try:
        return _simulate(_parser().parse_intermixed_args(argv))
    except KeyboardInterrupt:
        say("interrupted; fewer --steps or bounds of --staleness take less time", file=sys.stderr)
        return terminal.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore simulate",
        "Simulate generation and training for a distribution of response lengths. The schedules are synchronous, one step off, and "
        "bounded staleness with partial rollouts. Each schedule is shown on its fastest split of the devices.",
        examples=["rlhf-mcore simulate my_run.yaml --lengths 'lognormal(7.3,1.1,16384)' --devices 32"],
        config="YAML file, as for train",
    )
    parser.add_argument(
        "--lengths",
        metavar="LENGTHS",
        help="lognormal(mu,sigma,max) or geometric(mean,max) in tokens, a file of numbers (text, jsonl, parquet), or a run "
        "directory (default: lengths of the first synchronous --run)",
    )
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="DIR",
        help="directory of a synchronous run, whose measured times replace the planner's estimates; may be repeated. A further run "
        "that samples ahead shows how much trainer and engines slow each other down",
    )
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="devices of engines and trainer together (default: as in the configuration)",
    )
    parser.add_argument("--gpu", default="H100", choices=GPUS, help="device type for estimates (default: H100)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help="change the device or an assumption, as for plan",
    )
    parser.add_argument(
        "--staleness",
        default="1,2,4",
        metavar="K,K",
        help="bounds of trainer.max_staleness to compare (default: 1,2,4)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps to simulate (default: 30, fewer if a step has over 2,000 responses)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed for the sampled lengths (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file; times in seconds")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the schedules to this file; needs matplotlib")
    return parser


def _simulate(args: argparse.Namespace) -> int:
    from rich.console import Console

    bounds = _check(args)
    if args.png:
        check_can_draw()
    cfg, world_size = _configuration(args)
    fit = fit_runs([Path(run) for run in args.run]) if args.run else None
    source = args.lengths or (fit.source if fit is not None else "")
    lengths = read_lengths(source, cfg.rollout.sampling.max_new_tokens)
    if fit is not None:
        times = measured_times(cfg, fit, args.run)
    else:
        times = planned_times(cfg, *device_and_assumptions(args.gpu, args.set), lengths.mean)
    own, devices = read_schedule(cfg), args.devices or num_devices(cfg, world_size)
    own_split = configured_split(cfg, world_size)
    candidates = {schedule: splits(cfg, devices, schedule) for schedule in schedules(cfg, bounds)}
    responses = cfg.trainer.prompts_per_step * cfg.rollout.sampling.n
    steps = args.steps or max(8, min(30, 60_000 // responses))
    with working("simulating", len(candidates)) as begin:
        comparison = compare(times, lengths, candidates, (own, own_split), steps=steps, seed=args.seed, begin=begin)
    if args.json:
        write_atomically(args.json, pretty_json(as_json(comparison, own)))
    if args.png:
        write_atomically(args.png, draw(comparison))
    console = Console(width=WIDTH, highlight=False)
    for part in tables(comparison, own):
        console.print(part, markup=False, soft_wrap=isinstance(part, str))
    return terminal.DONE


def _check(args: argparse.Namespace) -> list[int]:
    """Check the command line. Returns the staleness bounds.

    Raises:
        ConfigError: an argument is missing or invalid.
    """
    if not args.lengths and not args.run:
        raise ConfigError("--lengths is missing; give a distribution, a file or a run directory, or use --run")
    for name, value, least, most in (("--steps", args.steps, 1, 10_000), ("--devices", args.devices, 1, 1 << 16)):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{name} {value} is out of range; give a number from {least} to {most}")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} is out of range; give a number from 0")
    if args.run and args.set:
        raise ConfigError("--set changes estimates, and --run replaces them; remove one of them")
    for run in args.run or ():
        if not Path(run).is_dir():
            raise ConfigError(f"--run {run}: no such directory; give a run directory")
    try:
        bounds = [int(text) for text in args.staleness.split(",")]
    except ValueError:
        bounds = []
    if not bounds or not all(1 <= bound <= 64 for bound in bounds):
        raise ConfigError(
            f"--staleness {args.staleness} is not a list of bounds from 1 to 64; write it as --staleness 1,2,4"
        )
    for option, path in (("--json", args.json), ("--png", args.png)):
        if path is not None:
            check_output(option, path)
    return bounds


def _configuration(args: argparse.Namespace) -> tuple[Config, int]:
    """Load and resolve the configuration. Returns it and the number of trainer ranks."""
    cfg = load_config(args.config, args.overrides)
    if not run_kind(cfg).generates:
        raise ConfigError(
            f"algorithm.kind={cfg.algorithm.kind} generates nothing; simulate is for reinforcement learning"
        )
    world_size = default_world_size(cfg)
    validate(cfg, world_size, check_files=False)
    return resolve(cfg), world_size
