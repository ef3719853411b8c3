"""Compare the time of a planned sync with the engine's own reload of ready tensors, and with two gathering bridges.

Four processes run a Megatron model and vLLM engines. The contenders run in turn (A B C D A B C D ...):

- planned: ``PlannedBridge.sync``;
- reload: ``load_weights`` of the engine, from full Hugging Face tensors in memory. No rank sends anything, so this is the time
  of a sync whose trainer side is free;
- gather: ``GatherBridge``, one tensor at a time;
- bucketed: full tensors, many per message, passed to ``load_weights``.

Each contender runs with both kinds of kernels. By default, CPU kernels of the engine read packed copies, which a sync must
rebuild ("repacked"). Other kernels read the live parameters ("live"), as on every GPU. If the engine has one rank, every rank
needs every byte, so the plan cannot move fewer bytes than a gather, and ``bytes_won`` must be 0.

The result is the largest median of planned / reload over the layouts TP2 PP2 -> TP2 and TP2 PP2 -> TP1, both models and both
kinds of kernels. Wall seconds belong to the slowest rank; CPU seconds are the sum over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common import Timing, report, time_call
from rlhf_mcore.bridge.files.gather import GatherBridge, Gatherer
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.bridge.map.coverage import describe_sources
from rlhf_mcore.bridge.map.engine import keep_loading_layout
from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.config.schema import BridgeConfig, RecomputeConfig, RolloutConfig, RolloutLayoutConfig
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.mcore.build import BuildOptions, build_model
from rlhf_mcore.mcore.groups import build_groups
from rlhf_mcore.mcore.model import MegatronModel
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform, current_platform
from rlhf_mcore.protocols import WeightTarget
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import EngineModel
from tests.plan_bytes import count_bytes
from tests.planned_bridge import planned_bridge

ROOT = Path(__file__).resolve().parents[1]
RANKS = 4
GOAL_CPU, GOAL_CUDA = 0.9, 0.5
BUCKET_BYTES = BridgeConfig().bucket_bytes
SIZES = {
    "small": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=1024),
    "medium": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=12, vocab_size=8192),
}
# Ranks per engine -> layouts (tp, pp) of the trainer. Results come from TP2 PP2.
LAYOUTS = {2: ((2, 2),), 1: ((2, 2), (4, 1))}
CONTENDERS = ("planned", "reload", "gather", "bucketed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="the small model and one width of the engines, fewer rounds"
    )
    parser.add_argument("--rounds", type=int, help="how often each contender runs")
    parser.add_argument(
        "--world", nargs=3, metavar=("DIRECTORY", "SIZE", "TP"), help=argparse.SUPPRESS
    )  # only for the ranks
    args = parser.parse_args()
    rounds = args.rounds or (5 if args.quick else 11)
    if args.world is None:
        measure_worlds(args.quick, rounds)
    else:
        run(Path(args.world[0]), args.world[1], int(args.world[2]), rounds)


def measure_worlds(quick: bool, rounds: int) -> None:
    """Start new processes for each model and engine width, and write the report."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for size in ("small",) if quick else tuple(SIZES):
            for engine_tp in (2,) if quick else tuple(LAYOUTS):
                rows += start_world(Path(directory), size, engine_tp, rounds)
    ratio = max(row["ratios"]["planned/reload"]["median"] for row in rows if row["trainer"] == "TP2 PP2")
    goal = GOAL_CUDA if current_platform().name == "cuda" else GOAL_CPU
    measured = {"bucket_bytes": BUCKET_BYTES, "ranks": RANKS, "rounds": rounds, "rows": rows}
    report("bridge_sync", measured, ratio=ratio, goal=goal, quick=quick)


def start_world(directory: Path, size: str, engine_tp: int, rounds: int) -> list[dict[str, Any]]:
    """Run this script under torchrun. Returns the rows of its first rank."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    launcher = ["-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    worker = ["-m", "benchmarks.bridge_sync", "--rounds", str(rounds), "--world", str(directory), size, str(engine_tp)]
    subprocess.run([sys.executable, *launcher, *worker], cwd=ROOT, env=environment, check=True)
    return json.loads(rows_file(directory, size, engine_tp).read_text(encoding="utf-8"))


def rows_file(directory: Path, size: str, engine_tp: int) -> Path:
    return directory / f"rows-{size}-{engine_tp}.json"


def run(directory: Path, size: str, engine_tp: int, rounds: int) -> None:
    """Run one rank of a world."""
    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), 1)
    dist.init_process_group(platform.collective_backend)
    path = directory / size
    if dist.get_rank() == 0 and not path.exists():
        make_model(path, SIZES[size])
    dist.barrier()
    rows = measure_engine(Setup(platform, path, size, rounds), engine_tp, LAYOUTS[engine_tp])
    if dist.get_rank() == 0:
        rows_file(directory, size, engine_tp).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class Setup:
    """Objects that all rows of a model share."""

    platform: Platform
    path: Path
    size: str
    rounds: int


def make_model(path: Path, sizes: Mapping[str, int]) -> None:
    """Write a Hugging Face directory with random weights and an unused tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    shared = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=64)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shared, **sizes, tie_word_embeddings=False)).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "<unk>": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(path)


def measure_engine(setup: Setup, engine_tp: int, layouts: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Measure all rows of one engine. The engine starts once; it first uses its default kernels, then live weights."""
    cfg = RolloutConfig(layout=RolloutLayoutConfig(tp=engine_tp), kv_cache_gib=0.02, gpu_memory_utilization=0.2)
    path, dtype = str(setup.path), setup.platform.default_dtype
    engine = build_engine(cfg, EngineModel(path, path, dtype, max_model_len=64, seed=0))
    models = {(tp, pp): make_trainer(setup, tp, pp) for tp, pp in layouts}
    rows = [measure(setup, engine_tp, layout, model, engine) for layout, model in models.items()]
    if keep_loading_layout(engine.model):
        rows += [measure(setup, engine_tp, layout, model, engine) for layout, model in models.items()]
    engine.close()
    return rows


def make_trainer(setup: Setup, tp: int, pp: int) -> MegatronModel:
    options = BuildOptions(setup.platform.default_dtype, "auto", RecomputeConfig(), True, False, 0)
    groups = build_groups(ParallelLayout(RANKS, tp, pp))
    spec = load_spec(setup.path)
    model = build_model(spec, groups, setup.platform, options)
    load(model.local_parameters(), spec.geometry, HFReader(setup.path))
    return model


def measure(
    setup: Setup, engine_tp: int, layout: tuple[int, int], model: MegatronModel, engine: WeightTarget
) -> dict[str, Any]:
    """Measure one layout. Every contender runs once as a warm-up, checked by digests, and then in turn."""
    parameters, geometry, pgs = model.local_parameters(), model.spec.geometry, model.groups.collection
    planned = planned_bridge(parameters, geometry, engine, world_group(), bucket_bytes=BUCKET_BYTES)
    planned_bridge(
        parameters, geometry, engine, world_group(), bucket_bytes=BUCKET_BYTES, verify=True, poison=True
    ).sync(0)
    gatherer = Gatherer(parameters, geometry, pgs.tp, pgs.pp)
    bucketed = BucketedGatherer(parameters, geometry)
    ready = {name: tensor.clone() for name, tensor in gatherer}
    contenders: dict[str, Callable[[], object]] = {
        "planned": partial(planned.sync, 1),
        "reload": lambda: engine.load_weights(iter(ready.items()), version=1),
        "gather": partial(GatherBridge(gatherer, engine).sync, 1),
        "bucketed": lambda: engine.load_weights(iter(bucketed), version=1),
    }
    assert all(torch.equal(tensor, ready[name]) for name, tensor in bucketed)
    for contender in contenders.values():
        contender()
    times = [{name: timed_world(contenders[name]) for name in CONTENDERS} for _ in range(setup.rounds)]
    kernels = "repacked" if planned._map.repacked else "live"
    row = {
        "model": setup.size,
        "parameters": sum(tensor.numel() for tensor in ready.values()),
        "trainer": f"TP{layout[0]} PP{layout[1]}",
        "rollout": f"TP{engine_tp}",
        "kernels": kernels,
        **bytes_moved(planned, ready, parameters),
        **summary(times),
    }
    if dist.get_rank() == 0:
        show(row)
    return row


def timed_world(action: Callable[[], object]) -> Timing:
    """Return the wall seconds of the slowest rank and the CPU seconds of all ranks. Collective."""
    dist.barrier()
    _, mine = time_call(action)
    every = all_gather_json([mine.wall_s, mine.cpu_s])
    return Timing(max(wall for wall, _ in every), sum(cpu for _, cpu in every))


def bytes_moved(
    planned: PlannedBridge, ready: Mapping[str, Tensor], parameters: list[LocalParameter]
) -> dict[str, Any]:
    """Return the bytes that the plan sends, and the bytes that a gather of every full tensor to every rank sends.

    Summed over ranks.
    """
    full = sum(tensor.numel() * tensor.element_size() for tensor in ready.values())
    held = sum(parameter.tensor.numel() * parameter.tensor.element_size() for parameter in parameters)
    moved = int(count_bytes(planned.plan).received.sum())
    gathered = sum(full - one for one in all_gather_json(held))
    return {"bytes_planned": moved, "bytes_gathered": gathered, "bytes_won": round(1 - moved / gathered, 4)}


def summary(times: list[dict[str, Timing]]) -> dict[str, Any]:
    """Return medians per contender, and medians of the ratios within a round."""
    ratios = {}
    for first, second in (("planned", "reload"), ("planned", "gather"), ("planned", "bucketed"), ("gather", "reload")):
        pairs = [one[first].wall_s / one[second].wall_s for one in times]
        cpu = [one[first].cpu_s / one[second].cpu_s for one in times]
        ratios[f"{first}/{second}"] = {
            "median": round(statistics.median(pairs), 3),
            "min": round(min(pairs), 3),
            "max": round(max(pairs), 3),
            "cpu_median": round(statistics.median(cpu), 3),
        }
    medians = {
        name: {
            "wall_s": round(statistics.median(one[name].wall_s for one in times), 5),
            "cpu_s": round(statistics.median(one[name].cpu_s for one in times), 5),
        }
        for name in CONTENDERS
    }
    return {"seconds": medians, "ratios": ratios}


def show(row: Mapping[str, Any]) -> None:
    """Return one line, with a note for engines of one rank."""
    head = f"{row['model']} {row['parameters'] / 1e6:.1f}M {row['trainer']} -> {row['rollout']} {row['kernels']}"
    ratios = "  ".join(
        f"{name} {found['median']:.2f} [{found['min']:.2f} {found['max']:.2f}] cpu {found['cpu_median']:.2f}"
        for name, found in row["ratios"].items()
    )
    print(f"{head}: {ratios}  bytes won {row['bytes_won']:.0%}", flush=True)
    if row["rollout"] == "TP1":
        print("  rollout TP1: every rank needs every byte, so nothing can be won over a gather", flush=True)


class BucketedGatherer:
    """Yield full tensors under Hugging Face names. Every rank sends its part of a bucket of tensors to all ranks as one message.

    It supports trainers without data parallelism or with equal tilings. The first rank that holds a rectangle sends it.
    """

    def __init__(self, parameters: list[LocalParameter], geometry: ModelGeometry):
        self._tensors = {parameter.name: parameter.tensor for parameter in parameters}
        self._like = parameters[0].tensor
        self._shapes = hf_shapes(geometry)
        places = describe_sources(parameters, lambda p: pieces(p.name, geometry, p.shard), world_group())
        by_name: dict[str, dict[tuple[int, ...], tuple[int, str, Piece]]] = defaultdict(dict)
        for place in places:
            for piece in place.pieces:
                by_name[piece.hf_name].setdefault(piece.start, (min(place.ranks), place.buffer, piece))
        self._senders = {name: list(found.values()) for name, found in by_name.items()}
        self._buckets = self._plan_buckets(self._like.element_size())

    def _plan_buckets(self, item_bytes: int) -> list[list[str]]:
        buckets: list[list[str]] = [[]]
        filled = 0
        for name, shape in self._shapes.items():
            size = torch.Size(shape).numel() * item_bytes
            if buckets[-1] and filled + size > BUCKET_BYTES:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += size
        return buckets

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for names in self._buckets:
            full = {name: self._like.new_empty(self._shapes[name]) for name in names}
            parts = [[s for name in names for s in self._senders[name] if s[0] == rank] for rank in range(RANKS)]
            flats = [self._pack(rank, sent) for rank, sent in enumerate(parts)]
            works = [dist.broadcast(flat, rank, async_op=True) for rank, flat in enumerate(flats)]
            for work, flat, sent in zip(works, flats, parts, strict=True):
                work.wait()
                for (_, _, piece), part in zip(sent, flat.split([s[2].numel for s in sent]), strict=True):
                    full[piece.hf_name][piece.slices] = part.view(piece.shape)
            yield from full.items()

    def _pack(self, rank: int, sent: list[tuple[int, str, Piece]]) -> Tensor:
        if rank != dist.get_rank():
            return self._like.new_empty(sum(piece.numel for _, _, piece in sent))
        return torch.cat(
            [view(self._tensors[buffer], piece).reshape(-1) for _, buffer, piece in sent] or [self._like[:0]]
        )


if __name__ == "__main__":
    main()
