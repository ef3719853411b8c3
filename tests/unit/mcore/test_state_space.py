"""Compare state-space layers with the recurrence, token by token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry, Shard, SpaceSizes
from rlhf_mcore.mcore.packed import PackedSequences
from rlhf_mcore.mcore.recurrence import CHUNK
from rlhf_mcore.mcore.state_space import SpaceKernels, StateSpace, selective_scan

LENGTHS = [3, CHUNK + 1, 1, 2 * CHUNK, 3 * CHUNK + 5]
HEADS, WIDTH, STATE = 4, 5, 6


def token_by_token(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute the recurrence of one head of one sequence: equation 2 of arXiv 2405.21060, with exp(step rate) as A."""
    state, out = x.new_zeros(b.size(-1), x.size(-1)), []
    for t in range(len(x)):
        state = state * (step[t] * rate).exp() + torch.outer(b[t], step[t] * x[t])
        out.append(state.T @ c[t])
    return torch.stack(out)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_sequences_back_to_back_match_the_recurrence_in_value_and_gradient(groups: int) -> None:
    generator, count = torch.Generator().manual_seed(0), sum(LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, step, rate = random(count, HEADS, WIDTH), random(count, HEADS).sigmoid(), -random(HEADS).exp()
    b, c = random(count, groups, STATE), random(count, groups, STATE)
    wide = [each.requires_grad_() for each in (rate, x, step, b, c)]
    expected = []
    for one, two, four, five in zip(*(each.split(LENGTHS) for each in (x, step, b, c)), strict=True):
        of_heads = [
            token_by_token(one[:, h], two[:, h], rate[h], four[:, group], five[:, group])
            for h in range(HEADS)
            for group in [h * groups // HEADS]
        ]
        expected.append(torch.stack(of_heads, dim=1))
    narrow = [each.detach().float().requires_grad_() for each in wide]
    found, _ = selective_scan(*narrow, np.array(LENGTHS))
    torch.testing.assert_close(found.double(), torch.cat(expected), atol=2e-5, rtol=1e-5)
    weights = random(count, HEADS, WIDTH)
    (torch.cat(expected) * weights).sum().backward()
    (found.double() * weights).sum().backward()
    for got, wanted in zip(narrow, wide, strict=True):
        torch.testing.assert_close(got.grad.double(), wanted.grad, atol=2e-4, rtol=2e-4)


def test_a_rank_without_heads_has_a_gradient_of_nothing() -> None:
    x, step, rate = torch.randn(7, 0, 5), torch.randn(7, 0).exp(), torch.randn(0)
    b, c = torch.randn(7, 1, 6), torch.randn(7, 1, 6)
    inputs = [each.requires_grad_() for each in (rate, x, step, b, c)]
    out, _ = selective_scan(*inputs, np.array([3, 4]))
    assert out.shape == (7, 0, 5)
    out.sum().backward()
    assert all(each.grad is not None for each in inputs)


# -------------------------------------------------------------------------------------------------------------- kernels
def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve with the signature of causal-conv1d 1.5: ``x`` [B, D, L], ``weight`` [D, W], ``seq_idx`` [B, L] int32."""
    assert activation == "silu" and x.size(1) == len(weight)
    assert seq_idx is None or (
        seq_idx.shape == (len(x), x.size(2)) and seq_idx.dtype == torch.int32 and x.stride(1) == 1
    )
    rows = []
    for number, row in enumerate(x):
        counts = [x.size(2)] if seq_idx is None else seq_idx[number].unique_consecutive(return_counts=True)[1].tolist()
        padded = [F.pad(part, (weight.size(1) - 1, 0))[None] for part in row.split(counts, dim=1)]
        rows.append(torch.cat([F.conv1d(part, weight[:, None], bias, groups=len(weight))[0] for part in padded], dim=1))
    return F.silu(torch.stack(rows))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    """Compute the recurrence token by token, with the signature of mamba-ssm 2: ``x`` [B, L, H, P], ``B`` [B, L, G, S]."""
    assert D is not None and A.shape == D.shape == dt.shape[2:] and x.shape[:3] == dt.shape and not dt_softplus
    repeats, rows = x.size(2) // B.size(2), []
    for number in range(len(x)):
        b, c = (each[number].repeat_interleave(repeats, dim=1) for each in (B, C))
        counts = [x.size(1)] if seq_idx is None else seq_idx[number].unique_consecutive(return_counts=True)[1].tolist()
        parts = [each.split(counts) for each in (x[number], dt[number], b, c)]
        for inputs, step, write, read in zip(*parts, strict=True):
            heads = [
                token_by_token(inputs[:, h], step[:, h], A[h], write[:, h], read[:, h]) + D[h] * inputs[:, h]
                for h in range(x.size(2))
            ]
            rows.append(torch.stack(heads, dim=1))
    return torch.cat(rows).view_as(x)


class Linear(torch.nn.Linear):
    """A linear layer with Megatron's interface."""

    def __init__(self, inputs: int, outputs: int, **kwargs: Any):
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
CONFIG: Any = SimpleNamespace(
    hidden_size=8,
    mamba_num_heads=HEADS,
    mamba_head_dim=WIDTH,
    mamba_num_groups=2,
    mamba_state_dim=STATE,
    linear_conv_kernel_dim=4,
    layernorm_epsilon=1e-5,
    params_dtype=torch.float32,
    init_method=None,
    output_layer_init_method=None,
)


@pytest.mark.parametrize("packs", [False, True])
def test_kernels_and_torch_compute_the_same(packs: bool) -> None:
    torch.manual_seed(0)
    layer = StateSpace(CONFIG, Linear, Linear, 1, SimpleNamespace(tp=ALONE, cp=ALONE))  # type: ignore[arg-type]
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    hidden, packed = torch.randn(9, 2, 8), None
    if packs:
        hidden, sizes = torch.randn(12, 1, 8), [3, 1, 8]
        borders = torch.tensor([0, 3, 4, 12], dtype=torch.int32)
        packed = PackedSequences.of(borders, torch.arange(12), sizes, None)
    results = []
    for kernels in (None, SpaceKernels(causal_conv1d_fn, mamba_chunk_scan_combined)):
        layer.kernels = kernels
        layer.zero_grad()
        out = layer(hidden, None, packed)[0]
        out.square().sum().backward()
        results.append([out.detach(), *(parameter.grad.clone() for parameter in layer.parameters())])  # type: ignore[union-attr]
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


# ---------------------------------------------------------------------------------------------------------- rows of ranks
GEOMETRY = ModelGeometry(
    "nemotron_h",
    num_layers=2,
    hidden_size=1,
    attention=GroupedSizes(4, 2, 2),
    ffn_size=2,
    vocab_size=4,
    tied_embeddings=False,
    space=SpaceSizes(heads=4, head_dim=1, groups=2, state_dim=1, kernel=4),
    blocks=("state_space", "attention"),
)


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        # Rows in a file: gates 4, inputs 4, B 2, C 2, time steps 4.
        ("in_proj.weight", None, list(range(16))),
        ("in_proj.weight", 1, [2, 3, 6, 7, 9, 11, 14, 15]),
        ("conv1d.weight", 0, [0, 1, 4, 6]),
        ("conv1d.bias", 1, [2, 3, 5, 7]),
        ("A_log", 1, [2, 3]),
        ("norm.weight", 0, [0, 1]),
    ],
)
def test_rows_of_a_rank(name: str, rank: int | None, expected: list[int]) -> None:
    shard = Shard(0, 1) if rank is None else Shard(rank, 2)
    held = pieces(f"decoder.layers.0.self_attention.{name}", GEOMETRY, shard)
    assert {piece.hf_name for piece in held} == {f"backbone.layers.0.mixer.{name}"}
    assert [row for piece in held for row in range(piece.start[0], piece.start[0] + piece.shape[0])] == expected
