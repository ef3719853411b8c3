"""Compare experts in mxfp4 with transformers' dequantised experts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rlhf_mcore.bridge.files.dequantise import dequantise_mxfp4 as dequantise
from rlhf_mcore.bridge.files.hf_files import HFReader, copy_companions, load
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import LocalParameter
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.readers.model_files import inspect_model, read_geometry
from tests.distributed.models import make, pack
from tests.messages import expect_error
from tests.trainer_layout import stage_names

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    make("gpt_oss", directory, num_hidden_layers=2)
    pack(directory)
    return directory


@pytest.fixture(scope="module")
def expected_tensors(packed_model: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of transformers' model."""
    stored = load_file(packed_model / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        stored[name] = convert_moe_packed_tensors(stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales"))
    return stored


def test_every_byte_at_every_exponent_has_the_bits_that_transformers_gives_it() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).repeat(1, 1, 16)
    found, known = dequantise(blocks, scales), convert_moe_packed_tensors(blocks, scales)
    assert found.dtype == torch.bfloat16 and found.shape == known.shape == (1, 512, 256)
    assert torch.equal(found.contiguous().view(torch.int16), known.view(torch.int16))
    # By hand: 0x72 is 1 and then 6. The exponent 127 is 2^0, and 126 is 1/2.
    assert found[0, 2 * 0x72 : 2 * 0x72 + 2, 127].tolist() == [1.0, 6.0]
    assert found[0, 2 * 0x72 : 2 * 0x72 + 2, 126].tolist() == [0.5, 3.0]


def test_any_rectangle_is_read_as_if_it_had_been_stored_in_bf16(
    packed_model: Path, expected_tensors: dict[str, torch.Tensor]
) -> None:
    reader = HFReader(packed_model)
    reader.check_index()
    assert reader.names == expected_tensors.keys() == hf_shapes(read_geometry(packed_model)).keys()
    assert {name: reader.shape(name) for name in reader.names} == {
        n: tuple(t.shape) for n, t in expected_tensors.items()
    }
    assert reader.dtype(GATE_UP) == "BF16" and reader.shard(GATE_UP) == "model.safetensors"
    for name, tensor in reader.tensors():
        assert torch.equal(tensor, expected_tensors[name]), name
    for where in (
        (slice(1, 2), slice(0, 64), slice(0, 192)),
        (slice(0, 4), slice(5, 6), slice(3, 100)),
        (slice(3, 4), slice(31, 33), slice(0, 1)),
        (slice(2, 4), slice(32, 64), slice(190, 192)),
    ):
        assert torch.equal(reader.read(GATE_UP, where), expected_tensors[GATE_UP][where])


@pytest.mark.parametrize("fused", [False, True])
def test_every_rank_loads_its_experts(
    packed_model: Path, expected_tensors: dict[str, torch.Tensor], fused: bool
) -> None:
    geometry = read_geometry(packed_model)
    layout = ParallelLayout(4, tp=2, pp=2, ep=2, etp=1, sequence_parallel=True)
    names = stage_names(geometry, layout, fused=fused)
    for rank in range(4):
        stage = layout.coordinates(rank)["pp"]
        experts = [name for name in names[stage] if ".experts." in name]
        shards = {name: layout.shard_of(name, rank) for name in experts}
        held = {name: pieces(name, geometry, shards[name]) for name in experts}
        parameters = [
            LocalParameter(name, torch.full((held[name][0].numel,), torch.nan), shards[name]) for name in experts
        ]
        load(parameters, geometry, HFReader(packed_model))
        for parameter in parameters:
            (piece,) = held[parameter.name]
            assert torch.equal(view(parameter.tensor, piece), expected_tensors[piece.hf_name][piece.slices].float())


def test_what_is_written_is_not_quantised(packed_model: Path, tmp_path: Path) -> None:
    copy_companions([packed_model], tmp_path, torch.bfloat16)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and "quantization_config" not in written


def test_the_weights_of_config_json_are_looked_for_as_they_are_stored(packed_model: Path, tmp_path: Path) -> None:
    assert inspect_model(str(packed_model), "model.path") == (read_geometry(packed_model), [])
    stored = load_file(packed_model / "model.safetensors")
    first = GATE_UP.replace(".1.", ".0.")
    stored[f"{first}_scales"] = stored[f"{first}_scales"][:3].contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((packed_model / "config.json").read_text())
    _, (problem,) = inspect_model(str(tmp_path), "model.path")
    assert f"{first}_scales is [3, 256, 2], but config.json requires [4, 256, 2]" in problem
    with expect_error(ConfigError, field=first, value="[4, 256, 2, 16]"):
        HFReader(tmp_path).shape(first)
