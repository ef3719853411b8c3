"""KL estimators against hand-worked values and the exact KL of two categorical distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.algorithms.kl import ESTIMATORS, kl_penalty

NAN = float("nan")
LOG2 = math.log(2.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # d = log ref - log p. Token 1: p = 1/2, ref = 1/4, d = -log 2. Token 2: p = 1/4, ref = 1/2, d = log 2.
        ("k1", [LOG2, -LOG2]),
        ("k2", [LOG2**2 / 2, LOG2**2 / 2]),
        ("k3", [LOG2 - 0.5, 1 - LOG2]),  # exp(-log 2) - 1 + log 2; exp(log 2) - 1 - log 2
    ],
)
def test_by_hand(estimator: str, expected: list[float]):
    logprobs = torch.tensor([-LOG2, -2 * LOG2])
    ref_logprobs = torch.tensor([-2 * LOG2, -LOG2])
    torch.testing.assert_close(kl_penalty(logprobs, ref_logprobs, estimator), torch.tensor(expected))


probabilities = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4).map(
    lambda masses: torch.tensor(masses, dtype=torch.float64) / sum(masses)
)


@settings(max_examples=25, deadline=None)
@given(p=probabilities, q=probabilities)
def test_expectations_over_a_categorical(p: torch.Tensor, q: torch.Tensor):
    exact = sum(pi * (math.log(pi) - math.log(qi)) for pi, qi in zip(p.tolist(), q.tolist(), strict=True))
    expectation = {name: (p * kl_penalty(p.log(), q.log(), name)).sum().item() for name in ESTIMATORS}
    assert expectation["k1"] == pytest.approx(exact, abs=1e-12)
    assert expectation["k3"] == pytest.approx(exact, abs=1e-12)
    # k2 is biased: its expectation is half the second moment of the log ratio.
    second_moment = sum(pi * math.log(pi / qi) ** 2 for pi, qi in zip(p.tolist(), q.tolist(), strict=True))
    assert expectation["k2"] == pytest.approx(second_moment / 2, abs=1e-12)
    assert (kl_penalty(p.log(), q.log(), "k3") >= 0).all()


@settings(max_examples=20, deadline=None)
@given(p=probabilities, q=probabilities)
def test_as_losses_k1_has_no_expected_gradient_and_k2_has_that_of_the_kl(p: torch.Tensor, q: torch.Tensor):
    logits = p.log().requires_grad_()
    logprobs = logits.log_softmax(0)
    exact_kl = (logprobs.exp() * (logprobs - q.log())).sum()
    (exact_gradient,) = torch.autograd.grad(exact_kl, logits, retain_graph=True)

    def expected_gradient(estimator: str) -> torch.Tensor:
        sampled = p @ kl_penalty(logprobs, q.log(), estimator)  # p is the sampling frequency: a constant
        return torch.autograd.grad(sampled, logits, retain_graph=True)[0]

    torch.testing.assert_close(expected_gradient("k1"), torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient, atol=1e-12, rtol=0)


def test_k3_is_clamped_where_exp_would_overflow():
    logprobs = torch.tensor([-200.0, 0.0], requires_grad=True)
    ref_logprobs = torch.tensor([0.0, -200.0])
    values = kl_penalty(logprobs, ref_logprobs, "k3")
    values.sum().backward()
    # d = 200 counts as 20: exp(20) - 1 - 20. d = -200: exp(-200) - 1 + 200 = 199.
    torch.testing.assert_close(values.detach(), torch.tensor([math.exp(20) - 21, 199.0]))
    # No gradient beyond the clamp; on the other side d/dlogprobs = 1 - exp(d) = 1.
    assert logprobs.grad.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_no_token_counts_for_more_than_the_clip(estimator: str):
    # d = 12 has exp(12) - 13 = 162741.8 (k3) or 72 (k2), d = -12 has 11 (k3) or 72 (k2); d = 1 is far below the clip.
    logprobs = torch.tensor([-12.0, 0.0, -1.0], requires_grad=True)
    ref_logprobs = torch.tensor([0.0, -12.0, 0.0])
    values = kl_penalty(logprobs, ref_logprobs, estimator, clip=10.0)
    values.sum().backward()
    small = {"k2": 0.5, "k3": math.e - 2}[estimator]
    assert values.tolist() == pytest.approx([10.0, 10.0, small])
    # dk2 = -d, dk3 = 1 - exp(d)
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, {"k2": -1.0, "k3": 1 - math.e}[estimator]])
    unbounded = kl_penalty(logprobs, ref_logprobs, estimator).tolist()
    assert unbounded[0] == pytest.approx({"k2": 72.0, "k3": math.exp(12) - 13}[estimator])


def test_k1_is_linear_and_stays_as_it_is():
    assert kl_penalty(torch.tensor([-30.0]), torch.tensor([0.0]), "k1", clip=10.0).tolist() == [-30.0]


def test_k3_keeps_its_digits_for_nearby_policies():
    # d = 1e-3: d^2/2 + d^3/6 + ... = 5.0016671e-7, where exp(d) - 1 - d in float32 would be off by 10 %.
    assert kl_penalty(torch.tensor(0.0), torch.tensor(1e-3), "k3").item() == pytest.approx(5.0016671e-7, rel=1e-3)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_garbage_outside_the_mask_reaches_neither_value_nor_gradient(estimator: str):
    logprobs = torch.tensor([-1.0, NAN, float("-inf"), -2.0], requires_grad=True)
    ref_logprobs = torch.tensor([-1.5, -1.0, NAN, NAN])
    mask = torch.tensor([True, False, False, False])
    values = kl_penalty(logprobs, ref_logprobs, estimator, mask=mask)
    assert values[1:].tolist() == [0.0] * 3
    values.sum().backward()
    assert logprobs.grad[1:].tolist() == [0.0] * 3
    # d = -0.5: dk1 = 1, dk2 = -d = 0.5, dk3 = 1 - exp(-0.5)
    expected = {"k1": 1.0, "k2": 0.5, "k3": 1 - math.exp(-0.5)}[estimator]
    assert logprobs.grad[0].item() == pytest.approx(expected)


def test_half_precision_inputs_are_widened_before_the_difference():
    logprobs = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert kl_penalty(logprobs, logprobs, "k3").dtype == torch.float32


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match=r"'k4'.*k1, k2, k3"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
