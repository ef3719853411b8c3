"""Compare PEFT's model of our adapter directories with W + scale B A, written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.files.formats.source import AdaptedSource
from rlhf_mcore.bridge.files.hf_files import adapter_config, open_adapters
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from rlhf_mcore.readers.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rlhf_mcore.readers.model_files import read_geometry
from tests import beside
from tests.distributed import models
from tests.distributed.setting import load_hf

pytestmark = beside.needs("peft", "accelerate")
TOKENS = torch.arange(1, 25).view(2, 12)


def write(directory: Path, geometry: ModelGeometry, base: Path) -> dict[str, Tensor]:
    """Write random adapters as a checkpoint does."""
    directory.mkdir()
    torch.manual_seed(3)
    tensors = {name: 0.1 * torch.randn(shape) for name, shape in hf_shapes(geometry).items()}
    save_file(tensors, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(geometry, str(base))))
    return tensors


def with_products(hf: Any, tensors: dict[str, Tensor], scale: float) -> Any:
    """Add scale B A to the weights of a transformers model, which stores the experts of a layer in one tensor."""

    def product(module: str) -> Tensor:
        if module == "model.embed_tokens":
            a, b = (tensors[f"base_model.model.{module}.lora_embedding_{side}"] for side in "AB")
            return scale * (b @ a).t()
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        return scale * (b @ a)

    with torch.no_grad():
        for name, weight in hf.named_parameters():
            head, _, last = name.rpartition(".")
            if {f"base_model.model.{head}.lora_A.weight", f"base_model.model.{head}.lora_embedding_A"} & tensors.keys():
                weight += product(head)
            elif head.endswith(".experts"):
                parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
                for expert, matrix in enumerate(weight):
                    matrix += torch.cat([product(f"{head}.{expert}.{part}") for part in parts])
    return hf


@pytest.mark.parametrize(("name", "use_rslora"), [("qwen3", False), ("qwen3_moe", True), ("phi3", False)])
def test_peft_computes_with_what_was_trained(tmp_path: Path, name: str, use_rslora: bool) -> None:
    """This includes experts, which PEFT combines in one adapter per layer."""
    models.make(name, base := tmp_path / "base")
    sizes = AdapterSizes(3, 12.0, ("all-linear",), use_rslora)
    tensors = write(tmp_path / "adapter", replace(read_geometry(base), adapter=sizes), base)
    model = beside.peft().PeftModel.from_pretrained(load_hf(base), str(tmp_path / "adapter"))
    with torch.no_grad():
        plain = load_hf(base)(TOKENS).logits
        expected = with_products(load_hf(base), tensors, 12 / (3**0.5 if use_rslora else 3))(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=2e-5)
    assert (plain - expected).abs().max() > 0.1


def test_peft_finds_modules_whose_names_in_files_differ(tmp_path: Path) -> None:
    models.make("nemotron_h_dense", base := tmp_path / "base")
    sizes = AdapterSizes(3, 12.0, ("down_proj", "in_proj", "o_proj", "q_proj"))
    geometry = replace(read_geometry(base), adapter=sizes)
    tensors = write(tmp_path / "adapter", geometry, base)
    model = beside.peft().PeftModel.from_pretrained(load_hf(base), str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = with_products(load_hf(base), tensors, 12 / 3)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=2e-5)
        assert (expected - load_hf(base)(TOKENS).logits).abs().max() > 0.1
    assert open_adapters(tmp_path / "adapter", read_geometry(base))[1] == geometry


def test_adapters_of_both_ends_go_to_peft_and_come_back(tmp_path: Path) -> None:
    """PEFT saves the weights of the embedding and the output layer in addition to their adapters."""
    models.make("qwen3", base := tmp_path / "base")
    geometry = read_geometry(base)
    sizes = AdapterSizes(3, 12.0, ("embed_tokens", "lm_head", "q_proj"))
    tensors = write(tmp_path / "adapter", replace(geometry, adapter=sizes), base)
    model = beside.peft().PeftModel.from_pretrained(load_hf(base), str(tmp_path / "adapter"))
    with torch.no_grad():
        expected = with_products(load_hf(base), tensors, 4.0)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=2e-5)
    model.save_pretrained(str(tmp_path / "again"), save_embedding_layers=True)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(tmp_path / "again" / ADAPTER_WEIGHTS)
    reader, read = open_adapters(tmp_path / "again", geometry)
    assert hf_shapes(read) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert all(torch.equal(reader.read(name, (slice(None),) * 2), tensor) for name, tensor in tensors.items())
    merged, source = model.merge_and_unload().state_dict(), AdaptedSource(tmp_path / "again", base, geometry)
    for name, (_, shape) in source.types.items():
        assert torch.equal(source.read(name, 0, shape[0]), merged[name]), name


def test_magnitudes_go_to_peft_and_come_back_and_are_merged_as_there(tmp_path: Path) -> None:
    """The model has biases, which magnitudes do not scale."""
    models.make("qwen2", base := tmp_path / "base")
    geometry, saved = read_geometry(base), load_file(base / "model.safetensors")
    adapters = replace(geometry, adapter=AdapterSizes(3, 12.0, ("q_proj", "o_proj", "down_proj"), use_dora=True))
    tensors = write(tmp_path / "adapter", adapters, base)
    for key in (key for key in tensors if "magnitude" in key):
        weight = saved[f"{key.removeprefix('base_model.model.').partition('.lora_')[0]}.weight"]
        tensors[key] = weight.norm(dim=1) * (1 + tensors[key])
    save_file(tensors, tmp_path / "adapter" / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    model = beside.peft().PeftModel.from_pretrained(load_hf(base), str(tmp_path / "adapter"))
    with torch.no_grad():
        assert (model(TOKENS).logits - load_hf(base)(TOKENS).logits).abs().max() > 0.01
    model.save_pretrained(str(tmp_path / "again"))
    reader, read = open_adapters(tmp_path / "again", geometry)
    assert read.adapter == adapters.adapter or read.adapter == replace(adapters.adapter, targets=read.adapter.targets)
    assert all(torch.equal(reader.read(key, (slice(None),) * tensor.dim()), tensor) for key, tensor in tensors.items())
    merged, source = model.merge_and_unload().state_dict(), AdaptedSource(tmp_path / "again", base, geometry)
    for key, (_, shape) in source.types.items():
        assert torch.equal(source.read(key, 0, shape[0]), merged[key]), key
