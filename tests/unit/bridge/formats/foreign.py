"""Write checkpoints in the formats of other trainers: DTensors of a simulated world, distributed by torch itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

Placements = Callable[[str, Tensor], Sequence[Placement]]


def rows_of_fsdp(name: str, tensor: Tensor) -> Sequence[Placement]:
    """Shard rows over one mesh dimension."""
    return [Shard(0)]


def hybrid(name: str, tensor: Tensor) -> Sequence[Placement]:
    """Replicate over one mesh dimension and shard rows over the other."""
    return [Replicate(), Shard(0)]


def fsdp_and_tp(name: str, tensor: Tensor) -> Sequence[Placement]:
    """Shard rows by FSDP. The tensor-parallel dimension shards the columns of some tensors and replicates the others."""
    return [Shard(0), Shard(1) if name.endswith(("o_proj.weight", "down_proj.weight")) else Replicate()]


def write_fsdp(
    directory: Path, tensors: Mapping[str, Tensor], mesh_shape: tuple[int, ...], placements: Placements = rows_of_fsdp
) -> None:
    """Write ``model_world_size_X_rank_Y.pt`` with DTensors, and the extra state of every rank."""
    directory.mkdir(parents=True, exist_ok=True)
    world = int(torch.Size(mesh_shape).numel())
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
            shards = {
                name: distribute_tensor(tensor, mesh, placements(name, tensor), src_data_rank=None)
                for name, tensor in tensors.items()
            }
            save_rank(directory, shards, rank, world)
        finally:
            dist.destroy_process_group()


def write_flat(directory: Path, tensors: Mapping[str, Tensor], world: int, *, padded: bool) -> None:
    """Write checkpoints in which each rank holds an interval of each flattened tensor: equal and padded, or uneven."""
    directory.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        save_rank(directory, {name: _interval(t, rank, world, padded) for name, t in tensors.items()}, rank, world)


def _interval(tensor: Tensor, rank: int, world: int, padded: bool) -> Tensor:
    flat = tensor.flatten()
    if padded:
        each = -(-flat.numel() // world)
        return torch.cat([flat, flat.new_zeros(each * world - flat.numel())])[rank * each : (rank + 1) * each].clone()
    borders = [0, *(flat.numel() * k // world - flat.numel() % 3 * (k < world) for k in range(1, world)), flat.numel()]
    return flat[max(borders[rank], 0) : max(borders[rank + 1], 0)].clone()


def save_rank(directory: Path, tensors: Mapping[str, object], rank: int, world: int) -> None:
    torch.save(dict(tensors), directory / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save({"lr_scheduler": {}, "rng": None}, directory / f"extra_state_world_size_{world}_rank_{rank}.pt")
