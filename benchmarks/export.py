"""Compare writing a Hugging Face directory from a model's tensors with safetensors' ``save_file`` of the finished dictionary.

Both sides run in turn and end with an fsync, and their files contain the same bits. The ratio is the ratio of speeds.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common import report, time_call
from benchmarks.synthetic import LARGE, SMALL, num_bytes, parameters, world_of_one
from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.checkpoint.disk import fsync
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout

GOAL = 0.8


def plain(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    fsync(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer rounds")
    args = parser.parse_args()
    geometry, rounds = (SMALL, 3) if args.quick else (LARGE, 7)
    pairs = []
    with world_of_one() as folder:
        (folder / "config.json").write_text("{}")
        held = parameters(geometry, ParallelLayout(1), 0)
        exporter = Exporter(held, geometry, [str(folder)], world_group(), bucket_bytes=2**28)
        exporter.write(folder / "ours")
        ready = {name: tensor.clone() for name, tensor in load_file(folder / "ours" / "model.safetensors").items()}
        for _ in range(rounds):
            theirs = time_call(lambda: plain(ready, folder / "plain.safetensors"))[1]
            ours = time_call(lambda: exporter.write(folder / "ours"))[1]
            pairs.append((theirs, ours))
        found = load_file(folder / "ours" / "model.safetensors")
        exact = all(torch.equal(found[name], tensor) for name, tensor in ready.items())
    assert exact and found.keys() == ready.keys()
    size = num_bytes(geometry)
    ratios = [theirs.wall_s / ours.wall_s for theirs, ours in pairs]
    details = {
        "bytes": size,
        "rounds": rounds,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "ours_gb_per_s": size / 1e9 / statistics.median(ours.wall_s for _, ours in pairs),
        "save_file_gb_per_s": size / 1e9 / statistics.median(theirs.wall_s for theirs, _ in pairs),
        "ours_cpu_s": statistics.median(ours.cpu_s for _, ours in pairs),
        "save_file_cpu_s": statistics.median(theirs.cpu_s for theirs, _ in pairs),
    }
    report("export", details, ratio=statistics.median(ratios), goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
