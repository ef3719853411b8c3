"""Attention with heads that flash attention does not support, on a GPU: values, gradients and memory. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType

from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from tests.unit.mcore.test_kernels import attention_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS, HEADS, GROUPS, SIZE = 16384, 8, 2, 512


def test_heads_of_512_need_no_memory_for_pairs() -> None:
    core = SDPACoreAttention(attention_config(kv_channels=SIZE), 1, AttnMaskType.causal, 1.0)
    torch.manual_seed(0)
    inputs = [0.1 * torch.randn(TOKENS, 1, n, SIZE, device="cuda") for n in (HEADS, GROUPS, GROUPS)]
    weights = torch.randn(TOKENS, 1, HEADS * SIZE, device="cuda")

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves: list[Any] = [x.to(dtype).requires_grad_() for x in inputs]
        out = core(*leaves, None)
        (out * weights).sum().backward()
        return [out.detach().float(), *(x.grad.float() for x in leaves)]

    expected = run(torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = run(torch.bfloat16)
    assert torch.cuda.max_memory_allocated() - before < 2 * HEADS * TOKENS**2, (
        "fewer bytes than the weights of all pairs"
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()
