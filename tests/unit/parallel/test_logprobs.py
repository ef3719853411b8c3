"""Compare with log_softmax and autograd in double precision.

Tensor-parallel ranks are threads, see tests/unit/parallel/world.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mcore.mcore.dry_run import LiveBytes
from rlhf_mcore.parallel import fused_softmax
from rlhf_mcore.parallel import logprobs as module
from rlhf_mcore.parallel.logprobs import Subsets, linear_logprobs
from tests.logits import given_logprobs
from tests.unit.pairs import pairwise
from tests.unit.parallel.world import Meeting, ThreadGroup, all_reduce, run_ranks

ALONE = ThreadGroup(Meeting(1), 0)
VOCAB, PADDED = 11, 16


@pytest.fixture(params=["torch", "fused"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use plain torch operations, or the operations that a GPU fuses into one kernel, here executed separately."""
    if request.param == "fused":
        monkeypatch.setattr(fused_softmax, "_compile", lambda function: function)
        monkeypatch.setattr(
            module, "_find_kernels", lambda hidden, wanted: fused_softmax if wanted[1:] == (None, None) else None
        )


def plain(logits: Tensor, labels: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute the definition on full logits in double precision."""
    log_p = torch.log_softmax(logits[..., :vocab_size].double() / temperature, dim=-1)
    return log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def ours(
    logits: Tensor, labels: Tensor, temperature: float = 0.7, vocab_size: int = VOCAB, **options: Any
) -> tuple[Tensor, Tensor]:
    logprobs, entropy, _, _ = given_logprobs(
        logits, labels, vocab_size=vocab_size, temperature=temperature, group=ALONE, **options
    )
    assert entropy is not None
    return logprobs, entropy


def sample(*shape: int, width: int = PADDED, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    logits = torch.randn(*shape, width, generator=generator) * scale
    return logits, torch.randint(0, VOCAB, shape, generator=generator)


def gradient(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], logits: Tensor, weights: tuple[float, float]
) -> Tensor:
    """Return the gradient of a sum in which each token has another weight, so that no two tokens can be confused."""
    leaf = logits.detach().clone().requires_grad_()
    logprobs, entropy = function(leaf)
    tokens = torch.arange(1, logprobs.numel() + 1).view(logprobs.shape) / logprobs.numel()
    (weights[0] * (tokens * logprobs).sum() + weights[1] * (tokens.flip(0) * entropy).sum()).backward()
    assert leaf.grad is not None and leaf.grad.dtype == logits.dtype
    return leaf.grad


@pytest.mark.usefixtures("kernels")
def test_by_hand() -> None:
    # Logits 0 and ln 3 have probabilities 1/4 and 3/4, and 1/10 and 9/10 at temperature 1/2.
    logits = torch.tensor([[0.0, math.log(3.0)], [math.log(3.0), 0.0]])
    logprobs, entropy = ours(logits, torch.tensor([1, 1]), temperature=1.0, vocab_size=2)
    assert logprobs.tolist() == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.5623351446188083] * 2, abs=1e-6)
    logprobs, entropy = ours(logits, torch.tensor([1, 1]), temperature=0.5, vocab_size=2)
    assert logprobs.tolist() == pytest.approx([math.log(0.9), math.log(0.1)], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.3250829733914482] * 2, abs=1e-6)


@pytest.mark.usefixtures("kernels")
@pairwise(
    ("temperature", [1.0, 0.7, 3.0]),
    ("width", [VOCAB, PADDED]),
    ("weights", [(1.0, 0.0), (0.0, 1.0), (0.8, -0.3)]),
)
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


@pytest.mark.usefixtures("kernels")
def test_padding_gets_no_probability_and_no_gradient_whatever_it_holds() -> None:
    logits, labels = sample(5)
    clean = ours(logits, labels)
    for garbage in (1e30, float("inf"), float("nan")):
        dirty = logits.clone()
        dirty[:, VOCAB:] = garbage
        for value, reference in zip(ours(dirty, labels), clean, strict=True):
            assert torch.equal(value, reference)
        for chunk in (None, 2):
            found = gradient(lambda x, chunk=chunk: ours(x, labels, chunk_tokens=chunk), dirty, (1.0, 1.0))
            assert torch.equal(found[:, VOCAB:], torch.zeros(5, PADDED - VOCAB))
            same = gradient(lambda x, chunk=chunk: ours(x, labels, chunk_tokens=chunk), logits, (1.0, 1.0))
            assert torch.equal(found, same)


@pytest.mark.usefixtures("kernels")
def test_certain_and_impossible_tokens_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [1e4, -1e4, 0.0]])
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = ours(leaf, torch.tensor([0, 1]), temperature=1.0, vocab_size=3)
    assert logprobs.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (logprobs.sum() + entropy.sum()).backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[0.0, 0.0, 0.0], [-1.0, 1.0, 0.0]]


@pytest.mark.usefixtures("kernels")
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


@pytest.mark.parametrize("where", ["softmax", "logits"])
@pytest.mark.parametrize("tokens", [1, 3, 4, 6, 7])
def test_chunks_change_nothing(tokens: int, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are given as a whole, or computed in chunks of three tokens."""
    logits, labels = sample(tokens)
    whole = (*ours(logits, labels), gradient(lambda x: ours(x, labels), logits, (0.8, -0.3)))
    if where == "softmax":
        monkeypatch.setattr(module, "CACHE_BYTES", 3 * 4 * PADDED)
    chunk = 3 if where == "logits" else None

    def in_chunks(x: Tensor) -> tuple[Tensor, Tensor]:
        return ours(x, labels, chunk_tokens=chunk)

    cut = (*in_chunks(logits), gradient(in_chunks, logits, (0.8, -0.3)))
    # Kernels see other shapes, so the bound is the rounding that the test of the definition allows.
    for value, reference in zip(cut, whole, strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=5e-6)


def test_a_second_backward_pass_is_the_first_one_again_or_refused() -> None:
    """Recomputed logits allow a second pass. If logits have become their gradient, torch itself rejects the second pass."""
    logits, labels = sample(5)
    again, once = (logits.clone().requires_grad_() for _ in range(2))
    logprobs, entropy = ours(again, labels, chunk_tokens=2)
    logprobs.sum().backward(retain_graph=True)
    entropy.sum().backward()
    sum(x.sum() for x in ours(once, labels, chunk_tokens=2)).backward()  # type: ignore[union-attr]
    assert again.grad is not None and once.grad is not None
    torch.testing.assert_close(again.grad, once.grad, rtol=1e-6, atol=1e-6)
    logprobs, entropy = ours(once, labels)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        entropy.sum().backward()


HIDDEN = 6


def output_layer(tokens: int, vocab_size: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the padded weight and labels."""
    generator = torch.Generator().manual_seed(tokens)
    hidden, weight = torch.randn(tokens, HIDDEN, generator=generator), torch.randn(width, HIDDEN, generator=generator)
    return hidden, weight, torch.randint(0, vocab_size, (tokens,), generator=generator)


@pytest.mark.usefixtures("kernels")
@pairwise(
    ("weights", [(1.0, 0.0), (0.8, -0.3)]),
    ("chunk", [None, 3, 7]),
    ("size, vocab_size", [(1, 11), (2, 11), (4, 5)]),
)
def test_an_output_layer_in_chunks_is_that_of_the_definition(
    weights: tuple[float, float], chunk: int | None, size: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, and gradients of hidden states and weight, are equal on one rank and with a sharded vocabulary."""
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    hidden, weight, labels = output_layer(14, vocab_size, -(-vocab_size // size) * size)
    tokens = torch.arange(1, 15) / 14

    def loss(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        total = weights[0] * (tokens * logprobs).sum()
        return total if entropy is None else total + weights[1] * (tokens.flip(0) * entropy).sum()

    def rank(group: ThreadGroup) -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        w = weight.chunk(size)[group.rank()].clone().requires_grad_()
        logprobs, entropy, _, _ = linear_logprobs(
            x,
            w,
            labels,
            vocab_size=vocab_size,
            temperature=0.7,
            group=group,  # type: ignore[arg-type]
            chunk_tokens=chunk,
            with_entropy=bool(weights[1]),
        )
        loss(logprobs, entropy).backward()
        assert x.grad is not None and w.grad is not None and (entropy is None) == (weights[1] == 0)
        return [logprobs, x.grad, w.grad, *([] if entropy is None else [entropy])]

    found = run_ranks(size, rank)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = plain(x @ w.t(), labels, vocab_size, 0.7)
    loss(*expected).backward()
    assert x.grad is not None and w.grad is not None
    for values in found:
        torch.testing.assert_close(values[0].double(), expected[0], rtol=1e-6, atol=5e-6)
        torch.testing.assert_close(values[1].double(), x.grad, rtol=1e-5, atol=5e-6)
        if weights[1]:
            torch.testing.assert_close(values[3].double(), expected[1], rtol=1e-6, atol=5e-6)
    torch.testing.assert_close(torch.cat([values[2] for values in found]).double(), w.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_logits_with_a_product_added(chunk: int | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output layer with adapters and a frozen weight has the same values and gradients of hidden states and both factors."""
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    hidden, weight, labels = output_layer(14, VOCAB, 12)
    factors = torch.randn(2, HIDDEN), torch.randn(12, 2)
    tokens = torch.arange(1, 15) / 14

    def rank(group: ThreadGroup) -> list[Tensor]:
        x, a = (tensor.clone().requires_grad_() for tensor in (hidden, factors[0]))
        b = factors[1].chunk(size)[group.rank()].clone().requires_grad_()
        logprobs, entropy, _, _ = linear_logprobs(
            x,
            weight.chunk(size)[group.rank()],
            labels,
            vocab_size=VOCAB,
            temperature=0.7,
            group=group,  # type: ignore[arg-type]
            chunk_tokens=chunk,
            added=(x @ a.t(), b),
        )
        assert entropy is not None
        (0.8 * (tokens * logprobs).sum() - 0.3 * (tokens.flip(0) * entropy).sum()).backward()
        assert x.grad is not None and a.grad is not None and b.grad is not None
        return [logprobs, entropy, x.grad, a.grad, b.grad]

    found = run_ranks(size, rank)
    x, a, b = (tensor.double().requires_grad_() for tensor in (hidden, *factors))
    logprobs, entropy = plain(x @ (weight.double() + b @ a).t(), labels, VOCAB, 0.7)
    (0.8 * (tokens * logprobs).sum() - 0.3 * (tokens.flip(0) * entropy).sum()).backward()
    for values in found:
        for value, expected in zip(values, (logprobs, entropy, x.grad, a.grad), strict=False):
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([values[4] for values in found]).double(), b.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("size", [1, 2])
def test_bounded_logits(chunk: int | None, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits z become c tanh(z / c), before padding is removed and the temperature divides them."""
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    hidden, weight, labels = output_layer(14, VOCAB, 12)
    tokens, cap = torch.arange(1, 15) / 14, 1.5

    def rank(group: ThreadGroup) -> list[Tensor]:
        x = hidden.clone().requires_grad_()
        w = weight.chunk(size)[group.rank()].clone().requires_grad_()
        logprobs, entropy, _, _ = linear_logprobs(
            x,
            w,
            labels,
            vocab_size=VOCAB,
            temperature=0.7,
            group=group,  # type: ignore[arg-type]
            chunk_tokens=chunk,
            cap=cap,
        )
        assert entropy is not None
        (0.8 * (tokens * logprobs).sum() - 0.3 * (tokens.flip(0) * entropy).sum()).backward()
        assert x.grad is not None and w.grad is not None
        return [logprobs, entropy, x.grad, w.grad]

    found = run_ranks(size, rank)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = x @ w.t()
    assert logits.abs().max() > 2 * cap
    logprobs, entropy = plain((logits / cap).tanh() * cap, labels, VOCAB, 0.7)
    (0.8 * (tokens * logprobs).sum() - 0.3 * (tokens.flip(0) * entropy).sum()).backward()
    for values in found:
        for value, expected in zip(values, (logprobs, entropy, x.grad), strict=False):
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([values[3] for values in found]).double(), w.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("chunk", "rows"), [(8, 8), (64, 64)])
def test_only_a_chunk_of_logits_is_there_at_a_time(chunk: int, rows: int) -> None:
    """Checks every tensor that the forward and backward pass make or keep."""
    hidden, weight, labels = output_layer(64, 500, 500)
    hidden.requires_grad_()
    weight.requires_grad_()
    made: list[int] = []
    kept: list[int] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            made.extend(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(x, Tensor))
            return out

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with Count(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        logprobs, entropy, _, _ = linear_logprobs(
            hidden,
            weight,
            labels,
            vocab_size=500,
            temperature=1.0,
            group=ALONE,  # type: ignore[arg-type]
            chunk_tokens=chunk,
        )
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
    assert max(made) == rows * 500
    assert (max(kept) == 64 * 500) == (chunk == 64), "logits that fit stay for the backward pass"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("with_entropy", "has_support"), [(False, False), (True, False), (True, True)])
def test_peak_memory_is_one_chunk_of_logits(
    dtype: torch.dtype, with_entropy: bool, has_support: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts the live bytes of both passes on tensors without data, for 2,000 tokens and a vocabulary of 151,936.

    A chunk is 512 MiB of fp32 logits, or half in bf16; a softmax has two tensors of 64 MiB, as on a GPU. Neither the gradient of
    a chunk nor the gradient of the weight needs further memory.
    """
    monkeypatch.setattr(module, "CACHE_BYTES", 64 * 2**20)
    tokens, vocab_size, width = 2000, 151_936, 64
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, weight = (torch.empty(n, width, dtype=dtype, requires_grad=True) for n in (tokens, vocab_size))
        labels, main_grad = torch.zeros(tokens, dtype=torch.int64), torch.empty(vocab_size, width)
        support = None
        if has_support:
            ids = torch.zeros(tokens, dtype=torch.int64)
            support = Subsets(ids, ids, list(range(tokens + 1)), torch.ones(tokens, dtype=torch.bool))
        options: Any = {"vocab_size": vocab_size, "temperature": 0.7, "group": ALONE, "main_grad": main_grad}
        with LiveBytes() as counted:
            found = linear_logprobs(hidden, weight, labels, with_entropy=with_entropy, support=support, **options)
            results = [values for values in found if values is not None]
            torch.stack(results).sum().backward()
    given = sum(x.nbytes for x in (weight, main_grad))  # views of them are counted
    chunk, small = 883 * vocab_size * dtype.itemsize, 4 * 2**20  # hidden states and numbers per token
    assert len(results) == 1 + with_entropy + has_support
    assert chunk < counted.peak - given < chunk + 2 * 64 * 2**20 + small


@pytest.mark.usefixtures("kernels")
def test_no_token_at_all_gives_zero_gradients() -> None:
    hidden, weight, labels = output_layer(0, VOCAB, PADDED)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs, _, _, _ = linear_logprobs(hidden, weight, labels, vocab_size=VOCAB, temperature=1.0, group=ALONE)  # type: ignore[arg-type]
    logprobs.sum().backward()
    assert logprobs.shape == (0,) and weight.grad is not None and not weight.grad.any()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("has_main_grad", [False, True])
@pytest.mark.parametrize("chunk", [1, 1024], ids=["chunks", "whole"])
def test_the_gradient_of_a_bf16_weight_is_summed_in_fp32(chunk: int, has_main_grad: bool) -> None:
    """1024 tokens of label 1 with probability 1/2 sum to 512 times the hidden state. A bf16 sum of halves ends at 128."""
    hidden = torch.tensor([1.0, -2.0], dtype=torch.bfloat16).repeat(1024, 1)
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    main_grad = torch.full((2, 2), 3.0) if has_main_grad else None
    linear_logprobs(
        hidden,
        weight,
        torch.ones(1024, dtype=torch.int64),
        vocab_size=2,
        temperature=1.0,
        group=ALONE,  # type: ignore[arg-type]
        chunk_tokens=chunk,
        with_entropy=False,
        main_grad=main_grad,
    ).logprobs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
    if main_grad is None:
        assert weight.grad.tolist() == [[-512.0, 1024.0], [512.0, -1024.0]]
    else:
        assert main_grad.tolist() == [[-509.0, 1027.0], [515.0, -1021.0]] and weight.grad._nnz() == 0


def test_the_sum_over_chunks_is_one_product_of_cuda_without_a_copy() -> None:
    """torch supports this product only on CUDA, so the tensors here have no values."""
    ops = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.addmm.dtype_out:
                assert kwargs["out"] is args[0] and args[3] is torch.float32
                ops.append([(tuple(x.shape), x.dtype) for x in args[:3]])
                return kwargs["out"]
            return function(*args, **(kwargs or {}))

    context = SimpleNamespace(needs_input_grad=(True, True), main_grad=torch.zeros(7, 3, device="meta"))
    grad, hidden = (torch.zeros(5, width, dtype=torch.bfloat16, device="meta") for width in (7, 3))
    with Record():
        module._WeightGradient(context, torch.zeros(7, 3, dtype=torch.bfloat16, device="meta")).add(grad, hidden)
    assert ops == [[((7, 3), torch.float32), ((7, 5), torch.bfloat16), ((5, 3), torch.bfloat16)]]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_hidden_states_and_weight_are_not_modified(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, labels = output_layer(6, VOCAB, PADDED)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    before = [leaf.detach().clone() for leaf in leaves]
    for chunk in (None, 2):
        logprobs, entropy, _, _ = linear_logprobs(
            *leaves,
            labels,
            vocab_size=VOCAB,
            temperature=temperature,
            group=ALONE,  # type: ignore[arg-type]
            chunk_tokens=chunk,
        )
        assert entropy is not None
        (logprobs.sum() + entropy.sum()).backward()
        assert all(torch.equal(leaf, value) for leaf, value in zip(leaves, before, strict=True))


@pytest.mark.usefixtures("kernels")
def test_bf16_logits_are_widened_first() -> None:
    logits, labels = sample(20)
    logits = logits.bfloat16()
    for value, reference in zip(ours(logits, labels), plain(logits, labels, VOCAB, 0.7), strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), reference, rtol=1e-6, atol=5e-6)
    found = gradient(lambda x: ours(x, labels), logits, (0.8, -0.3))
    reference = gradient(lambda x: plain(x, labels, VOCAB, 0.7), logits.double(), (0.8, -0.3))
    torch.testing.assert_close(found.double(), reference, rtol=2**-8, atol=1e-6)  # rounded once, to bf16


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocab_size", [16, 11, 5])  # 5: the last rank of four holds only padding
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_ranks_equal_the_whole(size: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module, "CACHE_BYTES", 3 * 4 * 4)  # at most three rows for four ranks
    logits, labels = sample(2, 5, width=-(-vocab_size // size) * size)
    labels = labels % vocab_size

    def rank(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        mine = logits.chunk(size, dim=-1)[group.rank()]

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            logprobs, entropy, _, _ = given_logprobs(x, labels, vocab_size=vocab_size, temperature=0.7, group=group)
            assert entropy is not None
            return logprobs, entropy

        return *function(mine), gradient(function, mine, (0.8, -0.3))

    results = run_ranks(size, rank)
    for which, reference in enumerate(plain(logits, labels, vocab_size, 0.7)):
        for result in results:
            torch.testing.assert_close(result[which].double(), reference, rtol=1e-6, atol=5e-6)
            assert torch.equal(result[which], results[0][which])
    found = torch.cat([result[2] for result in results], dim=-1)
    reference = gradient(lambda x: plain(x, labels, vocab_size, 0.7), logits.double(), (0.8, -0.3))
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=5e-6)
