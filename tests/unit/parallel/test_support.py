"""Compare logprobs within the support of top-k and top-p with autograd of the definition, and test ragged fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlhf_mcore.parallel.logprobs import Subsets, linear_logprobs
from rlhf_mcore.parallel.rows import move_ragged, move_rows, split_tokens, take_tokens
from rlhf_mcore.types import Ragged
from tests.unit.pairs import pairwise
from tests.unit.parallel.world import Meeting, ThreadGroup, all_reduce, run_ranks

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 14, 6, 11, 0.7
WHOLE = (2, 9)  # tokens sampled from the whole vocabulary


def output_layer(width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(TOKENS, HIDDEN, generator=generator), torch.randn(width, HIDDEN, generator=generator)


def supports_of(logits: Tensor) -> tuple[Ragged[Tensor], Tensor]:
    """Return each token's support by transformers' warpers, and labels within it that cover every place of the supports."""
    scores = TopKLogitsWarper(6)(None, logits / TEMPERATURE)  # type: ignore[arg-type]
    kept = TopPLogitsWarper(0.9)(None, scores).isfinite()  # type: ignore[arg-type]
    kept[list(WHOLE)] = False
    labels = torch.tensor(
        [int(row.nonzero().flatten()[k % int(row.sum())]) if row.any() else k % VOCAB for k, row in enumerate(kept)]
    )
    return Ragged(kept.sum(1).int(), kept.nonzero()[:, 1].int()), labels


def definition(logits: Tensor, labels: Tensor, support: Ragged[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logprobs within the supports, and logprobs and entropies of the whole distributions, token by token."""
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    drawn = []
    for row, label, own in zip(log_p, labels.tolist(), split_tokens(support, [1] * len(labels)), strict=True):
        ids = own.values.tolist() or list(range(VOCAB))
        drawn.append(row[ids].log_softmax(-1)[ids.index(label)])
    return torch.stack(drawn), log_p[range(len(labels)), labels], -(log_p.exp() * log_p).sum(-1)


def total(drawn: Tensor, logprobs: Tensor, entropy: Tensor, weights: tuple[float, float, float]) -> Tensor:
    """Sum with another weight per token, so that no two tokens can be confused."""
    tokens = torch.arange(1, TOKENS + 1) / TOKENS
    parts = zip(weights, (drawn, logprobs, entropy), strict=True)
    return sum(((weight * tokens * values).sum() for weight, values in parts), torch.zeros(()))


@pairwise(
    ("weights", [(1.0, 0.0, 0.0), (0.7, -0.4, 0.3)]),
    ("chunk", [None, 3, 7]),
    ("size, width", [(1, VOCAB), (1, 16), (2, 12), (4, 16)]),
)
def test_values_and_gradients_are_those_of_the_definition(
    weights: tuple[float, float, float], chunk: int | None, size: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    hidden, weight = output_layer(width)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    exact = x @ w[:VOCAB].t()
    support, labels = supports_of(exact.detach())
    assert 1 in support.counts and len(set(support.counts.tolist())) > 3
    expected = definition(exact, labels, support)
    total(*expected, weights).backward()

    def rank(group: ThreadGroup) -> list[Tensor]:
        a, b = hidden.clone().requires_grad_(), weight.chunk(size)[group.rank()].clone().requires_grad_()
        options: Any = {"vocab_size": VOCAB, "temperature": TEMPERATURE, "group": group, "chunk_tokens": chunk}
        logprobs, entropy, log_mass, _ = linear_logprobs(a, b, labels, support=Subsets.of(support), **options)
        assert log_mass is not None and entropy is not None and log_mass.max() <= 1e-6
        assert log_mass[list(WHOLE)].tolist() == [0.0, 0.0]
        total(logprobs - log_mass, logprobs, entropy, weights).backward()
        assert a.grad is not None and b.grad is not None
        return [logprobs - log_mass, logprobs, entropy, a.grad, b.grad]

    found = run_ranks(size, rank)
    assert x.grad is not None and w.grad is not None
    for values in found:
        for value, reference in zip(values[:3], expected, strict=True):
            torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(values[3].double(), x.grad, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(torch.cat([values[4] for values in found]).double(), w.grad, rtol=1e-5, atol=1e-5)


def test_nothing_outside_of_a_support_gets_a_gradient_and_one_token_has_none_at_all() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 1.0, 0.0, 2.0]])
    weight = logits.t().clone().requires_grad_()
    support = Ragged(torch.tensor([2, 1], dtype=torch.int32), torch.tensor([1, 3, 2], dtype=torch.int32))
    alone: Any = ThreadGroup(Meeting(1), 0)
    found = linear_logprobs(
        torch.eye(2),
        weight,
        torch.tensor([1, 2]),
        vocab_size=4,
        temperature=1.0,
        group=alone,
        support=Subsets.of(support),
    )
    assert found.log_mass is not None
    drawn = found.logprobs - found.log_mass
    # Logits 1 and 3 give 1 / (1 + e^2).
    assert drawn.tolist() == pytest.approx([-2.1269280110429727, 0.0], abs=1e-6) and drawn[1] == 0
    drawn.sum().backward()
    assert weight.grad is not None
    gradient = weight.grad.t()
    assert gradient[0].tolist() == pytest.approx([0.0, 0.8807970779778823, 0.0, -0.8807970779778823], abs=1e-6)
    assert gradient[0, 0] == gradient[0, 2] == 0 and not gradient[1].any()


def test_a_support_that_has_become_improbable_keeps_its_digits() -> None:
    """The support is 150 nats below the likeliest token. Without a separate sum, fp32 would lose its digits."""
    logits = torch.tensor([[150.0, 0.0, 1.0]])
    weight = logits.t().clone().requires_grad_()
    support = Ragged(torch.tensor([2], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    alone: Any = ThreadGroup(Meeting(1), 0)
    found = linear_logprobs(
        torch.eye(1), weight, torch.tensor([1]), vocab_size=3, temperature=1.0, group=alone, support=Subsets.of(support)
    )
    assert found.log_mass is not None
    drawn = found.logprobs - found.log_mass
    assert drawn.item() == pytest.approx(-1.3132616875182228, abs=2e-5)
    drawn.backward()
    assert weight.grad is not None
    assert weight.grad.t()[0].tolist() == pytest.approx([0.0, 0.7310585786300049, -0.7310585786300049], abs=2e-5)


FIELD = Ragged(torch.tensor([2, 0, 1, 3, 0], dtype=torch.int32), torch.tensor([5, 6, 7, 8, 9, 10], dtype=torch.int32))


def test_tokens_are_split_and_taken_with_their_values() -> None:
    parts = split_tokens(FIELD, [2, 3])
    assert [part.values.tolist() for part in parts] == [[5, 6], [7, 8, 9, 10]]
    taken = take_tokens(FIELD, torch.tensor([3, 1, 0, 3]))
    assert taken.counts.tolist() == [3, 0, 2, 3] and taken.values.tolist() == [8, 9, 10, 5, 6, 8, 9, 10]
    assert take_tokens(FIELD, torch.tensor([], dtype=torch.int64)).values.tolist() == []
    square = Ragged(FIELD.counts[:4].view(2, 2), FIELD.values)
    assert take_tokens(square, torch.tensor([2])).values.tolist() == [7]


@pytest.mark.usefixtures("rank_threads")
def test_rows_move_with_all_values_of_their_tokens_and_with_further_dimensions() -> None:
    lengths, holders = np.array([2, 1, 2]), np.array([0, 1, 0])  # rows 0 and 2 on the first rank, row 1 on the second
    wanted = [np.array([1]), np.array([2, 0]), np.array([2, 0])]
    mine = [
        Ragged(torch.cat([FIELD.counts[:2], FIELD.counts[3:]]), FIELD.values[[0, 1, 3, 4, 5]]),
        Ragged(FIELD.counts[2:3], FIELD.values[2:3]),
    ]
    none = Ragged(FIELD.counts[:0], FIELD.values[:0])

    def body(group: ThreadGroup) -> tuple[list[int], list[int], Tensor]:
        field = [*mine, none][group.rank()]
        moved = move_ragged(field, lengths, holders, wanted)
        pairs = {"x": torch.stack([field.counts, -field.counts], dim=1)}
        return moved.counts.tolist(), moved.values.tolist(), move_rows(pairs, lengths, holders, wanted)["x"]

    found = run_ranks(3, body)
    assert [each[:2] for each in found] == [([1], [7]), *[([3, 0, 2, 0], [8, 9, 10, 5, 6])] * 2]
    assert [each[2].tolist() for each in found] == [[[1, -1]], *[[[3, -3], [0, 0], [2, -2], [0, 0]]] * 2]
