"""Writing a Hugging Face directory through the planner: one rank here, many in the distributed tier."""

from __future__ import annotations

import json
import os
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.models import Model, trainer_layout
from rlhf_mcore.bridge.files import tensor_files
from rlhf_mcore.bridge.files.carried import CarriedTensors
from rlhf_mcore.bridge.files.export import Exporter, assembled_bytes, parts_of, plan_parts
from rlhf_mcore.bridge.files.hf_files import INDEX, SINGLE
from rlhf_mcore.bridge.files.tensor_files import cut_into_shards
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.geometry import LocalParameter, Shard
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.platform import current_platform
from rlhf_mcore.readers.model_files import read_geometry
from tests.commands import ROOT
from tests.difference import first_difference
from tests.late_device import LateCuda
from tests.trainer_layout import stage_names, trainer_places
from tests.unit.bridge.geometry import hf_tensors, mcore_tensors
from tests.unit.bridge.sources import Averages
from tests.unit.bridge.test_transfer import GEOMETRY


def test_a_layers_experts_in_one_tensor_are_never_in_memory_together() -> None:
    """gpt-oss-120b on 64 ranks: 128 experts of 2880 x 5760 in bf16 are 4.2 GB, and a bucket of 256 MiB is eight of them."""
    geometry = read_geometry(ROOT / "configs" / "models" / "gpt-oss-120b")
    layout = trainer_layout(Model("gpt-oss-120b", geometry), 64, tp=4, pp=2, ep=8)
    held = trainer_places(stage_names(geometry, layout, fused=True), geometry, layout)
    sizes = {name: 2 * prod(shape) for name, shape in hf_shapes(geometry).items()}
    assert max(sizes.values()) == 128 * 2880 * 5760 * 2
    writers = {name: shard.rank for shard in cut_into_shards(sizes, 64, 4 * 2**30) for name in shard.tensors}
    bucket = 256 * 2**20
    parts = {n: list(parts_of(n, n, torch.bfloat16, shape, bucket)) for n, shape in hf_shapes(geometry).items()}
    plan = plan_parts(held, parts, writers, bucket)
    for rank in sorted(set(writers.values()))[::7]:
        mine = {part.name: part for name, tensor in parts.items() if writers[name] == rank for part in tensor}
        most = assembled_bytes(plan.rank_view(rank), mine)
        assert 0 < most <= bucket


def float_tensors() -> dict[str, torch.Tensor]:
    return {name: tensor.float() for name, tensor in hf_tensors(GEOMETRY).items()}


def exporter(hf: dict[str, torch.Tensor], source: Path, **settings: int) -> Exporter:
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text('{"dtype": "bfloat16"}')
    parameters = [LocalParameter(name, t, Shard(0, 1)) for name, t in mcore_tensors(GEOMETRY, hf, 0, 1).items()]
    return Exporter(parameters, GEOMETRY, [str(source)], world_group(), **{"bucket_bytes": 100, **settings})


def test_tensors_share_files_up_to_the_limit_and_ranks_share_the_bytes() -> None:
    sizes = {"a": 40, "b": 40, "c": 40, "large": 200, "d": 10}
    shards = cut_into_shards(sizes, num_ranks=2, shard_bytes=100)
    assert [shard.tensors for shard in shards] == [("a", "b"), ("c",), ("large",), ("d",)]
    assert [shard.name for shard in shards] == [f"model-0000{k}-of-00004.safetensors" for k in (1, 2, 3, 4)]
    # 200 to rank 0; then 80, 40 and 10, all to rank 1, which stays behind.
    assert [shard.rank for shard in shards] == [1, 1, 0, 1]
    assert [(s.name, s.rank) for s in cut_into_shards(sizes, 4, 1000)] == [(SINGLE, 0)]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("shard_bytes", [10**9, 1000])
def test_what_is_written_is_what_was_held(tmp_path: Path, shard_bytes: int) -> None:
    hf = float_tensors()
    target = tmp_path / "run" / "actor"
    made = exporter(hf, tmp_path / "source", shard_bytes=shard_bytes)
    paths = made.write(target)
    assert sorted(paths) == sorted(target.iterdir())
    files = {p.name: load_file(p) for p in target.glob("*.safetensors")}
    if shard_bytes == 1000:
        index = json.loads((target / INDEX).read_text())
        assert index["weight_map"] == {name: file for file, held in files.items() for name in held}
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in hf.values())
        assert len(files) > 2
    else:
        assert {p.name for p in target.iterdir()} == {"config.json", SINGLE}
    written = {name: tensor for held in files.values() for name, tensor in held.items()}
    assert written.keys() == hf.keys() and all(torch.equal(written[name], hf[name]) for name in hf)
    for name in files:
        with safe_open(target / name, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    assert json.loads((target / "config.json").read_text()) == {"dtype": "float32"}
    small = sum((target / name).stat().st_size for name in (INDEX, "config.json") if (target / name).exists())
    copied = len('{"dtype": "bfloat16"}')
    assert made.num_bytes == sum(p.stat().st_size for p in target.iterdir()) - small + copied


@pytest.mark.usefixtures("world")
def test_files_that_cannot_be_written_are_an_error_and_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = exporter(float_tensors(), tmp_path / "source", shard_bytes=1000)

    def full(file: int, data: object, offset: int) -> None:
        raise OSError(28, "No space left on device")

    held = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(tensor_files, "write_at", full)
    with pytest.raises(OSError, match="No space left"):
        made.write(tmp_path / "actor")
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", lambda file: full(file, b"", 0))
    with pytest.raises(OSError, match="No space left"):
        made.write(tmp_path / "actor")
    assert len(os.listdir("/proc/self/fd")) == held, "a run that continues keeps no file open"


@pytest.mark.usefixtures("world")
def test_a_snapshot_is_what_was_there_when_it_was_taken(tmp_path: Path, late_cuda: LateCuda) -> None:
    hf = float_tensors()
    parameters = [LocalParameter(name, t, Shard(0, 1)) for name, t in mcore_tensors(GEOMETRY, hf, 0, 1).items()]
    (tmp_path / "config.json").write_text("{}")
    made = Exporter(parameters, GEOMETRY, [str(tmp_path)], world_group(), bucket_bytes=100, shard_bytes=1000)
    target = tmp_path / "actor"
    target.mkdir()
    images, copy_rest = made.snapshot()
    copy_rest()
    for parameter in parameters:  # the optimizer goes on
        parameter.tensor.zero_()
    current_platform().synchronize()
    # Not a byte more than the files hold is pinned.
    assert sorted(late_cuda.pinned.values()) == sorted(image.layout.body_bytes for image in images)
    assert late_cuda.pinned_bytes == sum(tensor.nbytes for tensor in hf.values())
    written: dict[str, torch.Tensor] = {}
    for image in images:
        written |= load_file(image.write(target))
    assert written.keys() == hf.keys() and all(torch.equal(written[name], hf[name]) for name in hf)
    assert {path.name for path in made.write_rest(target)} == {INDEX, "config.json"}
    bodies = [image.body.data_ptr() for image in images]
    again, copy_rest = made.snapshot()
    copy_rest()
    current_platform().synchronize()
    assert [image.body.data_ptr() for image in again] == bodies, "memory is kept"
    assert all(not image.body.any() for image in again)


@pytest.mark.usefixtures("world")
def test_what_is_made_for_the_files_is_written_instead_of_the_tensors(tmp_path: Path) -> None:
    """The mean of two models, in the dtype of the parameters, which hold no values themselves."""
    one = float_tensors()
    other = {name: tensor * 3 for name, tensor in one.items()}
    held = [mcore_tensors(GEOMETRY, hf, 0, 1) for hf in (one, other)]
    parameters = [LocalParameter(n, torch.empty_like(t, device="meta"), Shard(0, 1)) for n, t in held[0].items()]
    (tmp_path / "config.json").write_text("{}")
    averages = Averages(*held)
    made = Exporter(parameters, GEOMETRY, [str(tmp_path)], world_group(), bucket_bytes=100, sources=averages)
    made.write(tmp_path / "actor")
    written = load_file(tmp_path / "actor" / SINGLE)
    assert written.keys() == one.keys() and all(torch.equal(written[name], one[name] * 2) for name in one)
    assert averages.most_open and not averages.open_buckets


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("in_background", [False, True])
def test_mtp_layers_are_in_every_saved_directory_bit_for_bit(tmp_path: Path, in_background: bool) -> None:
    hf, source, target = float_tensors(), tmp_path / "source", tmp_path / "actor"
    layer = f"model.layers.{GEOMETRY.num_layers}."
    mtp = {layer + "eh_proj.weight": torch.randn(300, 7).bfloat16(), layer + "enorm.weight": torch.randn(5).half()}
    source.mkdir()
    save_file({**hf, **mtp, "model.layers.99.unknown": torch.ones(1)}, source / SINGLE)
    config = {"dtype": "float32", "num_hidden_layers": GEOMETRY.num_layers, "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    carried = CarriedTensors(source)
    assert carried.text("actor") == (
        f"actor: the MTP layers of {source} (2 tensors, 4.21e-06 GB) are not trained; checkpoints contain unchanged copies"
    )
    parameters = [LocalParameter(name, t, Shard(0, 1)) for name, t in mcore_tensors(GEOMETRY, hf, 0, 1).items()]
    made = Exporter(parameters, GEOMETRY, [str(source)], world_group(), bucket_bytes=100, carried=carried)
    if in_background:
        target.mkdir()
        images, copy_rest = made.snapshot()
        copy_rest()
        paths = [*(image.write(target) for image in images), *made.write_rest(target)]
    else:
        paths = made.write(target)
    assert sorted(paths) == sorted(target.iterdir())
    index = json.loads((target / INDEX).read_text())["weight_map"]
    files = {path.name: load_file(path) for path in target.glob("*.safetensors")}
    assert index == {name: file for file, held in files.items() for name in held}
    assert [set(mtp) <= set(held) or not set(mtp) & set(held) for held in files.values()] == [True, True]
    assert first_difference({k: v for held in files.values() for k, v in held.items()}, hf | mtp) == ""
    assert json.loads((target / "config.json").read_text()) == config
    assert made.num_bytes == sum(p.stat().st_size for p in target.glob("*.safetensors")) + len(json.dumps(config))
    save_file({**hf, **{name: tensor[:3] for name, tensor in mtp.items()}}, source / SINGLE)
    with pytest.raises(OSError, match="has changed since the run started"):
        made.write_rest(target)


def test_a_config_json_that_names_mtp_layers_without_tensors_is_corrected(tmp_path: Path) -> None:
    """transformers saves such directories: it reads models without these layers."""
    save_file(float_tensors(), tmp_path / SINGLE)
    config = {"num_hidden_layers": GEOMETRY.num_layers, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    carried = CarriedTensors(tmp_path)
    assert carried.config_updates == {"num_nextn_predict_layers": 0} and not carried.types
