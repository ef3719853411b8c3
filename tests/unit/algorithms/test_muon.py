"""Muon's direction, against torch's own optimizer and against the singular value decomposition."""

from __future__ import annotations

import math

import pytest
import torch

from rlhf_mcore.mcore.momentum import orthogonalize, update_scale

SHAPES = [(24, 16), (16, 24), (8, 8), (1, 12)]


@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_is_that_of_torchs_muon(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gradient, weight = torch.randn(shape), torch.zeros(shape, requires_grad=True)
    weight.grad = gradient.clone()
    settings = {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    torch.optim.Muon([weight], **settings).step()  # type: ignore[arg-type]
    ours = orthogonalize(gradient.bfloat16()).float() * update_scale(*shape)  # torch's is in bf16
    # The same products in the same shapes and order give the same bits; only the scale may be rounded otherwise.
    torch.testing.assert_close(-ours, weight.detach(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(1)
    matrix = torch.randn(shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    within = left.T @ orthogonalize(matrix) @ right.T
    assert float((within - within.diag().diag()).abs().max()) < 1e-9
    assert 0.65 < float(within.diag().min()) <= float(within.diag().max()) < 1.25


def test_an_update_is_as_large_as_adamws() -> None:
    torch.manual_seed(2)
    update = orthogonalize(torch.randn(48, 32)) * update_scale(48, 32)
    assert float(update.square().mean().sqrt()) == pytest.approx(0.2 * math.sqrt(48 * 32 / (48 * 32)), rel=0.25)


def test_no_gradient_is_no_update() -> None:
    assert not orthogonalize(torch.zeros(4, 6)).any()
