"""Compare adapters that start with principal singular vectors with torch's singular value decomposition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.geometry import AdapterSizes, GroupedSizes, LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore_contrib.pissa.principal import begin_with_principal, principal_factors
from tests.trainer_layout import stage_names
from tests.unit.parallel.world import world

__all__ = ["world"]

MODEL = ModelGeometry("qwen3", 2, 16, GroupedSizes(4, 2, 4), 24, 13, False)
PREFIX = "base_model.model."


def best_of_rank(weight: Tensor, rank: int) -> Tensor:
    u, s, v = torch.linalg.svd(weight.double(), full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (9, 9)])
def test_factors_are_the_principal_part(shape: tuple[int, int]) -> None:
    """Both factors contain the square roots of the singular values, as in PiSSA."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    a, b = principal_factors(weight, 3, 4.0)
    torch.testing.assert_close(4.0 * (b @ a).double(), best_of_rank(weight, 3), rtol=1e-5, atol=1e-5)
    values = torch.linalg.svdvals(weight)[:3] / 4.0
    torch.testing.assert_close(a @ a.t(), torch.diag(values), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(b.t() @ b, torch.diag(values), rtol=1e-5, atol=1e-5)


def test_a_matrix_of_a_lower_rank_has_finite_factors() -> None:
    weight = torch.outer(torch.arange(1.0, 6.0), torch.ones(7))
    a, b = principal_factors(weight, 2, 1.0)
    assert a.isfinite().all() and b.isfinite().all()
    torch.testing.assert_close(b @ a, weight, rtol=1e-5, atol=1e-5)
    a, b = principal_factors(torch.zeros(4, 5), 2, 1.0)
    assert not a.any() and not b.any()


def begun(base: Path, geometry: ModelGeometry, size: int) -> dict[str, Tensor]:
    """Return whole initial matrices under PEFT's names, assembled from ``size`` tensor-parallel ranks."""
    whole = {name: torch.full(shape, torch.nan) for name, shape in hf_shapes(geometry).items()}
    [names] = stage_names(geometry, ParallelLayout(size, tp=size))
    for rank in range(size):
        shard = Shard(rank, size)
        held = {name: pieces(name, geometry, shard) for name in names}
        parameters = [
            LocalParameter(name, torch.full((sum(piece.numel for piece in parts),), torch.nan), shard)
            for name, parts in held.items()
        ]
        begin_with_principal(parameters, geometry, base)
        for parameter in parameters:
            for piece in held[parameter.name]:
                whole[piece.hf_name][piece.slices] = view(parameter.tensor, piece)
    return whole


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save_file({name: torch.randn(shape) for name, shape in hf_shapes(MODEL).items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("size", [1, 2])
def test_a_run_begins_with_the_model_in_every_layout(base: Path, size: int) -> None:
    """Each matrix gets factors of its own principal part. The second halves cancel the first halves bit for bit."""
    geometry = replace(MODEL, adapter=AdapterSizes(4, 12.0, ("all-linear", "embed_tokens", "lm_head"), fixed=2))
    weights, found = load_file(base / "model.safetensors"), begun(base, geometry, size)
    for name in (name for name in weights if "proj" in name or name in ("lm_head.weight", "model.embed_tokens.weight")):
        module = PREFIX + name.removesuffix(".weight")
        if "embed" in name:
            a, b = found[f"{module}.lora_embedding_B"].t(), found[f"{module}.lora_embedding_A"].t()
        else:
            a, b = found[f"{module}.lora_A.weight"], found[f"{module}.lora_B.weight"]
        torch.testing.assert_close(
            3.0 * (b[:, :2] @ a[:2]).double(), best_of_rank(weights[name], 2), rtol=1e-5, atol=1e-5
        )
        assert torch.equal(a[:2], a[2:]) and torch.equal(b[:, :2], -b[:, 2:])


@pytest.mark.usefixtures("world")
def test_a_rank_above_that_of_a_matrix_is_refused(base: Path) -> None:
    geometry = replace(MODEL, adapter=AdapterSizes(18, 9.0, ("v_proj",), fixed=9))
    with pytest.raises(ConfigError, match=r"v_proj is 8 x 16, with fewer than 9 .*lower actor\.lora\.rank"):
        begin_with_principal([], geometry, base)
    with pytest.raises(ConfigError, match=r"critic\.lora\.init=pissa: .*lower critic\.lora\.rank"):
        begin_with_principal([], geometry, base, field="critic.lora")
