"""Merge FSDP shards by placement: meshes with any rank order, uneven and empty shards, strided shards, and invalid placements."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlhf_mcore.bridge.files.formats.foreign_tensors import _read_mesh
from rlhf_mcore.bridge.files.formats.fsdp import open_fsdp
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
    """Write a checkpoint. Every rank holds all tensors whole, except ``name``, whose shard ``local`` computes from its
    place in the mesh.
    """
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
    """Tensor parallelism splits first, then FSDP splits each part. Rank (f, t) holds part f of part t."""
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
    """A router has fewer rows than ranks, and torch.chunk gives the last ranks no row."""
    model, tensors, _ = hf_model("qwen3_moe")
    name, shares = "model.layers.0.mlp.gate.weight", [(0, 2), (2, 4), (4, 4), (4, 4)]  # 4 rows over 3 of 4 places

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


def mesh_state(form: str) -> dict[str, object]:
    """Return the state of a mesh of 2 x 2 ranks, as releases of torch write it."""
    ranks = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    if form == "a tensor":
        return {"mesh": ranks}
    layout = {
        "one layout": SimpleNamespace(shape=(2, 2), stride=(2, 1)),
        "a layout for each dimension": SimpleNamespace(
            axes=(SimpleNamespace(shape=(2,), stride=(2,)), SimpleNamespace(shape=(2,), stride=(1,)))
        ),
    }[form]
    return {"_rank_map": ranks.flatten(), "_layout": layout}


@pytest.mark.parametrize("form", ["a tensor", "one layout", "a layout for each dimension"])
def test_a_mesh_is_read_in_the_form_of_every_release(form: str) -> None:
    assert _read_mesh(mesh_state(form)).tolist() == [[3, 1], [0, 2]]


def test_names_of_classes_before_torch_2_5_are_read(hf_model: Get, tmp_path: Path) -> None:
    model, tensors, _ = hf_model("llama")
    write(tmp_path / "fsdp", tensors, PROJECTION, *CASES["rows by columns"])
    for path in (tmp_path / "fsdp").glob("model_*.pt"):
        with zipfile.ZipFile(path) as archive:
            records = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in records.items():
                for new, old in (
                    (b"ctorch.distributed.tensor\nDTensor\n", b"ctorch.distributed._tensor.api\nDTensor\n"),
                    (b"torch.distributed.tensor.placement_types\n", b"torch.distributed._tensor.placement_types\n"),
                    (b"torch.distributed.tensor._dtensor_spec\nD", b"torch.distributed._tensor.placement_types\nD"),
                    (b"torch.distributed.tensor._dtensor_spec\nT", b"torch.distributed._tensor.placement_types\nT"),
                ):
                    assert not name.endswith("data.pkl") or new in data, (new, data)
                    data = data.replace(new, old) if name.endswith("data.pkl") else data
                archive.writestr(name, data)
    assert_merged(tmp_path / "fsdp", model, tensors, PROJECTION)
