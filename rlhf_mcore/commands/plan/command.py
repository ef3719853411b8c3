"""``rlhf-mcore plan CONFIG``: what a run will need, before a GPU is asked for. No torch, no weights, no processes."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import Any

from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.planning.inputs import ASSUMED, GPUS, HOPPER, RATES, Assumptions, GpuType, device_and_assumptions

PROGRESS_AFTER_S = 1.0


@exit_codes.reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0 if everything fits, 2 if something does not or the configuration is wrong."""
    return _plan(_parser().parse_intermixed_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore plan",
        "Work out memory per rank and phase, traffic of a sync, microbatches and a rough time of a step. A model is its "
        "config.json: weights, tokenizer and prompts need not be there (configs/models has some).",
        examples=[
            "rlhf-mcore plan configs/experiments/llama-3-70b-ppo.yaml",
            "rlhf-mcore plan my_run.yaml --world-size 16 --gpu A100 --suggest",
            "rlhf-mcore plan my_run.yaml actor.layout.tp=4 --set reserve_bytes=4e9",
        ],
        config="YAML file, as for train",
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="processes (default: trainer.world_size, or the fewest)"
    )
    parser.add_argument("--gpu", default="H100", choices=GPUS, help="kind of device (default: H100)")
    parser.add_argument("--suggest", action="store_true", help="list layouts that fit, the fastest first")
    parser.add_argument(
        "--trace",
        action="store_true",
        help="run one rank's update through Megatron on fake tensors (no weights, no GPU), and compare its bytes with the formulas",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON; bytes and seconds")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"change the device ({', '.join(RATES)}) or an assumption ({', '.join(ASSUMED)})",
    )
    return parser


def _plan(args: argparse.Namespace) -> int:
    from rlhf_mcore.config.hub import MODEL_KEYS, localize
    from rlhf_mcore.config.load import load_config
    from rlhf_mcore.planning.known_models import described

    if args.trace and args.json:
        raise ConfigError("--trace prints a table and --json prints none; leave one of them out")
    gpu, assumed = device_and_assumptions(args.gpu, args.set)
    cfg = load_config(args.config, args.overrides)
    localize(cfg, MODEL_KEYS, download=False)  # config.json is enough, and known models need not be here
    with described(cfg) as notes:
        for note in notes:
            say(f"note: {note}", file=sys.stderr)
        return _plan_described(args, cfg, gpu, assumed)


def _plan_described(args: argparse.Namespace, cfg: Config, gpu: GpuType, assumed: Assumptions) -> int:
    from rlhf_mcore.config.derive import default_world_size, resolve
    from rlhf_mcore.config.validate import validate
    from rlhf_mcore.planning.plan import as_json, make_plan
    from rlhf_mcore.planning.report import as_text, gib, refusal

    world_size = args.world_size if args.world_size is not None else default_world_size(cfg)
    if world_size < 1:
        raise ConfigError(f"--world-size {world_size} is out of range; it must be at least 1")
    validate(cfg, world_size, check_files=False)
    if cfg.actor.fp8 is not None and gpu.name not in HOPPER:
        raise ConfigError(
            f"actor.fp8={cfg.actor.fp8} needs GPUs of compute capability 9.0 ({', '.join(HOPPER)}), and --gpu is {gpu.name}; set "
            "actor.fp8=null, or choose another --gpu"
        )
    cfg = resolve(cfg)
    suggestions, adapters = None, None
    if args.suggest:
        with _progress("trying layouts"):
            plan = make_plan(cfg, world_size, gpu, assumed)
            suggestions = _suggestions(cfg, world_size, gpu, assumed, fits=plan.fits)
            # A larger world is the answer, unless the user has chosen the number of processes.
            is_chosen = args.world_size is not None or cfg.trainer.world_size is not None
            wanted = {
                entry["world_size"] for entry in suggestions if entry["world_size"] == world_size or not is_chosen
            }
            if not plan.fits and not wanted:
                adapters = _adapters(cfg, world_size, gpu, assumed)
    else:
        plan = make_plan(cfg, world_size, gpu, assumed)
    if args.json:
        offers = {} if suggestions is None else {"suggestions": suggestions}
        say(json.dumps(as_json(plan) | offers | ({} if adapters is None else {"adapters": adapters}), indent=1))
    else:
        say(as_text(plan))
        if args.trace:
            warnings.filterwarnings("ignore")  # of Megatron, about kernels that nothing runs on here
            from rlhf_mcore.cli.progress import working

            update = next(phase for phase in plan.phases if phase.phase == "actor update")
            with working(f"an update of rank {update.rank} on fake tensors"):
                from rlhf_mcore.commands.plan.trace import traced  # imports torch and Megatron

                table = traced(cfg, world_size, update.rank, plan.dtype, assumed)
            say(f"\n{table}")
        _print_suggestions(suggestions)
        if adapters is not None:
            say(
                f"\nlow-rank adapters fit (processes: {world_size}): {' '.join(adapters['overrides'])} takes "
                f"{gib(adapters['needed'])} of {gib(adapters['available'])} GiB of a device (docs/lora.md)"
            )
    if plan.fits:
        return exit_codes.DONE
    hint = "" if args.suggest else "\nLayouts that fit: add --suggest."
    say(f"error: {refusal(plan)}{hint}", file=sys.stderr)
    return exit_codes.USER_ERROR


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show on standard error what the command does: with a clock on a terminal, else in one line after a second."""
    from rlhf_mcore.cli.progress import working

    if sys.stderr.isatty():
        with working(what):
            yield
        return
    timer = Timer(PROGRESS_AFTER_S, say, (f"{what} ...",), {"file": sys.stderr})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _suggestions(
    cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions, *, fits: bool
) -> list[dict[str, Any]]:
    """List the fastest layouts that fit, in this world or, where none does, in the next larger one that has one."""
    from rlhf_mcore.commands.plan.suggest import smallest_world, suggest

    suggestions = [(world_size, layout) for layout in suggest(cfg, world_size, gpu, assumed=assumed)]
    if not suggestions and not fits:
        larger = smallest_world(cfg, world_size, gpu, assumed)
        suggestions = [larger] if larger else []
    return [
        {"world_size": world, "overrides": list(layout.overrides), "step_s": layout.plan.step_s}
        for world, layout in suggestions
    ]


def _adapters(cfg: Config, world_size: int, gpu: GpuType, assumed: Assumptions) -> dict[str, Any] | None:
    """Describe a run with adapters that fits where none does that trains all weights; None if there is none."""
    from rlhf_mcore.commands.plan.suggest import with_adapters

    if (trained := with_adapters(cfg, world_size, gpu, assumed)) is None:
        return None
    overrides, suggestion = trained
    fullest = max(suggestion.plan.phases, key=lambda phase: phase.total / phase.available)
    return {"overrides": list(overrides), "needed": fullest.total, "available": fullest.available}


def _print_suggestions(suggestions: list[dict[str, Any]] | None) -> None:
    if suggestions is None:
        return
    say("\nlayouts that fit, by estimated time of a step:" if suggestions else "\nno layout that was tried fits")
    for entry in suggestions:
        say(
            f"  {entry['step_s']:8.1f} s  {entry['world_size']} processes  {' '.join(entry['overrides']) or '(as it is)'}"
        )
