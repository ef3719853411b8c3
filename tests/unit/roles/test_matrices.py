"""Which of a model's parameters hold matrices for Muon, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mcore.bridge.map.rules import hf_shapes, parameter_names, pieces
from rlhf_mcore.geometry import Shard
from rlhf_mcore.parallel.layout import is_expert
from rlhf_mcore.readers.model_files import read_geometry
from rlhf_mcore.roles.trained_weights import matrices_of
from tests.distributed import models

APART = ("norm.weight", "bias", "sinks", "embed_tokens.weight", "lm_head.weight")  # which AdamW steps


@pytest.mark.parametrize("model", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_matrices_are_covered_once_and_nothing_else_is(model: str, tmp_path: Path) -> None:
    models.make(model, tmp_path)
    geometry = read_geometry(str(tmp_path), "lm")
    locate, found, whole = matrices_of(geometry), Counter[str](), {}
    for name in parameter_names(geometry):
        for rank in range(2):  # as tensor-parallel ranks share it; experts are whole
            shard = Shard(0, 1) if is_expert(name) else Shard(rank, 2)
            if rank and pieces(name, geometry, shard) == pieces(name, geometry, replace(shard, rank=0)):
                continue
            size = sum(piece.numel for piece in pieces(name, geometry, shard))
            for start, stop in ((0, size // 3), (size // 3, size)):  # and data-parallel ranks
                for part in locate(name, shard, start, stop):
                    found[part.name] += part.numel
                    whole[part.name] = part.shape[0] * part.shape[1]
    assert found == whole
    stacked = {
        f"{name}[{k}]" for name, shape in hf_shapes(geometry).items() if len(shape) == 3 for k in range(shape[0])
    }
    others = {name for name, shape in hf_shapes(geometry).items() if len(shape) == 2 and not name.endswith(APART)}
    assert set(found) == others | stacked
