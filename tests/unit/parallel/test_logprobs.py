"""Against log_softmax and autograd in double precision; tensor-parallel ranks are threads, see tests/unit/parallel/world.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel import logprobs as module
from rlhf_mcore.parallel.logprobs import vocab_parallel_logprobs
from tests.unit.parallel.world import Meeting, ThreadGroup, all_reduce, run_ranks

ALONE = ThreadGroup(Meeting(1), 0)
VOCAB, PADDED = 11, 16


def plain(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition, on full logits in double precision."""
    log_p = torch.log_softmax(logits[..., :vocab_size].double() / temperature, dim=-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def ours(logits: Tensor, labels: Tensor, temperature: float = 0.7, vocab_size: int = VOCAB) -> tuple[Tensor, Tensor]:
    return vocab_parallel_logprobs(logits, labels, vocab_size=vocab_size, temperature=temperature, group=ALONE)  # type: ignore[arg-type]


def sample(*shape: int, width: int = PADDED, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(*shape, width, generator=generator) * scale
    return logits, torch.randint(0, VOCAB, shape, generator=generator)


def gradient(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor, weights: tuple[float, float]
) -> Tensor:
    """Of a sum in which every token has a weight of its own, so that tokens cannot be mixed up."""
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = function(leaf)
    tokens = torch.arange(1, logprobs.numel() + 1).view(logprobs.shape) / logprobs.numel()
    (weights[0] * (tokens * logprobs).sum() + weights[1] * (tokens.flip(0) * entropy).sum()).backward()
    assert leaf.grad is not None and leaf.grad.dtype == logits.dtype
    return leaf.grad


def test_by_hand() -> None:
    # Logits 0 and ln 3: probabilities 1/4 and 3/4; at temperature 1/2 they are 1/10 and 9/10.
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(3.0), 0.0]])
    logprobs, entropy = ours(logits, torch.tensor([1, 1]), temperature=1.0, vocab_size=2)
    assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.5623351446188083] * 2, abs=1e-6)
    logprobs, entropy = ours(logits, torch.tensor([1, 1]), temperature=0.5, vocab_size=2)
    assert logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.1)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.3250829733914482] * 2, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 3.0])
@pytest.mark.parametrize("width", [VOCAB, PADDED])
@pytest.mark.parametrize("weights", [(1.0, 0.0), (0.0, 1.0), (0.8, -0.3)], ids=["logprobs", "entropy", "both"])
def test_values_and_gradients_equal_autograd_of_the_definition(
    temperature: float, width: int, weights: tuple[float, float]
) -> None:
    logits, labels = sample(2, 9, width=width)
    values, expected = ours(logits, labels, temperature), plain(logits, labels, VOCAB, temperature)
    for value, reference in zip(values, expected, strict=True):
        assert value.dtype == torch.float32 and value.shape == labels.shape
        torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=5e-6)
    found = gradient(lambda x: ours(x, labels, temperature), logits, weights)
    reference = gradient(lambda x: plain(x, labels, VOCAB, temperature), logits.double(), weights)
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=5e-6)


def test_gradients_equal_finite_differences_of_the_forward_pass() -> None:
    logits, labels = sample(3, scale=1.0)

    def loss(x: Tensor) -> float:
        logprobs, entropy = ours(x, labels)
        return float((0.8 * logprobs.double() - 0.3 * entropy.double()) @ torch.tensor([1.0, 2.0, 3.0]).double())

    leaf = logits.clone().requires_grad_()
    logprobs, entropy = ours(leaf, labels)
    ((0.8 * logprobs - 0.3 * entropy) @ torch.tensor([1.0, 2.0, 3.0])).backward()
    assert leaf.grad is not None
    step = 1e-2
    for token in range(3):
        for column in range(PADDED):
            nudge = torch.zeros_like(logits)
            nudge[token, column] = step
            slope = (loss(logits + nudge) - loss(logits - nudge)) / (2 * step)
            assert float(leaf.grad[token, column]) == pytest.approx(slope, abs=2e-3)


def test_padding_gets_no_probability_and_no_gradient_whatever_it_holds() -> None:
    logits, labels = sample(5)
    clean = ours(logits, labels)
    for garbage in (1e30, float("inf"), float("nan")):
        dirty = logits.clone()
        dirty[:, VOCAB:] = garbage
        for value, reference in zip(ours(dirty, labels), clean, strict=True):
            assert torch.equal(value, reference)
        found = gradient(lambda x: ours(x, labels), dirty, (1.0, 1.0))
        assert torch.equal(found[:, VOCAB:], torch.zeros(5, PADDED - VOCAB))
        assert torch.equal(found, gradient(lambda x: ours(x, labels), logits, (1.0, 1.0)))


def test_certain_and_impossible_tokens_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]])
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = ours(leaf, torch.tensor([0, 1]), temperature=1.0, vocab_size=3)
    assert logprobs.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]


@pytest.mark.parametrize("offset", [0.0, 2.0**12, -(2.0**16)])
def test_an_offset_of_all_logits_costs_no_digits(offset: float) -> None:
    logits, labels = sample(2, 9, width=VOCAB)
    logits = (logits * 64).round() / 64  # so that the sum with the offset is exact
    near, far = (ours(x, labels, temperature=1.0) for x in (logits, logits + offset))
    assert all(torch.equal(a, b) for a, b in zip(near, far, strict=True))
    found = gradient(lambda x: ours(x, labels, temperature=1.0), logits + offset, (0.8, -0.3))
    assert torch.equal(found, gradient(lambda x: ours(x, labels, temperature=1.0), logits, (0.8, -0.3)))
    for value, reference in zip(far, plain(logits, labels, VOCAB, 1.0), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("tokens", [1, 3, 4, 6, 7])
def test_chunks_change_nothing(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = sample(tokens)
    whole = (*ours(logits, labels), gradient(lambda x: ours(x, labels), logits, (0.8, -0.3)))
    monkeypatch.setattr(module, "CHUNK_TOKENS", 3)
    cut = (*ours(logits, labels), gradient(lambda x: ours(x, labels), logits, (0.8, -0.3)))
    for value, reference in zip(cut, whole, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_are_not_modified(dtype: torch.dtype, temperature: float) -> None:
    logits, labels = sample(6)
    logits = logits.to(dtype)
    before = logits.clone()
    gradient(lambda x: ours(x, labels, temperature), logits, (1.0, 1.0))
    with torch.no_grad():
        ours(logits, labels, temperature)
    assert torch.equal(logits, before)


def test_bf16_logits_are_widened_first() -> None:
    logits, labels = sample(20)
    logits = logits.bfloat16()
    for value, reference in zip(ours(logits, labels), plain(logits, labels, VOCAB, 0.7), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=5e-6)
    found = gradient(lambda x: ours(x, labels), logits, (0.8, -0.3))
    reference = gradient(lambda x: plain(x, labels, VOCAB, 0.7), logits.double(), (0.8, -0.3))
    torch.testing.assert_close(found.double(), reference, rtol=2**-8, atol=1e-6)  # rounded once, to bf16


@pytest.mark.parametrize("vocab_size", [16, 11, 5])  # 5: the last rank of four holds nothing but padding
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_equal_the_whole(size: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module, "CHUNK_TOKENS", 4)
    logits, labels = sample(2, 5, width=-(-vocab_size // size) * size)
    labels = labels % vocab_size

    def rank(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        mine = logits.chunk(size, dim=-1)[group.rank()]

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            return vocab_parallel_logprobs(x, labels, vocab_size=vocab_size, temperature=0.7, group=group)  # type: ignore[arg-type]

        return *function(mine), gradient(function, mine, (0.8, -0.3))

    results = run_ranks(size, rank)
    for which, reference in enumerate(plain(logits, labels, vocab_size, 0.7)):
        for result in results:
            torch.testing.assert_close(result[which].double(), reference, rtol=1e-6, atol=5e-6)
            assert torch.equal(result[which], results[0][which])
    found = torch.cat([result[2] for result in results], dim=-1)
    reference = gradient(lambda x: plain(x, labels, vocab_size, 0.7), logits.double(), (0.8, -0.3))
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=5e-6)
