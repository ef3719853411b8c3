"""Compare the bytes of the planned bridge with the lower bound R_g and with gathering full tensors, and measure its buffers.

R_g counts the bytes that rank g needs and does not hold. It is computed here from the descriptions with boolean masks,
independently of the planner. Planned bytes are the messages in the ranks' own views. Gathering, as in the plain bridge, sends
every full tensor to every rank, except the elements that the rank holds. If the engine has one rank (rollout TP1), every rank
needs all elements, so the plan cannot send less than gathering.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.models import LLAMA_70B, QWEN_235B, Model, destinations, model_bytes, shapes, sources, trainer_layout
from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry
from tests.plan_bytes import count_bytes
from tests.trainer_layout import even_nodes

BUCKET_BYTES = 256 * 2**20
ITEM_BYTES, DEPTH, RANKS_PER_NODE = 2, 2, 8
SMALL = Model("0.6B", ModelGeometry("qwen3", 28, 1024, GroupedSizes(16, 8, 128), 3072, 151936, True))


@dataclass(frozen=True, slots=True)
class Case:
    """A trainer layout and the width of the engines on the same ranks."""

    model: Model
    ranks: int
    tp: int
    pp: int
    ep: int
    engine_tp: int


QUICK = (
    Case(SMALL, 4, 2, 2, 1, 2),
    Case(SMALL, 4, 2, 2, 1, 1),
    Case(SMALL, 4, 2, 1, 1, 2),
    Case(LLAMA_70B, 64, 8, 2, 1, 4),
    Case(LLAMA_70B, 1024, 8, 8, 1, 8),
)
FULL = (
    *QUICK,
    Case(LLAMA_70B, 64, 4, 4, 1, 8),
    Case(LLAMA_70B, 16384, 8, 8, 1, 8),
    Case(QWEN_235B, 512, 8, 8, 8, 8),
    Case(QWEN_235B, 16384, 8, 8, 8, 8),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller layouts")
    quick = parser.parse_args().quick
    rows = [measure(case) for case in (QUICK if quick else FULL)]
    peak = max(row["peak_over_formula"] for row in rows)
    print(f"bridge_bytes_peak {peak:.3f} goal 1.0")
    ratio = max(row["planned_over_bound"] for row in rows)
    measured = {"bucket_bytes": BUCKET_BYTES, "depth": DEPTH, "ranks_per_node": RANKS_PER_NODE, "rows": rows}
    report("bridge_bytes", measured, ratio=ratio, goal=1.0, quick=quick)


def measure(case: Case) -> dict[str, Any]:
    """Measure the bytes of one layout: by counting for all ranks, and from views and masks for four ranks."""
    held = sources(case.model, trainer_layout(case.model, case.ranks, case.tp, case.pp, case.ep))
    needed = destinations(case.model, case.engine_tp, case.ranks // case.engine_tp)
    known = shapes(case.model)
    if case.model.geometry.tied_embeddings:
        needed = [place for place in needed if place.buffer != "lm_head.weight"]
    check_coverage(held, needed, known)
    plan = build_plan(
        held,
        needed,
        element_sizes=dict.fromkeys(known, ITEM_BYTES),
        bucket_bytes=BUCKET_BYTES,
        order=spread_order(list(known), held),
        nodes=even_nodes(case.ranks, RANKS_PER_NODE),
    )
    samples = sorted({0, 1, case.ranks // 2 + 1, case.ranks - 1})
    row = {**describe(case), **measure_ranks(plan, held, needed, samples, model_bytes(case.model)), **whole(plan)}
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def describe(case: Case) -> dict[str, Any]:
    return {
        "model": case.model.name,
        "ranks": case.ranks,
        "trainer": f"TP{case.tp} PP{case.pp} EP{case.ep}",
        "rollout": f"TP{case.engine_tp}",
    }


def measure_ranks(plan: Plan, held: list[Place], needed: list[Place], ranks: list[int], full: int) -> dict[str, Any]:
    """Return the planned bytes of some ranks from their own views, relative to the bound and to full gathering."""
    views = [plan.rank_view(rank) for rank in ranks]
    bounds = [lower_bound(held, needed, rank) for rank in ranks]
    planned = [view.received_bytes for view in views]
    gathered = [full - count(pieces_of(held, rank)) for rank in ranks]
    peak = max(view.peak_bytes(DEPTH) for view in views)
    pairs = zip(planned, bounds, strict=True)
    return {
        "planned_over_bound": max((a / b if b else float(a == b) or float("inf")) for a, b in pairs),
        "planned_over_gather": round(sum(planned) / max(sum(gathered), 1), 4),
        "peak_over_formula": round(peak / (2 * DEPTH * BUCKET_BYTES), 4),
    }


def whole(plan: Plan) -> dict[str, Any]:
    """Return sums and balance over all ranks."""
    counted = count_bytes(plan)
    sent = counted.sent[counted.sent > 0]
    return {
        "buckets": plan.num_buckets,
        "all_ranks_over_bound": 1.0 if (counted.received == counted.lower_bound).all() else float("inf"),
        "sent_max_over_mean": round(float(sent.max() / sent.mean()), 4) if len(sent) else 1.0,
        "imported_share": round(float(counted.imported.sum() / max(counted.received.sum(), 1)), 4),
        "peak_over_formula_all": round(counted.peak(DEPTH) / (2 * DEPTH * BUCKET_BYTES), 4),
    }


def lower_bound(held: list[Place], needed: list[Place], rank: int) -> int:
    """Return R_g in bytes."""
    have, want = pieces_of(held, rank), pieces_of(needed, rank)
    return sum(ITEM_BYTES * area(pieces, have.get(name, [])) for name, pieces in want.items())


def pieces_of(places: list[Place], rank: int) -> dict[str, list[Piece]]:
    found: dict[str, list[Piece]] = defaultdict(list)
    for place in places:
        if rank in place.ranks:
            for piece in place.pieces:
                found[piece.hf_name].append(piece)
    return found


def count(pieces: dict[str, list[Piece]]) -> int:
    """Return the bytes of distinct elements."""
    return sum(ITEM_BYTES * area(found, []) for found in pieces.values())


def area(inside: list[Piece], outside: list[Piece]) -> int:
    """Return the number of elements inside a piece of ``inside`` and outside all of ``outside``, by a mask over the border grid."""
    every = [*inside, *outside]
    axes = range(len(inside[0].start))
    grid = [sorted({x for p in every for x in (p.start[axis], p.start[axis] + p.shape[axis])}) for axis in axes]
    mask = np.zeros([len(borders) - 1 for borders in grid], dtype=np.int64)
    for pieces, value in ((inside, 1), (outside, 0)):
        for piece in pieces:
            low = [np.searchsorted(grid[axis], piece.start[axis]) for axis in axes]
            high = [np.searchsorted(grid[axis], piece.start[axis] + piece.shape[axis]) for axis in axes]
            mask[tuple(slice(a, b) for a, b in zip(low, high, strict=True))] = value
    for axis in axes:
        lengths = np.diff(grid[axis]).reshape([-1 if a == axis else 1 for a in axes])
        mask = mask * lengths
    return int(mask.sum())


if __name__ == "__main__":
    main()
