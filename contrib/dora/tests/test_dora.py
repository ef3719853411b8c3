"""DoRA magnitudes start as the row norms of the weights in the dtype of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.geometry import AdapterSizes, GroupedSizes, LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore_contrib.dora.magnitudes import begin_with_norms
from tests.trainer_layout import stage_names

MODEL = ModelGeometry("qwen3", 2, 16, GroupedSizes(4, 2, 4), 24, 13, False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_they_begin_with_the_lengths_of_rows_in_every_layout(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    save_file({name: torch.randn(shape) for name, shape in hf_shapes(MODEL).items()}, tmp_path / "model.safetensors")
    weights = load_file(tmp_path / "model.safetensors")
    geometry = replace(MODEL, adapter=AdapterSizes(4, 12.0, ("q_proj", "v_proj", "o_proj", "up_proj"), use_dora=True))
    seen = set()
    [names] = stage_names(geometry, ParallelLayout(size, tp=size))
    for shard in (Shard(rank, size) for rank in range(size)):
        for name in (name for name in names if name.endswith(".lora_m")):
            parts = pieces(name, geometry, shard)
            tensor = torch.full((sum(part.numel for part in parts),), torch.nan, dtype=dtype)
            begin_with_norms([LocalParameter(name, tensor, shard)], geometry, tmp_path)
            for part in parts:
                weight = weights[
                    part.hf_name.removeprefix("base_model.model.").replace("lora_magnitude_vector", "weight")
                ]
                expected = (weight.to(dtype).double() ** 2).sum(1).sqrt().to(dtype)
                assert torch.equal(view(tensor, part), expected[part.slices]), part.hf_name
                seen.add(part.hf_name)
    assert len(seen) == 2 * 4
