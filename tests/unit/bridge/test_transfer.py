"""Load for simulated ranks, and gather in a world of one. tests/distributed gathers over real ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mcore.bridge.files.gather import GatherBridge, Gatherer
from rlhf_mcore.bridge.files.hf_files import HFReader, load
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import LocalParameter, ModelGeometry, Shard
from tests.messages import expect_error
from tests.unit.bridge.geometry import GEOMETRY, hf_tensors, mcore_tensors


def write(directory: Path, tensors: dict[str, Tensor]) -> HFReader:
    directory.mkdir(exist_ok=True)
    tensors = {name: t.float() if t.dtype == torch.float64 else t for name, t in tensors.items()}  # hf_tensors
    save_file(tensors, directory / "model.safetensors")
    return HFReader(directory)


def garbage(tensors: dict[str, Tensor], shard: Shard) -> list[LocalParameter]:
    """Return parameters as before loading: allocated and undefined."""
    return [LocalParameter(name, torch.full_like(t, float("nan")), shard) for name, t in tensors.items()]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_reads_its_part_and_padding_is_zero(tmp_path: Path, family: str, tp: int, tied: bool) -> None:
    geometry = replace(GEOMETRY, family=family, tied_embeddings=tied)
    hf = hf_tensors(geometry)
    reader = write(tmp_path, hf)
    for rank in range(tp):
        expected = mcore_tensors(geometry, hf, rank, tp)
        parameters = garbage(expected, Shard(rank, tp))
        load(parameters, geometry, reader)
        for parameter in parameters:
            assert torch.equal(parameter.tensor, expected[parameter.name]), parameter.name


@pytest.mark.parametrize("head", ["token", "sequence"])
def test_a_scalar_head_is_read_or_begins_at_zero_on_a_language_model(tmp_path: Path, head: str) -> None:
    geometry = replace(GEOMETRY, head=head)
    language_model, scorer = hf_tensors(replace(GEOMETRY, tied_embeddings=True)), hf_tensors(geometry)
    for fresh_head, hf in ((False, scorer), (True, language_model)):
        reader = write(tmp_path / str(fresh_head), hf)
        for rank in range(2):
            parameters = garbage(mcore_tensors(geometry, scorer, rank, 2), Shard(rank, 2))
            load(parameters, geometry, reader, fresh_head=fresh_head)
            expected = mcore_tensors(geometry, {**scorer, **hf}, rank, 2)
            for parameter in parameters:
                fresh = fresh_head and parameter.name.startswith("output_layer.")
                wanted = torch.zeros_like(parameter.tensor) if fresh else expected[parameter.name]
                assert torch.equal(parameter.tensor, wanted), parameter.name


def test_a_head_with_more_than_one_label_is_refused(tmp_path: Path) -> None:
    reader = write(tmp_path, {"score.weight": torch.ones(2, 8)})
    parameter = LocalParameter("output_layer.weight", torch.zeros(1, 8), Shard(0, 1))
    with expect_error(ConfigError, field=("score.weight", "config.json"), value=("(2, 8)", "(1, 8)")):
        load([parameter], replace(GEOMETRY, head="sequence"), reader)


def test_values_are_cast_to_the_dtype_of_the_parameter(tmp_path: Path) -> None:
    reader = write(tmp_path, {"model.norm.weight": torch.tensor([1.0, 2.5, -3.0, 0.1] * 2).bfloat16()})
    parameter = LocalParameter("decoder.final_layernorm.weight", torch.zeros(8), Shard(0, 1))
    filled: list[int] = []
    load([parameter], GEOMETRY, reader, progress=filled.append)
    assert parameter.tensor.dtype == torch.float32 and filled == [32]
    assert parameter.tensor[:4].tolist() == [1.0, 2.5, -3.0, 0.10009765625]


@pytest.mark.parametrize(
    ("value", "dtype", "remedy"),
    [
        (float("nan"), torch.float32, "again"),
        (float("inf"), torch.bfloat16, "again"),
        (1e30, torch.float16, "choose bf16"),  # beyond the range of fp16
    ],
)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, value: float, dtype: torch.dtype, remedy: str) -> None:
    reader = write(tmp_path, {"model.norm.weight": torch.tensor([1.0] * 7 + [value])})
    parameter = LocalParameter("decoder.final_layernorm.weight", torch.zeros(8, dtype=dtype), Shard(0, 1))
    with expect_error(ConfigError, field="model.norm.weight", value=(tmp_path, "not finite"), remedy=remedy):
        load([parameter], GEOMETRY, reader)


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.int8, "I8"),
        (torch.uint8, "U8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.float8_e5m2, "F8_E5M2"),
    ],
)
def test_weights_that_are_not_plain_floats_are_refused(tmp_path: Path, dtype: torch.dtype, named: str) -> None:
    reader = write(tmp_path, {"model.norm.weight": torch.ones(8).to(dtype)})
    parameter = LocalParameter("decoder.final_layernorm.weight", torch.zeros(8), Shard(0, 1))
    with pytest.raises(ConfigError, match=rf"model.norm.weight has dtype {named}, not one of F32, BF16, F16"):
        load([parameter], GEOMETRY, reader)
    assert parameter.tensor.tolist() == [0.0] * 8


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_of_weights_loads_into_every_dtype_of_models(
    tmp_path: Path, stored: torch.dtype, dtype: torch.dtype
) -> None:
    values = [1.0, -2.5, 0.0078125, 96.0] * 2  # exact in all three dtypes
    reader = write(tmp_path, {"model.norm.weight": torch.tensor(values).to(stored)})
    parameter = LocalParameter("decoder.final_layernorm.weight", torch.zeros(8, dtype=dtype), Shard(0, 1))
    load([parameter], GEOMETRY, reader)
    assert parameter.tensor.dtype == dtype
    assert parameter.tensor.tolist() == values


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    reader = write(tmp_path, {"model.norm.weight": torch.ones(9)})
    parameter = LocalParameter("decoder.final_layernorm.weight", torch.zeros(8), Shard(0, 1))
    with expect_error(ConfigError, field=("model.norm.weight", "config.json"), value=("(9,)", "(8,)")):
        load([parameter], GEOMETRY, reader)


def test_a_missing_tensor_is_refused(tmp_path: Path) -> None:
    reader = write(tmp_path, {"model.norm.weight": torch.ones(8)})
    parameter = LocalParameter("output_layer.weight", torch.zeros(13, 8), Shard(0, 1))
    with expect_error(ConfigError, field="lm_head.weight", value="missing"):
        load([parameter], GEOMETRY, reader)


def gatherer(geometry: ModelGeometry, hf: dict[str, Tensor]) -> Gatherer:
    shard = Shard(0, 1)
    parameters = [LocalParameter(name, t, shard) for name, t in mcore_tensors(geometry, hf, 0, 1).items()]
    group = dist.group.WORLD
    assert group is not None
    return Gatherer(parameters, geometry, group, group)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(("head", "tied"), [("lm", False), ("lm", True), ("token", False), ("sequence", False)])
def test_full_tensors_come_back_once_each(family: str, head: str, tied: bool) -> None:
    geometry = replace(GEOMETRY, family=family, tied_embeddings=tied, head=head)
    hf = hf_tensors(geometry)
    source = gatherer(geometry, hf)
    for _ in range(2):  # a gatherer is iterated after every step
        received = list(source)
        assert len(received) == len(hf)
        assert all(torch.equal(tensor, hf[name]) for name, tensor in received)


@pytest.mark.usefixtures("world")
def test_a_sync_hands_every_tensor_and_the_version_to_the_engine() -> None:
    hf = hf_tensors(GEOMETRY)

    class Engine:
        def load_weights(self, weights: object, *, version: int) -> None:
            self.received, self.version = dict(weights), version  # type: ignore[call-overload]

    engine = Engine()
    GatherBridge(gatherer(GEOMETRY, hf), engine).sync(7)  # type: ignore[arg-type]
    assert engine.version == 7 and engine.received.keys() == hf.keys()
    assert all(torch.equal(engine.received[name], hf[name]) for name in hf)
