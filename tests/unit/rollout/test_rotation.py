"""vLLM on a CPU rotates every head of a query, however its heads are laid out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rlhf_mcore.rollout.vllm.cpu import rotate_every_head

TOKENS, HEADS, SIZE, BASE = 5, 4, 64, 10000.0


@pytest.fixture(scope="module")
def rotation() -> nn.Module:
    return make_rotation(SIZE, torch.float32)


def make_rotation(size: int, dtype: torch.dtype, share: float = 1.0, *, halves: bool = False) -> nn.Module:
    """Build vLLM's module with its kernel, as an engine on a CPU uses it. ``share``: rotated part of a head.

    ``halves``: elements of its two halves rotate together, instead of neighbours.
    """
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        parameters = {"rope_type": "default", "rope_theta": BASE, "partial_rotary_factor": share}
        made = get_rope(size, 512, is_neox_style=halves, rope_parameters=parameters, dtype=dtype)
    assert made._forward_method == made.forward_cpu
    rotate_every_head(nn.ModuleList([made]))
    return made


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Neighbouring numbers as complex ones, times e^(i position base^(-2k/size)) (Su et al. 2021, arXiv 2104.09864, eq. 34)."""
    size = x.size(-1)
    angles = positions.double()[:, None] * BASE ** (-torch.arange(0, size, 2).double() / size)
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


def test_the_kernel_for_16_bits_gets_no_part_of_a_head_that_it_cannot_rotate() -> None:
    """Three quarters of a head of 32 rotate. The kernel would end the process with SIGSEGV."""
    query, positions = torch.randn(TOKENS, HEADS * 32).bfloat16(), torch.arange(3, 8)
    rotated, rest = query.unflatten(-1, (HEADS, 32)).split((24, 8), dim=-1)
    turned = rotate(rotated.unflatten(-1, (2, 12)).mT.flatten(-2), positions).unflatten(-1, (12, 2)).mT.flatten(-2)
    expected = torch.cat([turned, rest], dim=-1).flatten(-2)
    found, _ = make_rotation(32, torch.bfloat16, 0.75, halves=True)(positions, query, query.clone())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.05)
