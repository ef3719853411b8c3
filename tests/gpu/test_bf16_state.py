"""Compare AdamW's steps of Transformer Engine's kernel, with bf16 moments and 16-bit remainders, with the slow version.

Skipped without a GPU or Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fused_adam import adam_param_remainder, join

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.1


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_the_slow_version(grad_dtype: torch.dtype) -> None:
    """The kernel may fuse a multiplication and an addition, which changes the last bits of fp32 masters and bf16 moments."""
    optimizers = pytest.importorskip("transformer_engine.pytorch.optimizers")
    chance = torch.Generator().manual_seed(0)
    start = torch.randn(100_003, generator=chance).bfloat16()
    theirs = start.cuda()
    half: Any = torch.bfloat16
    adam = optimizers.FusedAdam(
        [theirs],
        LR,
        BETAS,
        EPS,
        DECAY,
        master_weights=True,
        exp_avg_dtype=half,
        exp_avg_sq_dtype=half,
        use_decoupled_grad=True,
        store_param_remainders=True,
    )
    weights, remainders = start.clone(), torch.zeros(len(start), dtype=torch.int16)
    first, second = torch.zeros(2, len(start), dtype=half)
    for step in range(1, 11):
        grad = torch.randn(len(start), generator=chance).to(grad_dtype)
        theirs.decoupled_grad = grad.cuda()
        adam.step()
        lists = [[grad], [weights], [first], [second], [remainders]]
        adam_param_remainder(0, torch.zeros(1), lists, LR, *BETAS, EPS, step, 1, 1, DECAY)
        state = {name: tensor.cpu() for name, tensor in adam.state[theirs].items()}
        masters = join(theirs.cpu(), state["master_param"])
        # one last bit of a moment changes a step by at most lr * 2^-7
        torch.testing.assert_close(masters, join(weights, remainders), rtol=2**-22, atol=step * LR * 2**-7)
        torch.testing.assert_close(state["exp_avg"], first, rtol=2**-7, atol=2**-10)
        torch.testing.assert_close(state["exp_avg_sq"], second, rtol=2**-7, atol=2**-16)
