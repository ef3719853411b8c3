"""A model that consists only of tensors: the shards and optimizer states of the ranks of a layout, without Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.files.state_files import STATE_INDEX, RankState, make_index, state_file
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import GroupedSizes, LocalParameter, ModelGeometry, Shard, StateShard
from rlhf_mcore.parallel.layout import ParallelLayout
from tests.trainer_layout import stage_names

LARGE = ModelGeometry("llama", 8, 640, GroupedSizes(10, 5, 64), 1760, 16000, False)  # 56M parameters
SMALL = ModelGeometry("llama", 2, 512, GroupedSizes(8, 4, 64), 1408, 8000, False)  # 14M
MOMENTS = ("exp_avg", "exp_avg_sq")


def num_bytes(geometry: ModelGeometry) -> int:
    """Return the bytes of the weights in fp32."""
    return 4 * sum(torch.Size(shape).numel() for shape in hf_shapes(geometry).values())


def parameters(geometry: ModelGeometry, layout: ParallelLayout, rank: int) -> list[LocalParameter]:
    """Return random weights of a rank."""
    place = layout.coordinates(rank)
    shard = Shard(place["tp"], layout.tp)
    found = []
    for name in stage_names(geometry, layout)[place["pp"]]:
        held = pieces(name, geometry, shard)
        found.append(LocalParameter(name, torch.randn(max(p.offset + p.numel for p in held)), shard))
    return found


def shards(geometry: ModelGeometry, layout: ParallelLayout, rank: int) -> list[StateShard]:
    """Return the moments of a rank. Data-parallel ranks divide the concatenated parameters evenly."""
    held = parameters(geometry, layout, rank)
    total = sum(p.tensor.numel() for p in held)
    part, dp = -(-total // layout.dp), layout.coordinates(rank)["dp"]
    position, found = 0, []
    for parameter in held:
        size = parameter.tensor.numel()
        start, stop = max(dp * part - position, 0), min((dp + 1) * part - position, size)
        position += size
        if start < stop:
            tensors = {kind: torch.rand(stop - start) for kind in MOMENTS}
            found.append(StateShard(parameter.name, parameter.shard, start, stop, tensors))
    return found


def write_state(directory: Path, geometry: ModelGeometry, layout: ParallelLayout) -> None:
    """Write the state files of all ranks of a layout."""
    directory.mkdir(parents=True, exist_ok=True)
    described = {}
    for rank in range(layout.world_size):
        state = RankState(shards(geometry, layout, rank), geometry)
        state.write(directory / state_file(rank))
        described[rank] = state.described
    (directory / STATE_INDEX).write_text(json.dumps(make_index(described, geometry, {})))


@contextmanager
def world_of_one() -> Iterator[Path]:
    """Make this process a world of one rank. Yields a temporary folder."""
    with TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield Path(folder)
        finally:
            dist.destroy_process_group()
