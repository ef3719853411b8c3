"""Bytes that a sync moves for models of the field's sizes, by the plan that the bridge itself would make: no GPU, no weights.

Prints the table "Bytes by plan" of benchmarks/results/weight-sync.md. ``gathered`` is the volume if every rank of an engine
receives every full tensor, except the bytes that it holds: an all-gather on the trainer's ranks, or a broadcast to
disaggregated engines. With ``fp8`` or ``int8`` as its argument weights are sent in 8 bits (``rollout.quantization``); gathered
tensors are not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf_mcore.bridge.map.pieces import Place  # noqa: E402
from rlhf_mcore.bridge.map.quantised import SCALES, are_quantised, num_scales, scale_pieces  # noqa: E402
from rlhf_mcore.bridge.map.rules import hf_shapes  # noqa: E402
from rlhf_mcore.bridge.plan.build import build_plan, spread_order  # noqa: E402
from rlhf_mcore.families.quantised import QUANTISATIONS, Quantisation  # noqa: E402
from rlhf_mcore.parallel.layout import ParallelLayout  # noqa: E402
from rlhf_mcore.planning.inputs import EngineGrid  # noqa: E402
from rlhf_mcore.readers.model_files import read_geometry  # noqa: E402
from tests.engine_layout import SCALE_BYTES, destinations  # noqa: E402
from tests.plan_bytes import count_bytes  # noqa: E402
from tests.trainer_layout import (  # noqa: E402
    even_nodes,
    stage_names,
    trainer_places,
)

BUCKET_BYTES, DEPTH, PER_NODE, ITEM_BYTES, GB = 256 * 2**20, 2, 8, 2, 1e9


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the trainer's layout, an engine's layout and the number of engines. ``apart``: engines use separate devices."""

    model: str
    layout: ParallelLayout
    engine: EngineGrid
    engines: int
    apart: bool

    @property
    def name(self) -> str:
        layout = self.layout
        experts = f" EP{layout.ep}" if layout.ep > 1 else ""
        return f"{self.model}, {layout.world_size} ranks, TP{layout.tp} PP{layout.pp}{experts}"


def layout(ranks: int, tp: int, pp: int, ep: int = 1, layers: tuple[int, ...] | None = None) -> ParallelLayout:
    return ParallelLayout(ranks, tp=tp, pp=pp, ep=ep, etp=1 if ep > 1 else None, layers_per_stage=layers)


LAYERS = (12,) * 6 + (11,) * 2
CASES = (
    Case("Llama-3-8B", layout(8, 2, 1), EngineGrid(1), 8, False),
    Case("Llama-3-8B", layout(8, 2, 1), EngineGrid(1), 8, True),
    Case("Qwen3-30B-A3B", layout(32, 4, 1, 8), EngineGrid(4), 8, False),
    Case("Qwen3-30B-A3B", layout(32, 4, 1, 8), EngineGrid(4, ep=4), 8, False),
    Case("Qwen3-30B-A3B", layout(32, 4, 1, 8), EngineGrid(4), 4, True),
    Case("Qwen3-235B-A22B", layout(256, 4, 8, 8, LAYERS), EngineGrid(8), 32, False),
    Case("Qwen3-235B-A22B", layout(256, 4, 8, 8, LAYERS), EngineGrid(8, ep=8), 32, False),
    Case("Qwen3-235B-A22B", layout(256, 4, 8, 8, LAYERS), EngineGrid(8), 16, True),
    Case("Qwen3-235B-A22B", layout(256, 4, 8, 8, LAYERS), EngineGrid(8, ep=8), 16, True),
    Case("Qwen3-235B-A22B", layout(256, 4, 8, 8, LAYERS), EngineGrid(4, dp=2, ep=8), 16, True),
)


def with_scales(places: Sequence[Place], kind: Quantisation) -> list[Place]:
    """Add the scales' places to the weights' places."""
    every = list[Place]()
    for place in places:
        every.append(place)
        if are_quantised(place.pieces, kind):
            pieces, count = scale_pieces(place.pieces, kind), num_scales(place.pieces, kind)
            every.append(replace(place, buffer=place.buffer + SCALES, pieces=pieces, numel=count, padding=()))
    return every


def measure(case: Case, models: Path, quantization: str = "") -> list[str]:
    """Return the cells of a table row."""
    geometry = read_geometry(models / case.model, "lm").trunk
    shapes, world = hf_shapes(geometry), case.layout.world_size
    held = trainer_places(stage_names(geometry, case.layout), geometry, case.layout)
    needed = destinations(geometry, case.engine, case.engines, world if case.apart else 0)
    sizes, names = dict.fromkeys(shapes, ITEM_BYTES), list(shapes)
    own = 0 if case.apart else sum(piece.numel * len(place.ranks) for place in held for piece in place.pieces)
    if quantization:
        kind = QUANTISATIONS[quantization]
        held, needed, names = with_scales(held, kind), with_scales(needed, kind), list(kind.with_scales(shapes))
        sizes = {name: 1 if kind.applies(name) else sizes.get(name, SCALE_BYTES) for name in names}
    devices = world + case.engines * case.engine.size * case.apart
    plan = build_plan(
        held,
        needed,
        element_sizes=sizes,
        bucket_bytes=BUCKET_BYTES,
        order=spread_order(names, held, keep_layers=False),
        nodes=even_nodes(devices, PER_NODE),
    )
    counted, full = count_bytes(plan), ITEM_BYTES * sum(map(prod, shapes.values()))
    assert (counted.received == counted.lower_bound).all()
    gathered = case.engines * case.engine.size * full - own * ITEM_BYTES
    received, imported = int(counted.received.sum()), int(counted.imported.sum())
    numbers = [received, gathered, imported, int(counted.received.max()), int(counted.sent.max()), counted.peak(DEPTH)]
    cut = [f"{name.upper()}{size}" for name, size in asdict(case.engine).items() if size > 1] or ["TP1"]
    where = f"{case.engines} x {' '.join(cut)}" + (" apart" if case.apart else "")
    return [case.name, where, *(f"{number / GB:,.1f}" for number in numbers), str(plan.num_buckets)]


def main() -> None:
    header = [
        "model, trainer",
        "engines",
        "received",
        "gathered",
        "across machines",
        "most of a rank",
        "most sent by one",
    ]
    header += ["buffers", "buckets"]
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for case in CASES:
        print("| " + " | ".join(measure(case, ROOT / "configs" / "models", *sys.argv[1:2])) + " |", flush=True)


if __name__ == "__main__":
    main()
