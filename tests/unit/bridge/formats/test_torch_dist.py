"""Read the forms of Megatron-core's checkpoints: layers and experts stacked or separate, gate and up separate, wrappers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from rlhf_mcore.bridge.files.formats.source import HFSource
from rlhf_mcore.bridge.files.formats.torch_dist import open_torch_dist
from rlhf_mcore.bridge.files.formats.torch_dist_writer import TorchDistWriter, targets
from rlhf_mcore.bridge.map.rules import parameter_names
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.model_files import read_geometry
from tests.messages import expect_error
from tests.unit.bridge.formats.conftest import HFModel
from tests.unit.bridge.geometry import mcore_tensors

Get = Callable[[str], HFModel]


def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Save with torch's own distributed checkpoint, from one process."""
    dcp.save(dict(tensors), checkpoint_id=directory, no_dist=True)


def read_all(directory: Path, model: Path, geometry: ModelGeometry) -> dict[str, Tensor]:
    source = open_torch_dist(directory, model, geometry)
    return {name: source.read(name, 0, shape[0]) for name, (_, shape) in source.types.items()}


def fuse(geometry: ModelGeometry, hf: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Build Megatron's tensors of a dense model slowly, independently of the rules."""
    tensors = mcore_tensors(geometry, dict(hf), 0, 1)
    if geometry.tied_embeddings:
        del tensors["output_layer.weight"]
    return tensors


def stack_layers(geometry: ModelGeometry, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: t for name, t in tensors.items() if not name.startswith("decoder.layers.")}
    prefix = "decoder.layers.0."
    for name in [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]:
        layers = [tensors[f"decoder.layers.{i}.{name}"] for i in range(geometry.num_layers)]
        found[f"decoder.layers.{name}"] = torch.stack(layers)
    return found


def gate_and_up_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if "linear_fc1.weight" not in name}
    for name in tensors.keys() - found.keys():
        found[f"{name}_w"], found[f"{name}_v"] = (half.clone() for half in tensors[name].chunk(2))
    return found


def with_junk(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add padding of the vocabulary, a wrapper's prefix and optimizer state."""
    found = {f"module.{name}": tensor for name, tensor in tensors.items()}
    table = found["module.embedding.word_embeddings.weight"]
    found["module.embedding.word_embeddings.weight"] = torch.cat([table, torch.full((31, table.shape[1]), torch.nan)])
    for prefix in ("", "chained_0."):  # models with experts have several optimizers
        found[f"{prefix}optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(64)
    return found


FORMS: dict[str, Callable[[ModelGeometry, Mapping[str, Tensor]], Mapping[str, Tensor]]] = {
    "stacked": stack_layers,
    "apart": lambda geometry, tensors: tensors,
    "gate and up apart": lambda geometry, tensors: gate_and_up_apart(tensors),
    "junk": lambda geometry, tensors: with_junk(stack_layers(geometry, tensors)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_dense_models(hf_model: Get, tmp_path: Path, name: str, form: str) -> None:
    model, expected, _ = hf_model(name)
    geometry = read_geometry(model)
    save(tmp_path / "m", FORMS[form](geometry, fuse(geometry, expected)))
    found = read_all(tmp_path / "m", model, geometry)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("apart", [True, False])
def test_experts(hf_model: Get, tmp_path: Path, apart: bool) -> None:
    """The expected tensors are built by hand from the Hugging Face tensors of each expert."""
    model, expected, _ = hf_model("mixtral")
    geometry = read_geometry(model)
    dense = replace(geometry, family="llama", experts=None)
    stand_in = {
        f"model.layers.{i}.mlp.{x}_proj.weight": torch.zeros(192, 64) for i in range(4) for x in ("gate", "up", "down")
    }
    stand_in |= {name: tensor.t() for name, tensor in stand_in.items() if "down" in name}
    tensors = {
        n: t for n, t in fuse(dense, {**expected, **stand_in}).items() if ".mlp.linear_fc" not in n or "norm" in n
    }
    for i in range(geometry.num_layers):
        hf, megatron = f"model.layers.{i}.block_sparse_moe.", f"decoder.layers.{i}.mlp."
        tensors[f"{megatron}router.weight"] = expected[f"{hf}gate.weight"]
        parts = [[expected[f"{hf}experts.{e}.{w}.weight"] for w in ("w1", "w3", "w2")] for e in range(4)]
        first, second = [torch.cat([w1, w3]) for w1, w3, _ in parts], [w2 for _, _, w2 in parts]
        for linear, experts in (("linear_fc1", first), ("linear_fc2", second)):
            if apart:
                tensors |= {
                    f"{megatron}experts.experts.{e}.{linear}.weight": tensor for e, tensor in enumerate(experts)
                }
            else:
                tensors[f"{megatron}experts.experts.{linear}.weight"] = torch.stack(experts)
    save(tmp_path / "m", tensors if apart else stack_layers(geometry, tensors))
    found = read_all(tmp_path / "m", model, geometry)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe_mixed", pytest.param("gpt_oss", marks=pytest.mark.full)])
def test_torch_itself_reads_what_is_written_and_finds_megatrons_tensors(
    hf_model: Get, tmp_path: Path, name: str
) -> None:
    """torch.distributed.checkpoint reads every element of every Megatron tensor. Blocks have a few rows."""
    model, expected, _ = hf_model(name)
    geometry = read_geometry(model)
    source = HFSource(model, model)
    writer = TorchDistWriter(tmp_path, geometry, source.types, block_bytes=3000, file_bytes=100_000)
    writer.write(source.read)
    index = pickle.loads((tmp_path / ".metadata").read_bytes())
    empty = {
        key: torch.full(found.size, torch.nan)
        for key, found in index.state_dict_metadata.items()
        if hasattr(found, "chunks")
    }
    dcp.load(empty, checkpoint_id=tmp_path, no_dist=True)
    assert not any(tensor.isnan().any() for tensor in empty.values())
    assert {target.key for target in targets(geometry)} == set(empty)
    assert [target.parameter for target in targets(geometry)] == parameter_names(geometry)
    if not geometry.num_experts:
        apart = fuse(geometry, expected)
        for target in targets(geometry):
            local = apart[local_name(target.parameter)]
            held = empty[target.key][target.lead]
            assert torch.equal(held[: len(local)], local) and not held[len(local) :].any()
    if name == "gpt_oss":
        check_experts_of_one_tensor(empty, expected)
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def check_experts_of_one_tensor(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check experts in one tensor.

    Megatron multiplies with [outputs, inputs] and splits the product in two halves, gate first.
    """
    for layer in range(4):
        hf = f"model.layers.{layer}.mlp.experts."
        weight, bias = expected[hf + "gate_up_proj"], expected[hf + "gate_up_proj_bias"]
        parts = {
            "linear_fc1.weight": torch.cat([weight[..., 0::2], weight[..., 1::2]], dim=-1).transpose(1, 2),
            "linear_fc1.bias": torch.cat([bias[..., 0::2], bias[..., 1::2]], dim=-1),
            "linear_fc2.weight": expected[hf + "down_proj"].transpose(1, 2),
            "linear_fc2.bias": expected[hf + "down_proj_bias"],
        }
        for key, tensor in parts.items():
            assert torch.equal(found[f"decoder.layers.mlp.experts.experts.{key}"][layer], tensor), key


def local_name(parameter: str) -> str:
    """Return the local name of a norm in the layer spec without Transformer Engine."""
    parameter = parameter.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return parameter.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")


def test_parts_of_one_parameter_in_two_dtypes_are_refused(hf_model: Get, tmp_path: Path) -> None:
    model, _, _ = hf_model("llama")
    source = HFSource(model, model)
    types = {n: (torch.bfloat16 if "k_proj" in n else dtype, shape) for n, (dtype, shape) in source.types.items()}
    writer = TorchDistWriter(tmp_path, read_geometry(model), types, block_bytes=3000, file_bytes=10**9)
    with expect_error(
        ConfigError, field="decoder.layers.0.self_attention.linear_qkv.weight", value="2 dtypes", remedy="--dtype"
    ):
        writer.write(source.read)
