"""Measure the fill of packed microbatches and the balance of data-parallel ranks, for typical response lengths.

Fill is tokens / (bins * budget). The result also contains the bins of first-fit decreasing, and a lower bound for any method.
The balance is the largest share over the mean. It is compared with verl's function (``verl.utils.seqlen_balancing``, installed
in .venv/oracles), and may be worse by at most 1e-4 of the mean. The ratio is the smallest fill of a case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import report, time_call
from rlhf_mcore.data.packing import balance, pack
from tests.oracles import published

FILL_GOAL, SPREAD_GOAL = 0.985, 1.02
BUDGET, ROWS, RANKS = 8192, 2048, (4, 16, 64)


def lengths() -> dict[str, list[int]]:
    """Return lengths of prompt plus response."""
    draw = np.random.Generator(np.random.Philox(key=7))
    made = {
        "geometric, mean 400": draw.geometric(1 / 400, ROWS),
        "lognormal, median 600": draw.lognormal(np.log(600), 0.8, ROWS),
        "uniform to 2048": draw.uniform(1, 2048, ROWS),
        "half cut off at 2048": np.where(draw.random(ROWS) < 0.5, 2048, draw.uniform(64, 2048, ROWS)),
        "groups of 8, mean by prompt": draw.lognormal(np.log(500), 0.7, ROWS // 8).repeat(8)
        * draw.uniform(0.7, 1.3, ROWS),
    }
    return {name: np.clip(values, 16, 4096).astype(int).tolist() for name, values in made.items()}


def theirs() -> Callable[[Sequence[int], int], list[list[int]]] | None:
    """Return verl's function, or None if verl is not installed."""
    if not Path(sys.prefix, "oracles", "verl").is_dir():
        return None
    function = published.verl().seqlen_balancing.get_seqlen_balanced_partitions
    return lambda sizes, count: function(list(sizes), count, equal_size=False)


def first_fit(sizes: Sequence[int]) -> int:
    """Return the number of bins of first-fit decreasing."""
    room: list[int] = []
    for size in sorted(sizes, reverse=True):
        place = next((k for k, left in enumerate(room) if left >= size), None)
        if place is None:
            room.append(BUDGET - size)
        else:
            room[place] -= size
    return len(room)


def spread(sizes: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    sums = [sum(sizes[row] for row in share) for share in shares]
    return max(sums) / (sum(sums) / len(sums))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    quick, verl, found = parser.parse_args().quick, theirs(), {}
    for name, sizes in lengths().items():
        bins, pack_s = time_call(lambda sizes=sizes: pack(sizes, BUDGET))
        row: dict[str, Any] = {
            "fill": sum(sizes) / (len(bins) * BUDGET),
            "bins": len(bins),
            "bins_first_fit": first_fit(sizes),
            "bins_at_least": -(-sum(sizes) // BUDGET),
            "pack_cpu_s": round(pack_s.cpu_s, 4),
            "ranks": {},
        }
        for ranks in RANKS:
            shares, ours_s = time_call(lambda sizes=sizes, ranks=ranks: balance(sizes, ranks))
            row["ranks"][ranks] = {"ours": spread(sizes, shares), "cpu_s": round(ours_s.cpu_s, 4)}
            if verl is not None:
                other, their_s = time_call(lambda sizes=sizes, ranks=ranks: verl(sizes, ranks))
                row["ranks"][ranks] |= {"verl": spread(sizes, other), "verl_cpu_s": round(their_s.cpu_s, 4)}
        found[name] = row
        print(name, row)
    worst = max(each["ours"] for row in found.values() for each in row["ranks"].values())
    never_worse = all(
        each["ours"] <= each.get("verl", each["ours"]) + 1e-4
        for row in found.values()
        for each in row["ranks"].values()
    )
    print(f"largest share over the mean {worst:.4f} goal {SPREAD_GOAL}; never worse than verl's: {never_worse}")
    measured = {"cases": found, "worst_spread": worst, "spread_goal": SPREAD_GOAL, "never_worse": never_worse}
    report("balance", measured, ratio=min(row["fill"] for row in found.values()), goal=FILL_GOAL, quick=quick)


if __name__ == "__main__":
    main()
