from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rlhf_mcore.mcore.core_attention import SDPACoreAttention
from rlhf_mcore.mcore.layers import HAVE_TE, RMSNorm, use_te
from rlhf_mcore.mcore.packed import PackedSequences

LENGTHS = [5, 1, 7]


def config(dtype: torch.dtype = torch.float32, sequence_parallel: bool = False) -> Any:
    return SimpleNamespace(
        params_dtype=dtype,
        sequence_parallel=sequence_parallel,
        layernorm_zero_centered_gamma=False,
        window_size=None,
        window_attn_skip_freq=None,
        softmax_type="vanilla",
    )


# ---------------------------------------------------------------------------------------------------------------- norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = RMSNorm(config(dtype), 24, eps=1e-3), LlamaRMSNorm(24, eps=1e-3).to(dtype)
    weight = torch.randn(24).to(dtype)
    for module in (ours, theirs):
        module.weight.data.copy_(weight)
    left = (torch.randn(3, 5, 24) * 4).to(dtype).requires_grad_()
    right = left.detach().clone().requires_grad_()
    out, expected = ours(left), theirs(right)
    assert out.dtype == dtype
    if dtype == torch.bfloat16:  # by the same operations
        assert torch.equal(out, expected)
    # A separate kernel in fp32: the root halves the 26 roundings of the mean of 24 squares, and three more follow.
    torch.testing.assert_close(out, expected, rtol=2 * (13 + 3) * 2**-24, atol=0)
    out.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(left.grad, right.grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_the_norm_by_hand() -> None:
    norm = RMSNorm(config(), 2, eps=0.0)
    norm.weight.data.copy_(torch.tensor([1.0, 2.0]))
    # Root of the mean square of (3, 4) is sqrt(12.5).
    assert norm(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([3 / math.sqrt(12.5), 8 / math.sqrt(12.5)])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_norm_tells_megatron_of_sequence_parallelism(sequence_parallel: bool) -> None:
    # finalize_model_grads sums the gradients of parameters with this attribute over tensor-parallel ranks.
    norm = RMSNorm(config(sequence_parallel=sequence_parallel), 4)
    assert norm.weight.sequence_parallel is sequence_parallel
    assert norm.weight.tolist() == [1.0] * 4


# ----------------------------------------------------------------------------------------------------------- attention
def core() -> SDPACoreAttention:
    return SDPACoreAttention(config(), 1, AttnMaskType.causal)


def sequences(heads: int, groups: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Build query [n, heads, 4], key and value [n, groups, 4] of sequences of different lengths."""
    torch.manual_seed(heads)
    return [tuple(torch.randn(n, h, 4) for h in (heads, groups, groups)) for n in LENGTHS]  # type: ignore[misc]


def slow(q: Tensor, k: Tensor, v: Tensor, window: int = 99, sinks: Tensor | None = None) -> Tensor:
    """Attend one query and one head at a time, in double precision.

    Returns [n, heads * 4]. A sink takes weight without a value.
    """
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros_like(q)
    per_group = q.size(1) // k.size(1)
    for i in range(q.size(0)):
        for head in range(q.size(1)):
            group = head // per_group
            scores = [float(q[i, head] @ k[j, group]) / math.sqrt(q.size(2)) for j in range(i + 1)]
            weights = [math.exp(score) if i - j < window else 0.0 for j, score in enumerate(scores)]
            total = sum(weights) + (math.exp(sinks[head]) if sinks is not None else 0.0)
            for j, weight in enumerate(weights):
                out[i, head] += weight / total * v[j, group]
    return out.flatten(1)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1), (1, 1)])
def test_packed_and_padded_attention_equal_a_softmax_in_a_loop(heads: int, groups: int) -> None:
    parts = sequences(heads, groups)
    expected = [slow(*part) for part in parts]
    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (torch.cat(column) for column in zip(*parts, strict=True))
    packing = PackedSequences.of(borders, torch.arange(sum(LENGTHS)), LENGTHS, None)
    packed = core()(q, k, v, None, packed_seq_params=packing)
    torch.testing.assert_close(packed.double(), torch.cat(expected), rtol=1e-5, atol=1e-6)
    longest = max(LENGTHS)
    padded_in = [torch.full((longest, 3, x.size(1), 4), 9.0) for x in (q, k, v)]
    for place, part in enumerate(parts):
        for target, value in zip(padded_in, part, strict=True):
            target[: len(value), place] = value
    padded = core()(*padded_in, None)
    assert padded.shape == (longest, 3, heads * 4)
    for place, (length, reference) in enumerate(zip(LENGTHS, expected, strict=True)):
        torch.testing.assert_close(padded[:length, place].double(), reference, rtol=1e-5, atol=1e-6)


def test_windows_and_sinks_equal_a_softmax_in_a_loop() -> None:
    cfg = config()
    cfg.window_size, cfg.window_attn_skip_freq, cfg.softmax_type = (2, 0), [0, 1], "learnable"
    cfg.num_attention_heads, cfg.tensor_model_parallel_size = 4, 1
    part = sequences(4, 2)[2]
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    for layer, window in ((1, 99), (2, 3)):
        attention = SDPACoreAttention(cfg, layer, AttnMaskType.causal)
        attention.softmax_offset.data.copy_(sinks)
        out = attention(*(x[:, None] for x in part), None)[:, 0]
        torch.testing.assert_close(out.double(), slow(*part, window, sinks), rtol=1e-5, atol=1e-6)


def test_a_packed_sequence_gets_no_gradient_from_another() -> None:
    parts = sequences(2, 1)
    q, k, v = (torch.cat(column).requires_grad_() for column in zip(*parts, strict=True))
    borders = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packing = PackedSequences.of(borders, torch.arange(sum(LENGTHS)), LENGTHS, None)
    core()(q, k, v, None, packed_seq_params=packing)[5:6].sum().backward()  # the sequence with one token
    assert v.grad is not None and v.grad.abs().sum(dim=(1, 2)).nonzero().flatten().tolist() == [5]


def test_other_masks_are_refused() -> None:
    with pytest.raises(AssertionError, match="padding"):
        SDPACoreAttention(config(), 1, AttnMaskType.padding)


def test_the_choice_of_a_layer_spec() -> None:
    assert use_te("te") is True and use_te("local") is False and use_te("auto") is HAVE_TE
