"""Compare the kernels with written-out formulas in fp64, in values and gradients, over several blocks with a partial last block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from rlhf_mcore.platform import cpu_kernels


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def apply_gate(x: Tensor, bias: Tensor, weights: Tensor) -> Tensor:
    a, b = (x + bias).unflatten(-1, (2, -1)).unbind(-2)
    return a / (1 + (-a).exp()) * b * weights


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs as complex numbers by their angles, and scale them by 1.5."""
    pairs = torch.complex(*x.unflatten(-1, (2, -1)).unbind(-2)) * torch.polar(torch.full_like(angles, 1.5), angles)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    return cpu_kernels.rotation(rope_utils._apply_rotary_pos_emb_bshd)(x, torch.cat([angles, angles], -1), mscale=1.5)


CASES: list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = [
    (lambda x, weight: cpu_kernels.rms_norm(x, weight, 1e-3), normalize, [(130, 2, 40), (40,)]),
    (cpu_kernels.weighted_swiglu, apply_gate, [(130, 2, 40), (40,), (130, 2, 1)]),
    (rotate, rotate_complex, [(130, 2, 4, 24), (130, 1, 1, 12)]),
]


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(("ours", "expected", "shapes"), CASES, ids=["norm", "swiglu", "rotation"])
def test_values_and_gradients_are_those_of_the_formula(
    ours: Any, expected: Any, shapes: list[tuple[int, ...]], contiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_kernels, "_BLOCK_BYTES", 6000)
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    if not contiguous:  # heads are slices of a larger tensor
        inputs[0] = torch.cat([inputs[0], inputs[0]], dim=-1)[..., : shapes[0][-1]]
    exact = [x.double().requires_grad_() for x in inputs]
    inputs = [x.requires_grad_() for x in inputs]
    out, right = ours(*inputs), expected(*exact)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), right, atol=1e-6, rtol=1e-6)
    weights = torch.randn(right.shape).mT.contiguous().mT  # the gradient is not contiguous either
    count = 1 if ours is rotate else len(inputs)  # angles have no gradient
    found = torch.autograd.grad((out * weights).sum(), inputs[:count])
    for gradient, of in zip(found, torch.autograd.grad((right * weights).sum(), exact[:count]), strict=True):
        torch.testing.assert_close(gradient.double(), of, atol=1e-5, rtol=1e-5)


def test_other_dtypes_and_kinds_of_rotation_are_left_to_megatron() -> None:
    torch.manual_seed(0)
    x, freqs = torch.randn(5, 1, 2, 8), torch.randn(5, 1, 1, 4).repeat(1, 1, 1, 2)
    plain = rope_utils._apply_rotary_pos_emb_bshd
    kernel, megatron = cpu_kernels.rotation(plain), getattr(plain, "__wrapped__", plain)
    for kinds in ({"rotary_interleaved": True}, {"multi_latent_attention": True}, {"mscale": 2.0}):
        torch.testing.assert_close(kernel(x, freqs, **kinds), megatron(x, freqs, **kinds))
    assert torch.equal(kernel(x, freqs[..., :4]), megatron(x, freqs[..., :4]))  # a part of a head
    assert torch.equal(kernel(x.bfloat16(), freqs), megatron(x.bfloat16(), freqs))
    wide = torch.randn(3, 8).bfloat16()
    assert torch.equal(cpu_kernels.swiglu(wide), F.silu(wide[:, :4]) * wide[:, 4:])


def test_no_tokens() -> None:
    """A rank's experts get no tokens."""
    x, weight = torch.zeros(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    out = cpu_kernels.swiglu(cpu_kernels.rms_norm(x, weight, 1e-6))
    assert out.shape == (0, 4)
    out.sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [0.0] * 8
