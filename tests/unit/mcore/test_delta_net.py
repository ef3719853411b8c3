"""Compare gated delta nets with the recurrence, token by token, and check the rows of each rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.geometry import DeltaSizes, GroupedSizes, ModelGeometry, Shard
from rlhf_mcore.mcore.delta_net import CHUNK, Heads, causal_convolution, gated_delta_rule, share_heads

LENGTHS = [3, CHUNK + 1, 1, 2 * CHUNK, 130]


def token_by_token(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Compute equation 10 of arXiv 2412.06464 for one head of one sequence."""
    state, out = q.new_zeros(k.size(-1), v.size(-1)), []
    for t in range(len(q)):
        state = state * decay[t].exp()
        state = state + torch.outer(k[t], beta[t] * (v[t] - state.T @ k[t]))
        out.append(state.T @ q[t] / q.size(-1) ** 0.5)
    return torch.stack(out)


def test_heads_of_keys_are_repeated_as_often_as_their_heads_of_values_are_here() -> None:
    x = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], requires_grad=True)
    repeated = Heads(range(2), range(1, 4), (1, 2)).repeat_keys(x)
    assert repeated.tolist() == [[[1, 2], [3, 4], [3, 4]]]
    repeated.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [[[1, 1], [2, 2]]]
    assert Heads(range(2), range(4), (2, 2)).repeat_keys(x)[..., 0].tolist() == [[1, 1, 3, 3]]


def test_sequences_back_to_back_are_the_recurrence_in_value_and_gradient() -> None:
    generator, count = torch.Generator().manual_seed(0), sum(LENGTHS)

    def random(*shape: int) -> Tensor:
        return torch.randn(count, 2, *shape, generator=generator, dtype=torch.float64)

    inputs = [
        F.normalize(random(6), dim=-1),
        F.normalize(random(6), dim=-1),
        random(5),
        -random().abs(),
        random().sigmoid(),
    ]
    wide = [x.requires_grad_() for x in inputs]
    expected = torch.cat(
        [
            torch.stack([token_by_token(*(x[:, head] for x in sequence)) for head in range(2)], dim=1)
            for sequence in zip(*(x.split(LENGTHS) for x in wide), strict=True)
        ]
    )
    narrow = [x.detach().float().requires_grad_() for x in inputs]
    found, _ = gated_delta_rule(*narrow, np.array(LENGTHS))
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    weights = random(5)
    (expected * weights).sum().backward()
    (found.double() * weights).sum().backward()
    for x, y in zip(narrow, wide, strict=True):
        torch.testing.assert_close(x.grad.double(), y.grad, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("keys", "values", "ranks", "expected"),
    [
        (2, 4, 1, ["01 0123"]),
        (2, 4, 2, ["0 01", "1 23"]),
        (2, 4, 4, ["0 0", "0 1", "1 2", "1 3"]),  # two ranks share a key head
        (2, 6, 4, ["0 0", "0 12", "1 3", "1 45"]),
        (2, 6, 3, ["0 01", "01 23", "1 45"]),  # two value heads, each with another key head
        (1, 2, 4, ["0 ", "0 0", "0 ", "0 1"]),  # fewer than ranks
    ],
)
def test_heads_are_shared_among_ranks(keys: int, values: int, ranks: int, expected: list[str]) -> None:
    shares, place = share_heads(keys, values, ranks), torch.arange(keys)[None, :, None]
    assert [" ".join("".join(map(str, heads)) for heads in (s.keys, s.values)) for s in shares] == expected
    for share in shares:  # each value head gets its key head
        repeated = share.repeat_keys(place[:, share.keys.start : share.keys.stop])
        assert repeated.flatten().tolist() == [value // (values // keys) for value in share.values]


def test_a_rank_without_heads_has_a_gradient_of_nothing() -> None:
    q, k, v = (torch.randn(7, 0, width, requires_grad=True) for width in (6, 6, 5))
    decay, beta = (torch.randn(7, 0, requires_grad=True) for _ in range(2))
    out, _ = gated_delta_rule(q, k, v, decay, beta, np.array([3, 4]))
    assert out.shape == (7, 0, 5)
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v, decay, beta))


def test_a_convolution_sees_no_token_of_another_sequence() -> None:
    torch.manual_seed(0)
    x, weight, lengths = torch.randn(12, 3), torch.randn(3, 4), [2, 1, 9]
    expected = [F.conv1d(F.pad(part.T, (3, 0))[None], weight[:, None], groups=3)[0].T for part in x.split(lengths)]
    torch.testing.assert_close(causal_convolution(x, weight, np.array(lengths)), torch.cat(expected))


GEOMETRY = ModelGeometry(
    "qwen3_next",
    num_layers=2,
    hidden_size=1,
    attention=GroupedSizes(4, 2, 2),
    ffn_size=2,
    vocab_size=4,
    tied_embeddings=False,
    delta=DeltaSizes(layers=(0,), key_heads=2, value_heads=4, key_dim=2, value_dim=1, kernel=4),
)


@pytest.mark.parametrize(
    ("name", "rank", "expected"),
    [
        # Rows of each key head in a file: query 2, key 2, values 2, gates 2; then betas 2, alphas 2.
        (
            "decoder.layers.0.self_attention.in_proj.weight",
            None,
            "qkvz 0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15 ba 0 1 4 5 2 3 6 7",
        ),
        ("decoder.layers.0.self_attention.in_proj.weight", 1, "qkvz 8 9 10 11 12 13 14 15 ba 4 5 6 7"),
        ("decoder.layers.0.self_attention.conv1d.weight", 1, "conv1d 2 3 6 7 10 11"),
        # Rows of each head in a file: query 2, gate 2.
        (
            "decoder.layers.1.self_attention.linear_qkv.weight",
            None,
            "q 0 1 4 5 2 3 6 7 k 0 1 v 0 1 q 8 9 12 13 10 11 14 15 k 2 3 v 2 3",
        ),
        ("decoder.layers.1.self_attention.linear_qkv.weight", 1, "q 8 9 12 13 10 11 14 15 k 2 3 v 2 3"),
    ],
)
def test_rows_of_a_rank(name: str, rank: int | None, expected: str) -> None:
    held = pieces(name, GEOMETRY, Shard(0, 1) if rank is None else Shard(rank, 2))
    found, last, position = [], "", 0
    for piece in held:
        tensor = (
            piece.hf_name.rpartition(".weight")[0].rpartition(".")[2].removeprefix("in_proj_").removesuffix("_proj")
        )
        width = 4 if tensor == "conv1d" else 1
        assert piece.offset == position * width and piece.shape[1:] == ((1, 4) if tensor == "conv1d" else (1,))
        found += ([tensor] if tensor != last else []) + [
            *map(str, range(piece.start[0], piece.start[0] + piece.shape[0]))
        ]
        last, position = tensor, position + piece.shape[0]
    assert " ".join(found) == expected
