"""Converting takes a few blocks of memory, pages mapped from files included, whatever the model and its largest tensor."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf_mcore.bridge.files.formats import convert as core
from rlhf_mcore.bridge.files.formats import torch_dist
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.commands.convert.command import main
from rlhf_mcore.readers.model_files import read_geometry
from tests.unit.bridge.formats.foreign import save_rank

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=40000, hidden_size=512, intermediate_size=2048,
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, rms_norm_eps=1e-5, max_position_embeddings=64,
    tie_word_embeddings=True,
)  # fmt: skip
MODEL_BYTES = 90_000_000
ALLOWED_BYTES = 45_000_000


def peak_growth(function: Callable[[], object]) -> int:
    """By how much the resident set grows at its largest. The kernel's high-water mark is reset first."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    function()
    return resident("VmHWM") - before


def resident(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BLOCK_BYTES", 2 * 2**20)
    monkeypatch.setattr(core, "RELEASE_BYTES", 8 * 2**20)
    monkeypatch.setattr(torch_dist, "CACHE_BYTES", 8 * 2**20)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    shapes = hf_shapes(read_geometry(model))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    assert sum(prod(shape) for shape in shapes.values()) * 2 > MODEL_BYTES
    save_file(tensors, model / "model.safetensors")
    (tmp_path / "fsdp").mkdir()
    for rank in range(2):
        halves = {name: tensor.flatten().chunk(2)[rank].clone() for name, tensor in tensors.items()}
        save_rank(tmp_path / "fsdp", halves, rank, 2)
    del tensors, halves
    conversions = [
        ("hf", "megatron", model, "m"),
        ("hf", "hf", model, "h"),
        ("megatron", "hf", tmp_path / "m", "x"),
        ("fsdp", "hf", tmp_path / "fsdp", "y"),
    ]
    for source_format, target_format, source, target in conversions:
        arguments = ["--from", source_format, "--to", target_format, "--hf-config", str(model)]
        growth = peak_growth(lambda: main([*arguments, str(source), str(tmp_path / target)]))  # noqa: B023 (called here)
        assert growth < ALLOWED_BYTES, f"{source_format} to {target_format} grew by {growth}"
