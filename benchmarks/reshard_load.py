"""Compare loading an optimizer state at another layout with loading it at the layout that wrote it.

State of TP2·PP2 is loaded for all ranks of TP2·PP2, and for all ranks of three other layouts of four ranks. This process loads
one rank after the other, in turn and from the page cache. The ratio is the largest median of other / same.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import Timing, report, time_call
from benchmarks.synthetic import LARGE, SMALL, num_bytes, shards, write_state
from rlhf_mcore.bridge.files.state_reader import StateReader
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.parallel.layout import ParallelLayout

GOAL = 1.3
SAME = "tp2_pp2"
LAYOUTS = {
    SAME: ParallelLayout(4, tp=2, pp=2),
    "dp4": ParallelLayout(4),
    "pp2_dp2": ParallelLayout(4, pp=2),
    "tp4": ParallelLayout(4, tp=4),
}


def load(directory: Path, geometry: ModelGeometry, layout: ParallelLayout) -> Timing:
    """Load all ranks of a layout. Tensors are allocated before the clock starts."""
    wanted = [shards(geometry, layout, rank) for rank in range(layout.world_size)]

    def read() -> None:
        for mine in wanted:
            StateReader(directory, geometry).read_into(mine)

    return time_call(read)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer rounds")
    args = parser.parse_args()
    geometry, rounds = (SMALL, 3) if args.quick else (LARGE, 5)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        write_state(directory, geometry, LAYOUTS[SAME])
        names, times = list(LAYOUTS), []
        load(directory, geometry, LAYOUTS[SAME])  # puts the files into the page cache
        for turn in range(rounds):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            times.append({name: load(directory, geometry, LAYOUTS[name]) for name in order})
    ratios = {name: [row[name].wall_s / row[SAME].wall_s for row in times] for name in LAYOUTS if name != SAME}
    details = {
        "bytes": 2 * num_bytes(geometry),
        "rounds": rounds,
        "ratios": {name: {"median": statistics.median(r), "min": min(r), "max": max(r)} for name, r in ratios.items()},
        "wall_s": {name: statistics.median(row[name].wall_s for row in times) for name in LAYOUTS},
        "cpu_s": {name: statistics.median(row[name].cpu_s for row in times) for name in LAYOUTS},
    }
    report(
        "reshard_load", details, ratio=max(statistics.median(r) for r in ratios.values()), goal=GOAL, quick=args.quick
    )


if __name__ == "__main__":
    main()
