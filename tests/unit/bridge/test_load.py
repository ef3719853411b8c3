"""Load parameters with several threads from files that answer slowly and out of order."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhf_mcore.bridge.files import hf_files
from rlhf_mcore.bridge.files.hf_files import INDEX, HFReader, load
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import GroupedSizes, LocalParameter, ModelGeometry, Shard
from tests.messages import expect_error

LLAMA = ModelGeometry("llama", 2, 16, GroupedSizes(4, 2, 4), 24, 32, False)


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in hf_shapes(LLAMA).items()}


def write(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Write two files, which share the tensors of each layer."""
    shard_of = {name: f"model-{k % 2}.safetensors" for k, name in enumerate(tensors)}
    for file in set(shard_of.values()):
        save_file({name: tensors[name] for name in tensors if shard_of[name] == file}, directory / file)
    (directory / INDEX).write_text(json.dumps({"weight_map": shard_of}))


def parameters() -> list[LocalParameter]:
    """Return the embedding, the output projections and the output layer, whose tensors have their names in the files."""
    names = {
        "embedding.word_embeddings.weight": 32 * 16,
        "decoder.layers.0.self_attention.linear_proj.weight": 16 * 16,
        "decoder.layers.1.self_attention.linear_proj.weight": 16 * 16,
        "decoder.layers.0.mlp.linear_fc2.weight": 16 * 24,
        "decoder.layers.1.mlp.linear_fc2.weight": 16 * 24,
        "output_layer.weight": 32 * 16,
    }
    return [LocalParameter(name, torch.zeros(size), Shard(0, 1)) for name, size in names.items()]


FILE_NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "lm_head.weight",
)


def answer_in_reverse(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Let earlier tensors take longer. Return the number of times that each file is opened."""
    read, opened = HFReader.read, Counter[str]()

    def slow_read(self: HFReader, name: str, where: tuple[slice, ...]) -> Tensor:
        time.sleep(0.02 * (len(FILE_NAMES) - FILE_NAMES.index(name)))
        return read(self, name, where)

    def slow_open(path: Path, framework: str) -> Any:
        opened[path.name] += 1
        time.sleep(0.02)
        return safe_open(path, framework=framework)

    monkeypatch.setattr(HFReader, "read", slow_read)
    monkeypatch.setattr(hf_files, "safe_open", slow_open)
    return opened


def test_threads_fill_every_parameter_and_open_each_file_once(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, tensors)
    opened, found, filled = answer_in_reverse(monkeypatch), parameters(), list[int]()
    load(found, LLAMA, HFReader(tmp_path), progress=filled.append)
    for parameter, name in zip(found, FILE_NAMES, strict=True):
        assert torch.equal(parameter.tensor, tensors[name].flatten()), name
    assert filled == [parameter.tensor.nbytes for parameter in found]
    assert opened == {"model-0.safetensors": 1, "model-1.safetensors": 1}


def test_the_first_parameter_with_an_error_is_named(
    tensors: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later parameter fails earlier, in another thread."""
    for name in FILE_NAMES[1:3]:
        tensors[name][0, 0] = torch.nan
    write(tmp_path, tensors)
    answer_in_reverse(monkeypatch)
    with expect_error(ConfigError, field=FILE_NAMES[1], remedy="again") as raised:
        load(parameters(), LLAMA, HFReader(tmp_path))
    assert FILE_NAMES[2] not in str(raised.value)
