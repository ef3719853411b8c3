"""Measure the time that training waits for a save in the background.

Three operations on fp32 weights and Adam moments run in turn: a save in the foreground, a save in the background, and a plain
copy of as many bytes. For the background save only the call that training waits for counts. The first such call does not count,
because it allocates the memory that later saves reuse. The ratio is background / foreground. Moments, and weights that need no
gathering, are copied after the call, while the run continues. The result also contains the time that an immediately following
update would wait for this copy.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from benchmarks.common import report, time_call
from benchmarks.synthetic import LARGE, SMALL, num_bytes, parameters, shards, world_of_one
from rlhf_mcore.bridge.files.export import Exporter
from rlhf_mcore.bridge.files.state_files import RankState, state_file
from rlhf_mcore.bridge.files.tensor_files import FileImage
from rlhf_mcore.checkpoint.collective import CheckpointWriter
from rlhf_mcore.checkpoint.triggers import Decision, SignalRequests
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import current_platform
from rlhf_mcore.trainer.checkpointer import RunCheckpointer

GOAL, MEMCPY_GOAL = 0.05, 1.2


class Part:
    """Weights and moments of one role, saved as by roles/role_files.py.

    A thread copies them, and an update waits for the copy.
    """

    name = "actor"

    def __init__(self, geometry: ModelGeometry, folder: Path):
        layout = ParallelLayout(1)
        (folder / "config.json").write_text("{}")
        self._exporter = Exporter(
            parameters(geometry, layout, 0), geometry, [str(folder)], world_group(), bucket_bytes=2**28
        )
        self._state = RankState(shards(geometry, layout, 0), geometry)
        self._image = FileImage.empty(state_file(0), self._state.layout)
        self.copied: Future[None] | None = None

    def num_bytes(self) -> int:
        return self._exporter.num_bytes + self._state.layout.num_bytes

    def is_finite(self) -> bool:
        return True

    def write(self, checkpoint: Path) -> list[Path]:
        paths = self._exporter.write(checkpoint / "actor")
        self._state.write(path := checkpoint / "actor" / state_file(0))
        return [*paths, path]

    def snapshot(self) -> Callable[[Path], list[Path]]:
        kept, copy_weights = self._exporter.snapshot()
        images = [*kept, self._image]

        def copy() -> None:
            copy_weights()
            self._state.copy_to(self._image)

        self.copied = copied = current_platform().in_thread(copy)

        def write(checkpoint: Path) -> list[Path]:
            copied.result()
            (checkpoint / "actor").mkdir()
            paths = [image.write(checkpoint / "actor") for image in images]
            return paths + self._exporter.write_rest(checkpoint / "actor")

        return write


def checkpointer(folder: Path, part: Part, in_background: bool) -> RunCheckpointer:
    return RunCheckpointer(
        writer=CheckpointWriter(folder / ("background" if in_background else "foreground")),
        parts=[part],
        small_files=lambda step: {},
        triggers=None,
        requests=SignalRequests(),
        after_commit=lambda: None,
        note=print,
        in_background=in_background,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer rounds")
    args = parser.parse_args()
    geometry, rounds = (SMALL, 3) if args.quick else (LARGE, 5)
    size = 3 * num_bytes(geometry)
    source, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    rows = []
    with world_of_one() as folder:
        part = Part(geometry, folder)
        foreground, background = (checkpointer(folder, part, way) for way in (False, True))
        background.save(0, {}, Decision())
        background.drain()
        for step in range(rounds):
            whole = time_call(lambda step=step: foreground.save(step, {}, Decision()))[1]  # type: ignore[misc]
            stall = time_call(lambda step=step: background.save(step, {}, Decision()))[1]  # type: ignore[misc]
            assert part.copied is not None
            until_update = time_call(part.copied.result)[1]
            background.drain()
            copy = time_call(lambda: target.copy_(source))[1]
            rows.append((whole, stall, copy, until_update))
    ratios = [stall.wall_s / whole.wall_s for whole, stall, _, _ in rows]
    memcpy = [stall.wall_s / copy.wall_s for _, stall, copy, _ in rows]
    details = {
        "bytes": size,
        "rounds": rounds,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "stall_by_memcpy": statistics.median(memcpy),
        "stall_by_memcpy_min": min(memcpy),
        "stall_by_memcpy_max": max(memcpy),
        "memcpy_goal": MEMCPY_GOAL,
        "foreground_s": statistics.median(whole.wall_s for whole, _, _, _ in rows),
        "stall_s": statistics.median(stall.wall_s for _, stall, _, _ in rows),
        "then_until_an_update_may_begin_s": statistics.median(until.wall_s for *_, until in rows),
        "stall_cpu_s": statistics.median(stall.cpu_s for _, stall, _, _ in rows),
    }
    report("save_stall", details, ratio=statistics.median(ratios), goal=GOAL, quick=args.quick)


if __name__ == "__main__":
    main()
