"""Compare samples of the reference engine with softmax, and its truncation with literals."""

from __future__ import annotations

import pytest
import torch

from rlhf_mcore.rollout.hf.engine import draw, log_distribution, truncate
from rlhf_mcore.types import Sampling


def test_draws_follow_softmax_at_the_temperature() -> None:
    rows = 20000
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = (2.0 * probabilities.log()).expand(rows, 4)  # dividing by temperature 2 gives the logs again
    generators = [torch.Generator().manual_seed(row) for row in range(rows)]
    sampling = Sampling(temperature=2.0)
    chosen, logprobs = draw(log_distribution(logits, sampling), sampling, generators)
    frequencies = torch.bincount(chosen, minlength=4) / rows
    assert torch.allclose(frequencies, probabilities, atol=0.015)  # four standard deviations
    assert torch.allclose(logprobs, probabilities.log()[chosen], atol=1e-6)


def test_truncation_keeps_the_largest_and_the_smallest_nucleus() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    kept = lambda top_k, top_p: truncate(logits, top_k, top_p).isfinite()[0].tolist()  # noqa: E731
    assert kept(-1, 1.0) == [True, True, True, True]
    assert kept(2, 1.0) == [False, True, False, True]
    assert kept(-1, 0.65) == [False, True, False, True]  # 0.4 + 0.3 reaches it
    assert kept(-1, 0.75) == [False, True, True, True]
    assert kept(-1, 0.01) == [False, True, False, False]
    assert kept(3, 0.5) == [False, True, False, True]  # probabilities 4/9, 3/9, 2/9


def test_logprobs_after_truncation_are_of_what_is_left() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    one, greedy = Sampling(top_k=1), Sampling(temperature=0.0)
    chosen, logprobs = draw(log_distribution(logits, one), one, [torch.Generator().manual_seed(0)])
    assert chosen.tolist() == [1]
    assert logprobs.tolist() == [0.0]
    _, logprobs = draw(log_distribution(logits, greedy), greedy, [torch.Generator()])
    assert logprobs[0].exp().item() == pytest.approx(0.4)
