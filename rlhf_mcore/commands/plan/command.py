"""``rlhf-mcore plan CONFIG``: estimate the resources of a run without torch, weights or processes."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say, working
from rlhf_mcore.commands.plan.recorded import OUTSIDE, compare_with_record, comparison_lines, read_peaks
from rlhf_mcore.commands.plan.suggest import Offers, Suggestion, find_offers
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import default_world_size, resolve
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import validate
from rlhf_mcore.planning.inputs import ASSUMED, GPUS, HOPPER, RATES, Assumptions, GpuType, device_and_assumptions
from rlhf_mcore.planning.known_models import with_known_configs
from rlhf_mcore.planning.plan import RunPlan, as_json, make_plan
from rlhf_mcore.planning.report import as_text, gib, refusal
from rlhf_mcore.readers.hub import MODEL_KEYS, localize


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0 if every phase fits into memory, 2 if not or if the configuration is invalid."""
    return _plan(_parser().parse_intermixed_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore plan",
        "Estimate memory per rank and phase, traffic of a sync, microbatches and the approximate time of a step. Only the "
        "config.json of a model is needed (configs/models contains some), without weights, tokenizer and prompts.",
        examples=[
            "rlhf-mcore plan configs/experiments/llama-3-70b-ppo.yaml",
            "rlhf-mcore plan my_run.yaml --world-size 16 --gpu A100 --suggest",
            "rlhf-mcore plan my_run.yaml actor.layout.tp=4 --set reserve_bytes=4e9",
        ],
        config="YAML file, as for train",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of processes (default: trainer.world_size, else the fewest possible)",
    )
    parser.add_argument("--gpu", default="H100", choices=GPUS, help="GPU model (default: H100)")
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="list layouts that fit, the fastest first; without --world-size, list the fastest layout on 1, 2, 4, ... processes",
    )
    parser.add_argument(
        "--trace",
        action="store_true",
        help="run one rank's update in Megatron on fake tensors (no weights, no GPU), and compare its bytes with the formulas",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes and seconds")
    parser.add_argument(
        "--run",
        type=Path,
        metavar="DIR",
        help="directory of an earlier run: compare its recorded memory with the plan, and reserve its memory outside torch",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"change the device ({', '.join(RATES)}) or an assumption ({', '.join(ASSUMED)})",
    )
    return parser


def _plan(args: argparse.Namespace) -> int:
    if args.trace and args.json:
        raise ConfigError("--trace prints a table, which --json does not contain; leave one of them out")
    peaks = {} if args.run is None else read_peaks(args.run)
    measured = [f"reserve_bytes={max(peaks[OUTSIDE].values())}"] if peaks and peaks[OUTSIDE] else []
    gpu, assumed = device_and_assumptions(args.gpu, measured + args.set)
    cfg = load_config(args.config, args.overrides)
    localize(cfg, MODEL_KEYS, download=False)  # config.json is enough, and even that is not needed for known models
    with with_known_configs(cfg) as notes:
        for note in notes:
            say(f"note: {note}", file=sys.stderr)
        return _plan_described(args, cfg, gpu, assumed, peaks)


def _plan_described(
    args: argparse.Namespace, cfg: Config, gpu: GpuType, assumed: Assumptions, peaks: Mapping[str, Mapping[str, int]]
) -> int:
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
    plan, offers = make_plan(cfg, world_size, gpu, assumed), None
    if args.suggest:
        is_chosen = args.world_size is not None or cfg.trainer.world_size is not None
        with working("trying layouts"):
            offers = find_offers(cfg, plan, assumed, is_chosen=is_chosen)
    recorded = compare_with_record(cfg, world_size, gpu, assumed, peaks) if peaks else []
    if args.json:
        compared = {"recorded": [asdict(row) for row in recorded]} if peaks else {}
        say(json.dumps(as_json(plan) | (_offers_json(offers) if offers else {}) | compared, indent=1))
    else:
        say(as_text(plan))
        if recorded:
            say("\n".join(comparison_lines(args.run, recorded, peaks[OUTSIDE])))
        if args.trace:
            say(f"\n{_trace(cfg, plan, assumed)}")
        if offers:
            say("\n".join(_offer_lines(offers)))
    if plan.fits:
        return terminal.DONE
    hint = "" if args.suggest else "\nLayouts that fit: add --suggest."
    say(f"error: {refusal(plan)}{hint}", file=sys.stderr)
    return terminal.USER_ERROR


def _trace(cfg: Config, plan: RunPlan, assumed: Assumptions) -> str:
    warnings.filterwarnings("ignore")  # Megatron warns about kernels, which a trace does not run
    update = next(phase for phase in plan.phases if phase.phase == "actor update")
    with working(f"an update of rank {update.rank} on fake tensors"):
        from rlhf_mcore.commands.plan.trace import compare_with_trace  # imports torch and Megatron

        return compare_with_trace(cfg, plan.world_size, update.rank, plan.dtype, assumed)


def _offers_json(offers: Offers) -> dict[str, Any]:
    data: dict[str, Any] = {"suggestions": [_offer_json(each) for each in offers.layouts]}
    if offers.with_costs:
        data["with_costs"] = [_offer_json(each) | {"cost": each.cost} for each in offers.with_costs]
    if offers.adapters is not None:
        fullest = offers.adapters.plan.fullest
        sizes = {"needed": fullest.total, "available": fullest.available}
        data["adapters"] = {"overrides": list(offers.adapters.overrides), **sizes}
    return data


def _offer_json(offer: Suggestion) -> dict[str, Any]:
    return {"world_size": offer.plan.world_size, "overrides": list(offer.overrides), "step_s": offer.plan.step_s}


def _offer_lines(offers: Offers) -> Iterator[str]:
    sizes = [each.plan.world_size for each in offers.layouts]
    if not sizes:
        yield "\nnone of the tried layouts fits"
    elif len(set(sizes)) < len(sizes) or len(sizes) == 1:
        yield "\nlayouts that fit, sorted by estimated time of a step:"
    else:
        smaller = "" if sizes[0] == 1 else f"; fewer than {sizes[0]} do not fit"
        yield f"\nthe fastest layout on 1, 2, 4, ... processes, with the estimated time of a step{smaller}:"
    for each in offers.layouts:
        yield _offer_line(each)
    if offers.with_costs:
        yield f"\nlayouts that fit on {offers.with_costs[0].plan.world_size} processes at a cost, the fastest first:"
    for each in offers.with_costs:
        yield f"  {each.cost}"
        yield _offer_line(each)
    if (adapters := offers.adapters) is not None:
        fullest = adapters.plan.fullest
        yield (
            f"\nlow-rank adapters fit (processes: {adapters.plan.world_size}): {' '.join(adapters.overrides)} takes "
            f"{gib(fullest.total)} of {gib(fullest.available)} GiB of a device (docs/algorithms/lora.md)"
        )


def _offer_line(offer: Suggestion) -> str:
    keys = " ".join(offer.overrides) or "(no change)"
    return f"  {offer.plan.step_s:8.1f} s  {offer.plan.world_size} processes  {keys}"
