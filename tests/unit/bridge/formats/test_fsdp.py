"""Merging by placement: meshes in any order of ranks, uneven and empty shards, strided ones, and what placements cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_mcore.bridge.files.formats.fsdp import open_fsdp
from rlhf_mcore.bridge.files.formats.located import locate, read
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.model_files import read_geometry
from tests.unit.bridge.formats.conftest import HFModel
from tests.unit.bridge.formats.foreign import save_rank

Get = Callable[[str], HFModel]
Local = Callable[[Tensor, tuple[int, int]], Tensor]
PROJECTION = "model.layers.1.self_attn.q_proj.weight"  # [128, 64]
HEAD = "lm_head.weight"  # [97, 64]


def write(
    directory: Path,
    tensors: Mapping[str, Tensor],
    name: str,
    mesh: list[list[int]],
    placed: Sequence[Placement],
    local: Local,
) -> None:
    """Every rank holds all tensors whole, but ``name`` as ``local`` of the tensor and the rank's place in the mesh."""
    directory.mkdir()
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        device_mesh = DeviceMesh("cpu", mesh, mesh_dim_names=("a", "b"))
        where = next((row, ranks.index(rank)) for row, ranks in enumerate(mesh) if rank in ranks)
        full = tensors[name]
        shard = DTensor.from_local(
            local(full, where).clone(), device_mesh, placed, run_check=False, shape=full.shape, stride=full.stride()
        )
        save_rank(directory, {**tensors, name: shard}, rank, 4)
        dist.destroy_process_group()


CASES: dict[str, tuple[list[list[int]], Sequence[Placement], Local]] = {
    "rows by rows": ([[0, 1], [2, 3]], [Shard(0), Shard(0)], lambda t, at: t.chunk(2)[at[0]].chunk(2)[at[1]]),
    "rows by columns": ([[0, 1], [2, 3]], [Shard(0), Shard(1)], lambda t, at: t.chunk(2)[at[0]].chunk(2, dim=1)[at[1]]),
    "columns by rows": ([[0, 1], [2, 3]], [Shard(1), Shard(0)], lambda t, at: t.chunk(2, dim=1)[at[0]].chunk(2)[at[1]]),
    "ranks in another order": (
        [[3, 1], [0, 2]],
        [Shard(0), Shard(1)],
        lambda t, at: t.chunk(2)[at[0]].chunk(2, dim=1)[at[1]],
    ),
    "replicas outside": ([[0, 1], [2, 3]], [Replicate(), Shard(0)], lambda t, at: t.chunk(2)[at[1]]),
    "replicas inside": ([[0, 1], [2, 3]], [Shard(1), Replicate()], lambda t, at: t.chunk(2, dim=1)[at[0]]),
    "replicas only": ([[0, 1], [2, 3]], [Replicate(), Replicate()], lambda t, at: t),
}


def assert_merged(directory: Path, model: Path, expected: Mapping[str, Tensor], name: str) -> None:
    source = open_fsdp(directory, model, read_geometry(model))
    assert set(source.types) == set(expected)
    assert torch.equal(source.read(name, 0, len(expected[name])), expected[name])
    assert torch.equal(source.read(name, 11, 70), expected[name][11:81])
    assert torch.equal(source.read(name, 50, 3), expected[name][50:53])


@pytest.mark.parametrize("name", [PROJECTION, HEAD])
@pytest.mark.parametrize("case", CASES)
def test_placements(hf_model: Get, tmp_path: Path, name: str, case: str) -> None:
    model, tensors, _ = hf_model("llama")
    write(tmp_path / "fsdp", tensors, name, *CASES[case])
    assert_merged(tmp_path / "fsdp", model, tensors, name)


def test_fsdp_over_tensor_parallel_rows_is_strided(hf_model: Get, tmp_path: Path) -> None:
    """Tensor parallelism cuts first, FSDP each part: rank (f, t) holds part f of part t."""
    model, tensors, _ = hf_model("llama")
    placed = [_StridedShard(0, split_factor=2), Shard(0)]
    write(
        tmp_path / "fsdp",
        tensors,
        PROJECTION,
        [[0, 1], [2, 3]],
        placed,
        lambda t, at: t.chunk(2)[at[1]].chunk(2)[at[0]],
    )
    assert_merged(tmp_path / "fsdp", model, tensors, PROJECTION)


def test_shards_may_be_empty(hf_model: Get, tmp_path: Path) -> None:
    """Experts of a router with fewer rows than ranks: torch.chunk gives the last ranks nothing."""
    model, tensors, _ = hf_model("qwen3_moe")
    name, shares = "model.layers.0.mlp.gate.weight", [(0, 2), (2, 4), (4, 4), (4, 4)]  # of 4 rows, over 3 of 4 places

    def local(tensor: Tensor, at: tuple[int, int]) -> Tensor:
        first, last = shares[at[1]]
        return tensor[first:last]

    write(tmp_path / "even", tensors, name, [[0, 1, 2, 3]], [Replicate(), Shard(0)], lambda t, at: t[at[1] : at[1] + 1])
    source = open_fsdp(tmp_path / "even", model, read_geometry(model))
    assert torch.equal(source.read(name, 0, 4), tensors[name])
    write(tmp_path / "wrong", tensors, name, [[0, 1, 2, 3]], [Replicate(), Shard(0)], local)
    with pytest.raises(ConfigError, match=r"has local shape \(2, 64\); its placements .* give \(1, 64\)"):
        open_fsdp(tmp_path / "wrong", model, read_geometry(model))


@pytest.mark.parametrize(
    ("placed", "local", "message"),
    [
        ([Partial(), Replicate()], lambda t, at: t, r"placement P.* is not supported"),
        ([Shard(0), Replicate()], lambda t, at: t[:60], r"has local shape \(60, 64\)"),
        ([_StridedShard(0, split_factor=3), Replicate()], lambda t, at: t[:64], "does not divide 128 rows evenly"),
    ],
)
def test_what_is_refused(
    hf_model: Get, tmp_path: Path, placed: Sequence[Placement], local: Local, message: str
) -> None:
    model, tensors, _ = hf_model("llama")
    write(tmp_path / "fsdp", tensors, PROJECTION, [[0, 1], [2, 3]], placed, local)
    with pytest.raises(ConfigError, match=message):
        open_fsdp(tmp_path / "fsdp", model, read_geometry(model))


def test_tensors_are_found_in_their_file_whatever_their_storage(tmp_path: Path) -> None:
    """Views, shared storages, columns, scalars and nothing: what torch.load gives is what is read at the offset."""
    base = torch.arange(60.0).view(6, 10)
    tensors = {
        "whole": base,
        "shared": base[2:5],
        "columns": base[:, 3:7],
        "transposed": base.t(),
        "half": torch.randn(7, 3).bfloat16(),
        "vector": torch.arange(5),
        "empty": torch.empty(0, 4),
    }
    torch.save(tensors, tmp_path / "x.pt")
    found = locate(tmp_path / "x.pt")
    for name, expected in torch.load(tmp_path / "x.pt").items():
        everything = tuple(slice(0, size) for size in expected.shape)
        inner = tuple(slice(size // 3, size - size // 4) for size in expected.shape)
        for inside in (everything, inner):
            part = read(tmp_path / "x.pt", found[name], inside)
            assert part.dtype == expected.dtype and torch.equal(part, expected[inside]), name
