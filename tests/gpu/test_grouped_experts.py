"""Torch's grouped product on Hopper, against a product for each expert. Skipped without it."""

from __future__ import annotations

import pytest
import torch

from rlhf_mcore.expected_kernels import GROUPS_EXPERTS
from rlhf_mcore.mcore.mixture import _GroupedProduct

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != GROUPS_EXPERTS,
        reason=f"needs a GPU of capability {GROUPS_EXPERTS}",
    ),
]


@pytest.mark.parametrize("counts", [[160, 0, 2577, 446, 0, 83, 1], [0, 0, 5, 0, 0, 0, 0]])
def test_a_grouped_product_is_that_of_each_expert_and_waits_for_nothing(counts: list[int]) -> None:
    """Groups begin at rows that are not aligned. An expert without tokens has a gradient of zero, whatever was in memory before."""
    draw = torch.Generator(device="cuda").manual_seed(0)
    shapes = dict(dtype=torch.bfloat16, device="cuda", generator=draw)
    x = torch.randn(sum(counts), 2048, **shapes).requires_grad_()
    weights = [(0.02 * torch.randn(1536, 2048, **shapes)).requires_grad_() for _ in counts]
    grad = torch.randn(sum(counts), 1536, **shapes)
    ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
    dirty = torch.full((len(counts), 1536, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
    del dirty  # the allocator gives it out again
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = _GroupedProduct.apply(x, ends, *weights)
        found = torch.autograd.grad(out, [x, *weights], grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rows, of_rows = x.detach().float().split(counts), grad.float().split(counts)
    expected = torch.cat([part @ weight.float().T for part, weight in zip(rows, weights, strict=True)])
    of_x = torch.cat([part @ weight.float() for part, weight in zip(of_rows, weights, strict=True)])
    of_weights = [g.T @ part for g, part in zip(of_rows, rows, strict=True)]
    for result, reference in zip([out, *found], [expected, of_x, *of_weights], strict=True):
        assert (result.float() - reference).norm() <= 2**-7 * reference.norm()
