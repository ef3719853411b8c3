"""Count host syncs, copies and kernel launches of an update without a CUDA device, on tensors without data.

The role's code, Megatron's schedule and its optimizer run on fake CUDA tensors (``benchmarks/fake_cuda``) in a CPU build of
torch. There is no Transformer Engine and no torch.compile, and collectives return immediately. The launches are therefore an
upper bound.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import report
from benchmarks.fake_cuda import guard

if TYPE_CHECKING:
    from benchmarks.fake_cuda.device import Counts

LAYERS, MICROBATCHES = 2, 2  # layers and microbatches of the counted update
KINDS = ("host syncs", "copies", "launches")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one case per mechanism, one update each; no costs per layer"
    )
    parser.add_argument("--case", default="", help="only cases whose names contain this")
    parser.add_argument("--places", action="store_true", help="also print the lines of code that wait for the device")
    args = parser.parse_args()
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # it would inspect the replacement of the driver
    guard.load()
    from benchmarks.fake_cuda.update import CASES, count_update

    rows: dict[str, dict[str, Any]] = {}
    needed = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in (case for case in CASES if args.case in case.name and (case.quick or args.case or not args.quick)):
            sizes = [(LAYERS, MICROBATCHES)]
            if not args.quick:
                sizes += [(LAYERS, MICROBATCHES - 1), (2 * LAYERS, MICROBATCHES)]
            counts = [count_update(case, Path(folder), *size) for size in sizes]
            rows[case.name] = _row(counts)
            if case.layout.get("ep", 1) > 1:  # sizes of the expert exchange
                needed += LAYERS * MICROBATCHES
            if args.places:
                _print_places(case.name, counts[0])
    print(_table(rows))
    total = sum(row["passes"]["host syncs"] for row in rows.values())
    report(
        "device_counts",
        {"rows": rows},
        ratio=total,
        goal=needed,
        quick=args.quick or bool(args.case),
        counts="host_syncs",
    )


def _row(counts: Sequence[Counts]) -> dict[str, Any]:
    """Return the counts of the passes and of the rest of an update. Three updates also give the counts per microbatch and layer."""
    of_passes = [_kinds(each, "passes") for each in counts]
    row: dict[str, Any] = {"passes": of_passes[0], "rest": _kinds(counts[0], "rest of the update")}
    if len(counts) > 1:
        whole, fewer, deeper = of_passes
        per_layer = {kind: (deeper[kind] - whole[kind]) / (LAYERS * MICROBATCHES) for kind in KINDS}
        row["layer"] = per_layer
        row["microbatch"] = {kind: whole[kind] - fewer[kind] - LAYERS * per_layer[kind] for kind in KINDS}
    return row


def _kinds(counts: Counts, phase: str) -> dict[str, int]:
    total = counts.total
    return {
        "host syncs": total[phase, "host syncs"],
        "copies": total[phase, "copies to device"] + total[phase, "copies to host"],
        "launches": total[phase, "launches"],
    }


def _table(rows: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table of host syncs, copies and launches for each case, per layer and per microbatch without layers."""
    parts = {
        "layer": "a layer",
        "microbatch": "a microbatch beside",
        "passes": "all passes",
        "rest": "the rest of the update",
    }
    shown = [part for part in parts if all(part in row for row in rows.values())]
    lines = [
        "| syncs, copies, launches of | " + " | ".join(parts[part] for part in shown) + " |",
        "|---" * (len(shown) + 1) + "|",
    ]
    for name, row in rows.items():
        cells = (", ".join(f"{row[part][kind]:g}" for kind in KINDS) for part in shown)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _print_places(name: str, counts: Counts) -> None:
    for (phase, kind, place), number in counts.places.most_common():
        if kind == "host syncs":
            print(f"{name}: {phase}: {number} at {place}")


if __name__ == "__main__":
    main()
