"""Compare divergences from a teacher's distribution with their definition in double precision, and check their memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mcore.algorithms.kl import Divergence
from rlhf_mcore.parallel.logprobs import Subsets, linear_logprobs
from rlhf_mcore.parallel.top_tokens import TeacherTopTokens, top_tokens
from rlhf_mcore.types import Ragged
from tests.unit.pairs import pairwise
from tests.unit.parallel.world import Meeting, ThreadGroup, rank_threads, run_ranks  # noqa: F401

TOKENS, HIDDEN, VOCAB, TEMPERATURE = 14, 6, 11, 0.7
TEACHER_VOCAB = 13  # the teacher knows tokens that the student does not
KINDS = (("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.5), ("jsd", 0.1))


def layers(width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states and weights of a student and of a larger teacher."""
    generator = torch.Generator().manual_seed(5)
    shapes = (TOKENS, HIDDEN), (width, HIDDEN), (TOKENS, 9), (16, 9)
    student, weight, teacher, other = (torch.randn(*shape, generator=generator) for shape in shapes)
    return student, weight, teacher, other


def definition(kind: str, beta: float, t: Tensor, p: Tensor) -> Tensor:
    """Compute the divergence of probabilities [N, V] without the teacher's zeros."""
    if kind == "forward_kl":
        return (t * (t / p).log()).sum(1)
    if kind == "reverse_kl":
        return (p * (p / t).log()).sum(1)
    m = beta * t + (1 - beta) * p
    return beta * (t * (t / m).log()).sum(1) + (1 - beta) * (p * (p / m).log()).sum(1)


def together(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Return the probabilities of ``ids`` [N, count], and the sum for all other tokens, if there are any."""
    if count == VOCAB:
        return values
    chosen = values.gather(1, ids)
    return torch.cat([chosen, values.sum(1, keepdim=True) - chosen.sum(1, keepdim=True)], dim=1)


@pytest.mark.usefixtures("rank_threads")
@pairwise(
    ("kind, beta", list(KINDS)),
    ("count", [1, 4, VOCAB]),
    ("size, width, teacher_size, chunk", [(1, VOCAB, 2, None), (2, 12, 1, 3), (4, 16, 4, 5), (1, 16, 1, 14)]),
)
def test_value_and_gradients_are_those_of_the_definition(
    kind: str, beta: float, count: int, size: int, width: int, teacher_size: int, chunk: int | None
) -> None:
    hidden, weight, teacher, other = layers(width)
    t = ((teacher @ other[:VOCAB].t()).double() / TEMPERATURE).softmax(1)
    x, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    p = (x @ w[:VOCAB].t() / TEMPERATURE).softmax(1)
    ids = t.topk(count).indices
    expected = definition(kind, beta, together(t, ids, count), together(p, ids, count))
    tokens, labels = torch.arange(1, TOKENS + 1) / TOKENS, torch.arange(TOKENS) % VOCAB
    (tokens * expected).sum().backward()

    def of_teacher(group: ThreadGroup) -> Tensor:
        own = other.chunk(teacher_size)[group.rank()]
        return top_tokens(
            teacher, own, count, vocab_size=VOCAB, temperature=TEMPERATURE, group=group, chunk_tokens=chunk
        )  # type: ignore[arg-type]

    top, *same = run_ranks(teacher_size, of_teacher)
    assert all(torch.equal(top, each) for each in same)

    def of_student(group: ThreadGroup) -> list[Tensor]:
        a, b = hidden.clone().requires_grad_(), weight.chunk(size)[group.rank()].clone().requires_grad_()
        compared = TeacherTopTokens.of(top, Divergence(kind, beta))
        options: Any = {"vocab_size": VOCAB, "temperature": TEMPERATURE, "group": group, "chunk_tokens": chunk}
        found = linear_logprobs(a, b, labels, with_entropy=False, compared=compared, **options).divergence
        assert found is not None
        (tokens * found).sum().backward()
        assert a.grad is not None and b.grad is not None
        return [found, a.grad, b.grad]

    found = run_ranks(size, of_student)
    assert x.grad is not None and w.grad is not None and x.grad.abs().max() > 0.01
    for values in found:
        torch.testing.assert_close(values[0].double(), expected, rtol=1e-5, atol=5e-6)
        torch.testing.assert_close(values[1].double(), x.grad, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(torch.cat([values[2] for values in found]).double(), w.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_other_results_and_gradients_are_there_beside_it(chunk: int | None) -> None:
    """A loss of all four results is the sum of the losses of each."""
    hidden, weight, teacher, other = layers(VOCAB)
    alone: Any = ThreadGroup(Meeting(1), 0)
    options: Any = {"vocab_size": VOCAB, "temperature": TEMPERATURE, "group": alone, "chunk_tokens": chunk}
    top = top_tokens(teacher, other, 4, **options)
    support = Ragged(torch.full((TOKENS,), 3, dtype=torch.int32), torch.arange(3, dtype=torch.int32).repeat(TOKENS))
    given: Any = {"support": Subsets.of(support), "compared": TeacherTopTokens.of(top, Divergence("jsd", 0.3))}

    def gradient(*names: str) -> Tensor:
        w = weight.clone().requires_grad_()
        found = linear_logprobs(hidden, w, torch.zeros(TOKENS, dtype=torch.int64), **given, **options)
        sum(getattr(found, name).square().sum() for name in names).backward()
        assert w.grad is not None
        return w.grad

    parts = [gradient(name) for name in ("logprobs", "entropy", "log_mass", "divergence")]
    assert all(part.abs().max() > 1e-3 for part in parts)
    whole = gradient("logprobs", "entropy", "log_mass", "divergence")
    torch.testing.assert_close(whole, torch.stack(parts).sum(0), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("size", [1, 2])
def test_bounded_logits_of_teacher_and_student(size: int) -> None:
    """Both distributions come from logits c tanh(z / c), and the gradient reaches z."""
    hidden, weight, teacher, other = layers(12)
    cap, theirs = 1.5, other[:12]

    def bound(z: Tensor) -> Tensor:
        return ((z / cap).tanh() * cap)[:, :VOCAB].double() / TEMPERATURE

    def rank(group: ThreadGroup) -> tuple[Tensor, ...]:
        options: Any = {"vocab_size": VOCAB, "temperature": TEMPERATURE, "group": group, "cap": cap}
        top = top_tokens(teacher, theirs.chunk(size)[group.rank()], VOCAB, **options)
        w = weight.chunk(size)[group.rank()].clone().requires_grad_()
        compared = TeacherTopTokens.of(top, Divergence("forward_kl"))
        found = linear_logprobs(hidden, w, torch.zeros(TOKENS, dtype=torch.int64), compared=compared, **options)
        assert found.divergence is not None
        found.divergence.sum().backward()
        assert w.grad is not None
        return found.divergence.detach(), w.grad

    w = weight.double().requires_grad_()
    t, p = bound(teacher @ theirs.t()).softmax(1), bound(hidden.double() @ w.t()).softmax(1)
    expected = definition("forward_kl", 0.5, t, p)
    expected.sum().backward()
    divergences, gradients = zip(*run_ranks(size, rank), strict=True)
    for divergence in divergences:
        torch.testing.assert_close(divergence.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(gradients).double(), w.grad, rtol=1e-4, atol=1e-5)


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    """No pass of the teacher or the student, forward or backward, makes N * V = 204,800 elements."""
    tokens, vocab, width, count, chunk = 400, 512, 4, 8, 16
    alone: Any = ThreadGroup(Meeting(1), 0)
    options: Any = {"vocab_size": vocab, "temperature": 1.0, "group": alone, "chunk_tokens": chunk}
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    with Largest() as largest:
        with torch.no_grad():
            top = top_tokens(torch.randn(tokens, width), torch.randn(vocab, width), count, **options)
        compared = TeacherTopTokens.of(top, Divergence("jsd"))
        found = linear_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), compared=compared, **options)
        assert found.divergence is not None
        found.divergence.sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().max() > 0
    assert largest.numel == chunk * vocab == 8192 > top.numel()


@pytest.mark.parametrize(
    "logits", [(0.0, -300.0, -200.0, 100.0), (-200.0, 100.0, 95.0, -300.0)], ids=["others", "theirs"]
)
def test_a_student_that_is_certain_has_finite_gradients(logits: tuple[float, ...]) -> None:
    """The student's probabilities underflow for the teacher's tokens, or for all other tokens."""
    alone: Any = ThreadGroup(Meeting(1), 0)
    options: Any = {"vocab_size": 4, "temperature": 1.0, "group": alone}
    top = top_tokens(torch.eye(1), torch.tensor([[0.0], [9.0], [8.0], [-300.0]]), 2, **options)
    for kind, beta in KINDS:
        weight = torch.tensor(logits)[:, None].requires_grad_()
        compared = TeacherTopTokens.of(top, Divergence(kind, beta))
        found = linear_logprobs(torch.eye(1), weight, torch.tensor([0]), compared=compared, **options).divergence
        assert found is not None and found.isfinite().all() and found > 0
        found.sum().backward()
        assert weight.grad is not None and weight.grad.isfinite().all()


def test_who_agrees_with_the_teacher_has_no_divergence_and_no_gradient() -> None:
    alone: Any = ThreadGroup(Meeting(1), 0)
    options: Any = {"vocab_size": VOCAB, "temperature": TEMPERATURE, "group": alone}
    hidden, weight, _, _ = layers(VOCAB)
    weight.requires_grad_()
    for kind, beta in KINDS:
        with torch.no_grad():
            top = top_tokens(hidden, weight, 4, **options)
        compared = TeacherTopTokens.of(top, Divergence(kind, beta))
        found = linear_logprobs(hidden, weight, torch.zeros(TOKENS, dtype=torch.int64), compared=compared, **options)
        assert found.divergence is not None and found.divergence.abs().max() < 1e-6
        (gradient,) = torch.autograd.grad(found.divergence.sum(), weight)
        assert gradient.abs().max() < 1e-5
