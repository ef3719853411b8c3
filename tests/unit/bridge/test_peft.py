"""What PEFT makes of a directory of adapters that is written here. Expected values are W + scale B A, written out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_config
from rlhf_mcore.config.model_files import read_geometry
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry
from tests.distributed import models
from tests.distributed.setting import load_hf

peft = pytest.importorskip("peft")
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
    """Add scale B A to the weights of a model of transformers, which has the experts of a layer in one tensor."""

    def product(module: str) -> Tensor:
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        return scale * (b @ a)

    with torch.no_grad():
        for name, weight in hf.named_parameters():
            head, _, last = name.rpartition(".")
            if f"base_model.model.{head}.lora_A.weight" in tensors:
                weight += product(head)
            elif head.endswith(".experts"):
                parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[last]
                for expert, matrix in enumerate(weight):
                    matrix += torch.cat([product(f"{head}.{expert}.{part}") for part in parts])
    return hf


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_peft_computes_with_what_was_trained(tmp_path: Path, name: str, use_rslora: bool) -> None:
    """Also with experts, which PEFT joins in one adapter of a layer."""
    models.make(name, base := tmp_path / "base")
    sizes = AdapterSizes(3, 12.0, ("all-linear",), use_rslora)
    tensors = write(tmp_path / "adapter", replace(read_geometry(base), adapter=sizes), base)
    model = peft.PeftModel.from_pretrained(load_hf(base), str(tmp_path / "adapter"))
    with torch.no_grad():
        plain = load_hf(base)(TOKENS).logits
        expected = with_products(load_hf(base), tensors, 12 / (3**0.5 if use_rslora else 3))(TOKENS).logits
        torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=2e-5)
    assert (plain - expected).abs().max() > 0.1
