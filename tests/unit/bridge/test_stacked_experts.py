"""Read the experts of a file that stacks them, as Qwen3.5 is published, like the file that transformers writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.model_files import inspect_model
from tests.distributed.models import make_with_tower

WHOLE = (slice(None), slice(None))
PART = (slice(3, 20), slice(5, None))


def test_stacked_experts_are_read_like_single_experts(tmp_path: Path) -> None:
    model = make_with_tower("qwen3_5_moe", tmp_path)
    geometry, problems = inspect_model(str(tmp_path), "model.path")
    assert problems == [] and geometry is not None
    single = load_file(tmp_path / "model.safetensors")
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    assert inspect_model(str(tmp_path), "model.path") == (geometry, [])
    reader, shapes = HFReader(tmp_path), hf_shapes(geometry)
    assert len(reader.names) < len(shapes) == len(single)
    for name, expected in single.items():
        assert reader.shape(name) == shapes[name] and reader.dtype(name) == "F32"
        assert reader.shard(name) == "model.safetensors"
        if expected.dim() == 2:
            assert torch.equal(reader.read(name, WHOLE), expected)
            assert torch.equal(reader.read(name, PART), expected[PART])


def test_a_stack_with_too_few_experts_is_rejected(tmp_path: Path) -> None:
    model = make_with_tower("qwen3_5_moe", tmp_path)
    tensors = {name: tensor[:3] if ".experts." in name else tensor for name, tensor in model.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    reader = HFReader(tmp_path)
    assert reader.shape("model.language_model.layers.1.mlp.experts.3.up_proj.weight") == ()
    with pytest.raises(ConfigError, match="is missing"):
        reader.shape("model.language_model.layers.9.mlp.experts.0.up_proj.weight")
