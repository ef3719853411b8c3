"""Planning time per rank for worlds of 1k, 4k and 16k simulated ranks.

The benchmark times the local work of a rank after the places are described: `build_plan` and its own `rank_view`. It also times
the description of the places (by rules and tracing, independent of the world size), the digest, and a trainer of 2,048 ranks
with disaggregated engines on 512 ranks. The result is the CPU seconds of the slowest sampled rank in the largest world, as the
median of the repetitions. The exponent describes the growth with the number of ranks.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
from typing import Any

from benchmarks.common import Timing, report, time_call
from benchmarks.models import LLAMA_70B, QWEN_235B, Model, destinations, shapes, sources, trainer_layout
from rlhf_mcore.bridge.map.pieces import Place
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from tests.trainer_layout import even_nodes

GOAL_S, GOAL_EXPONENT = 1.0, 1.05
BUCKET_BYTES = 256 * 2**20
TP, PP, EP, ENGINE_TP = 8, 8, 8, 8
APART = (2048, 512)  # ranks of the trainer and of disaggregated engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="256 and 1,024 ranks, once")
    quick = parser.parse_args().quick
    worlds = (256, 1024) if quick else (1024, 4096, 16384)
    rows = [measure(model, world, 1 if quick else 3) for model in (LLAMA_70B, QWEN_235B) for world in worlds]
    apart = [measure(model, APART[0], 1 if quick else 3, APART[1]) for model in (LLAMA_70B, QWEN_235B)]
    exponents = {
        model.name: exponent([row for row in rows if row["model"] == model.name]) for model in (LLAMA_70B, QWEN_235B)
    }
    slowest = max(row["plan_cpu_s"] for row in rows if row["ranks"] == worlds[-1])
    measured = {"bucket_bytes": BUCKET_BYTES, "rows": rows, "apart": apart, "exponents": exponents}
    measured["goal_exponent"] = GOAL_EXPONENT
    print(f"bridge_plan_exponent {max(exponents.values()):.3f} goal {GOAL_EXPONENT}")
    report("bridge_plan", measured, ratio=slowest, goal=GOAL_S, quick=quick)


def measure(model: Model, trainers: int, repeats: int, apart: int = 0) -> dict[str, Any]:
    """Measure one model on one world, for the first, a middle and the last rank.

    Engines run on the trainer's ranks, or on ``apart`` further ranks.
    """
    layout = trainer_layout(model, trainers, TP, PP, EP if model.geometry.num_experts else 1)
    engines, first, world = (apart or trainers) // ENGINE_TP, trainers if apart else 0, trainers + apart
    (held, needed), describing = time_call(
        lambda: (sources(model, layout), destinations(model, ENGINE_TP, engines, first))
    )
    order, nodes = spread_order(list(shapes(model)), held), even_nodes(world, 8)
    by_rank = {}
    for rank in (0, world // 2 + 3, world - 1):
        times = [time_rank(held, needed, order, nodes, rank) for _ in range(repeats)]
        by_rank[rank] = (statistics.median(t.wall_s for t in times), statistics.median(t.cpu_s for t in times))
    _, hashing = time_call(lambda: plan_rank(held, needed, order, nodes, 0).digest)
    row = {
        "model": model.name,
        "ranks": world,
        "tensors": len(order),
        "plan_wall_s": round(max(wall for wall, _ in by_rank.values()), 4),
        "plan_cpu_s": round(max(cpu for _, cpu in by_rank.values()), 4),
        "describe_cpu_s": round(describing.cpu_s, 4),
        "plan_and_digest_cpu_s": round(hashing.cpu_s, 4),
    }
    print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return row


def time_rank(held: list[Place], needed: list[Place], order: list[str], nodes: list[int], rank: int) -> Timing:
    """Measure once, after collecting the garbage of the previous measurement."""
    gc.collect()
    return time_call(lambda: plan_rank(held, needed, order, nodes, rank))[1]


def plan_rank(held: list[Place], needed: list[Place], order: list[str], nodes: list[int], rank: int) -> Plan:
    """Do the work of one rank before its first sync."""
    plan = build_plan(
        held, needed, element_sizes=dict.fromkeys(order, 2), bucket_bytes=BUCKET_BYTES, order=order, nodes=nodes
    )
    plan.rank_view(rank)
    return plan


def exponent(rows: list[dict[str, Any]]) -> float:
    """Return the slope of log time over log ranks, from the smallest to the largest world."""
    first, last = rows[0], rows[-1]
    return round(math.log(last["plan_cpu_s"] / first["plan_cpu_s"]) / math.log(last["ranks"] / first["ranks"]), 4)


if __name__ == "__main__":
    main()
