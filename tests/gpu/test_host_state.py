"""Step optimizer state in host memory next to a GPU, with real streams and pinned memory, and compare it with AdamW on the GPU."""

from __future__ import annotations

import pytest
import torch

from rlhf_mcore.mcore.host_state import HostRange, HostSteps, move_to_host
from rlhf_mcore.platform import current_platform

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LR, SIZES = 1e-3, (4_000_000, 3, 1_000_001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_steps_are_those_of_the_gpu(dtype: torch.dtype) -> None:
    """Each slot is used several times. Later work of the GPU overwrites gradients at once, and reads the new weights."""
    chance = torch.Generator("cuda").manual_seed(0)
    start = [torch.randn(size, device="cuda", generator=chance).to(dtype) for size in SIZES]
    reference = [torch.nn.Parameter(weights.float()) for weights in start]
    adamw = torch.optim.AdamW(reference, LR, weight_decay=0.1)
    group = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    hosted = []
    for weights in start:
        stepped = weights.float() if dtype != torch.float32 else weights
        hosted.append(HostRange(weights, stepped, group, move_to_host(weights, stepped)))
    steps = HostSteps(hosted, current_platform(), bucket=700_000)
    for _ in range(5):
        gradients = [torch.randn(size, device="cuda", generator=chance) for size in SIZES]
        for one, parameter, gradient in zip(hosted, reference, gradients, strict=True):
            one.stepped.grad, parameter.grad = gradient, gradient.clone()
        steps.step()
        for gradient in gradients:
            gradient.fill_(float("nan"))
        adamw.step()
        for one, parameter in zip(hosted, reference, strict=True):
            torch.testing.assert_close(one.state.get("master", one.weights.cpu()), parameter.detach().cpu())
            torch.testing.assert_close(one.weights, parameter.detach().to(dtype))
    assert all(torch.isfinite(one.state["exp_avg"]).all() and one.state["step"] == 5 for one in hosted)
