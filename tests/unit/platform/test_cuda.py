"""What the CUDA platform does that needs no device."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core.transformer.moe import moe_utils

from rlhf_mcore.platform import CudaPlatform, Platform
from rlhf_mcore.platform.cpu import CpuPlatform


@pytest.mark.parametrize("platform", [CudaPlatform(), CpuPlatform()])
def test_routers_work_without_transformer_engine(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "HAVE_TE", False)
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)  # as Megatron-core 0.16 imports it then
    platform.prepare_megatron()
    tokens = torch.tensor([[1.0, 2.0], [3.0, -1.0]], requires_grad=True)
    weight = torch.tensor([[2.0, 0.5], [-1.0, 1.0], [0.0, 3.0]], requires_grad=True)
    logits = moe_utils.router_gating_linear(tokens, weight, None, torch.float32)
    assert logits.tolist() == [[3.0, 1.0, 6.0], [5.5, -4.0, -3.0]]
    logits.sum().backward()
    assert tokens.grad is not None and tokens.grad.tolist() == [[1.0, 4.5]] * 2  # sums of weight's columns
    assert weight.grad is not None and weight.grad.tolist() == [[4.0, 1.0]] * 3  # sums over tokens


def test_a_product_of_transformer_engine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "te_general_gemm", fused := object(), raising=False)
    CudaPlatform().prepare_megatron()
    assert moe_utils.te_general_gemm is fused
    assert "te_general_gemm is not None" in inspect.getsource(moe_utils)
