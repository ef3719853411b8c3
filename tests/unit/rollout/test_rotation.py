"""vLLM on a CPU rotates every head of a query, however its heads are laid out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_mcore.rollout.vllm.cpu import rotate_every_head

TOKENS, HEADS, SIZE, BASE = 5, 4, 64, 10000.0


@pytest.fixture(scope="module")
def rotation() -> nn.Module:
    """vLLM's, with its kernel, as an engine on a CPU has it."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        parameters = {"rope_type": "default", "rope_theta": BASE}
        made = get_rope(SIZE, 512, is_neox_style=False, rope_parameters=parameters, dtype=torch.float32)
    assert made._forward_method == made.forward_cpu
    rotate_every_head(nn.ModuleList([made]))
    return made


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Neighbouring numbers as complex ones, times e^(i position base^(-2k/size)) (Su et al. 2021, arXiv 2104.09864, eq. 34)."""
    angles = positions.double()[:, None] * BASE ** (-torch.arange(0, SIZE, 2).double() / SIZE)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2).float()


def test_heads_in_a_dimension_of_their_own_as_latent_attention_has_them(rotation: nn.Module) -> None:
    torch.manual_seed(0)
    query, latent, positions = (
        torch.randn(TOKENS, HEADS, 128 + SIZE),
        torch.randn(TOKENS, 512 + SIZE),
        torch.arange(3, 8),
    )
    expected = rotate(query[..., 128:], positions), rotate(latent[:, None, 512:], positions)
    found = rotation(positions, query[..., 128:], latent[:, 512:].unsqueeze(1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_heads_side_by_side(rotation: nn.Module) -> None:
    torch.manual_seed(0)
    query, key, positions = torch.randn(TOKENS, HEADS * SIZE), torch.randn(TOKENS, SIZE), torch.arange(3, 8)
    expected = [rotate(x.unflatten(-1, (-1, SIZE)), positions).flatten(1) for x in (query, key)]
    torch.testing.assert_close(list(rotation(positions, query, key)), expected, rtol=0, atol=1e-5)
