"""The attention that benchmarks/exact_logprobs.py shares, against torch's."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.exact_logprobs import attend


@pytest.mark.parametrize(("total", "last"), [(1, 1), (32, 32), (33, 1), (70, 19), (100, 100)])
def test_queries_attend_to_all_keys_before_them(total, last):
    torch.manual_seed(0)
    q, k, v = torch.randn(total, 4, 8), torch.randn(total, 2, 8), torch.randn(total, 2, 8)
    whole = F.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    )
    found = attend(q[total - last :], k, v, 0.3)
    torch.testing.assert_close(found.double(), whole.transpose(0, 1)[total - last :], atol=1e-6, rtol=1e-5)


def test_gradients_are_those_of_torch():
    torch.manual_seed(0)
    inputs = [torch.randn(37, heads, 4, dtype=torch.double, requires_grad=True) for heads in (4, 2, 2)]
    whole = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in inputs), is_causal=True, scale=0.5, enable_gqa=True
    ).transpose(0, 1)
    weights = torch.randn_like(whole)
    expected = torch.autograd.grad((whole * weights).sum(), inputs)
    found = torch.autograd.grad((attend(*inputs, 0.5) * weights).sum(), inputs)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
