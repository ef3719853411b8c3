from __future__ import annotations

import torch

from rlhf_mcore.algorithms.kl import reverse_kl


def test_by_hand() -> None:
    logprobs, teacher = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -0.25, 7.0])
    found = reverse_kl(logprobs, teacher, torch.tensor([True, True, False]))
    assert found.tolist() == [0.5, -1.75, 0.0]


def test_in_expectation_its_policy_gradient_is_that_of_the_reverse_kl() -> None:
    """Over a vocabulary of 7, sum_a pi(a) A(a) grad log pi(a) with A = -k1 is -grad sum_a pi(a) (log pi(a) - log t(a))."""
    torch.manual_seed(1)
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(7, dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    advantages = -reverse_kl(logprobs.detach(), teacher, torch.ones(7, dtype=torch.bool))
    (gained,) = torch.autograd.grad((logprobs.exp().detach() * advantages * logprobs).sum(), logits, retain_graph=True)
    (divergence,) = torch.autograd.grad(torch.sum(logprobs.exp() * (logprobs - teacher)), logits)
    torch.testing.assert_close(gained, -divergence, rtol=0, atol=1e-6)
    assert gained.abs().max() > 0.1
