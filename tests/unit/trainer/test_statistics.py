from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from rlhf_mcore.trainer import statistics
from rlhf_mcore.trainer.statistics import (
    Graded,
    bootstrap_interval,
    compare,
    estimates,
    ks_of,
    length_quantiles,
    majority,
    majority_at_k,
    means,
    pass_at_k,
    share_interval,
    sign_test,
)


def row(index: int, sample: int, correct: bool, answer: str = "", num_tokens: int = 4, source: str = "a") -> Graded:
    return Graded(f"p{index}", index, source, sample, float(correct), correct, answer, num_tokens, num_tokens > 7)


# Two prompts with four samples each. By hand: p0 has two of four right, its majority is the wrong 7 (three votes are 7, 4, 4 and
# one abstains: 4 leads); p1 has one of four right and all four answers differ.
ROWS = [
    row(0, 0, False, "7"),
    row(0, 1, True, "4"),
    row(0, 2, True, "4", 8),
    row(0, 3, False, ""),
    row(1, 0, True, "1", 2),
    row(1, 1, False, "2", 2),
    row(1, 2, False, "3", 2),
    row(1, 3, False, "5", 2),
]


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (5, 2, 2, 7 / 10),
        (10, 3, 5, 11 / 12),
        (4, 1, 4, 1.0),
        (4, 3, 2, 1.0),
        (7, 0, 3, 0.0),
        (3, 2, 1, 2 / 3),
        (1, 1, 1, 1),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow() -> None:
    assert pass_at_k(10_000, 1, 100) == pytest.approx(0.01, abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "4", "5"], "4", 1.0),
        (["4", "5", "5"], "4", 0.0),
        (["4", "5"], "4", 0.5),
        (["4", "5", "6"], "6", 1 / 3),
        (["", "", "4"], "4", 1.0),  # who has no answer does not vote
        (["", ""], "4", 0.0),
    ],
)
def test_majority(answers: list[str], right: str, expected: float) -> None:
    assert majority(answers, [answer == right for answer in answers]) == pytest.approx(expected)


def test_majority_at_k_is_the_mean_over_disjoint_runs() -> None:
    answers = ["4", "4", "5", "5", "4"]  # runs of two: 44 right, 55 wrong; the fifth is left over
    assert majority_at_k(answers, [answer == "4" for answer in answers], 2) == 0.5


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_which_ks(n: int, expected: list[int]) -> None:
    assert ks_of(n) == expected


def test_means_by_hand() -> None:
    assert means(ROWS) == pytest.approx(
        {
            "reward": 0.375,
            "accuracy": 0.375,
            "response_length_mean": 3.5,
            "truncated_fraction": 0.125,
            "pass_at_2": (5 / 6 + 1 / 2) / 2,
            "pass_at_4": 1.0,
            "majority_at_2": ((0.5 + 1) / 2 + (0.5 + 0) / 2) / 2,
            "majority_at_4": (1 + 1 / 4) / 2,
        }
    )


def test_one_sample_has_no_further_figures() -> None:
    assert list(means([ROWS[0]])) == ["reward", "accuracy", "response_length_mean", "truncated_fraction"]


def test_means_do_not_depend_on_the_order_of_rows() -> None:
    scores = [0.1, 0.7, 1e16, 0.3, -1e16, 0.2]
    rows = [replace(row(i, 0, False), score=value) for i, value in enumerate(scores)]
    assert means(rows) == means(rows[::-1])
    assert means(rows)["reward"] == pytest.approx(1.3 / 6)


def test_length_quantiles_are_lengths_that_occurred() -> None:
    rows = [row(i, 0, True, num_tokens=i + 1) for i in range(20)]
    assert length_quantiles(rows) == {"response_length_p50": 10, "response_length_p95": 19, "response_length_max": 20}


@pytest.mark.parametrize(
    ("wins", "losses", "p"),
    [(8, 2, 112 / 1024), (2, 8, 112 / 1024), (5, 5, 1.0), (0, 0, 1.0), (6, 0, 2 / 64), (1, 0, 1.0)],
)
def test_sign_test(wins: int, losses: int, p: float) -> None:
    assert sign_test(wins, losses) == p


def test_the_bootstrap_agrees_with_the_normal_approximation() -> None:
    values = np.array([1.0] * 200 + [0.0] * 200)[:, None]
    low, high = bootstrap_interval(values, seed=3)
    half_width = 1.96 * 0.5 / 400**0.5
    assert low[0] == pytest.approx(0.5 - half_width, abs=0.006)
    assert high[0] == pytest.approx(0.5 + half_width, abs=0.006)


def test_the_bootstrap_is_fixed_by_its_seed_and_not_by_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(37, 2))
    whole = bootstrap_interval(values, seed=5)
    assert not np.array_equal(whole, bootstrap_interval(values, seed=6))
    monkeypatch.setattr(statistics, "INDICES_PER_BLOCK", 100)
    assert np.array_equal(whole, bootstrap_interval(values, seed=5))


def test_the_bootstrap_draws_prompts_and_not_responses() -> None:
    # 16 equal responses per prompt say no more about the policy than one does.
    once = [row(i, 0, i % 2 == 0, "1") for i in range(20)]
    often = [replace(r, sample=sample) for r in once for sample in range(16)]
    assert estimates(often, 0)["accuracy"] == estimates(once, 0)["accuracy"]


# Wilson's 95 % intervals as Newcombe printed them (1998, Statistics in Medicine 17, 857, table I, method 3), to four places.
PUBLISHED = {
    (81, 263): (0.2553, 0.3662),
    (15, 148): (0.0624, 0.1605),
    (0, 20): (0.0, 0.1611),
    (1, 29): (0.0061, 0.1718),
}


@pytest.mark.parametrize("right", PUBLISHED)
def test_intervals_of_shares_are_the_published_ones(right: tuple[int, int]) -> None:
    count, size = right
    low, high = share_interval([1.0] * count + [0.0] * (size - count), size)
    assert (low, high) == pytest.approx(PUBLISHED[right], abs=6e-5)


@pytest.mark.parametrize("num_prompts", [50, 200])
@pytest.mark.parametrize("accuracy", [0.02, 0.05, 0.1, 0.3, 0.5, 0.9, 0.95])
def test_intervals_of_shares_hold_their_level(accuracy: float, num_prompts: int) -> None:
    """Exactly: the probability of each number of right answers whose interval has the accuracy in it."""
    covered = 0.0
    for right in range(num_prompts + 1):
        low, high = share_interval([1.0] * right + [0.0] * (num_prompts - right), num_prompts)
        if low <= accuracy <= high:
            covered += math.comb(num_prompts, right) * accuracy**right * (1 - accuracy) ** (num_prompts - right)
    assert 0.92 <= covered <= 0.99


@pytest.mark.parametrize("accuracy", [0.05, 0.5])
def test_intervals_of_prompts_with_several_responses_hold_their_level(accuracy: float) -> None:
    """50 prompts, of different difficulty (a beta distribution), with 8 responses each, sampled 2,000 times."""
    generator, covered, num_draws = np.random.default_rng(0), 0, 2000
    for _ in range(num_draws):
        chances = generator.beta(2 * accuracy, 2 * (1 - accuracy), 50)
        low, high = share_interval((generator.binomial(8, chances) / 8).tolist(), 400)
        covered += low <= accuracy <= high
    assert 0.94 <= covered / num_draws <= 0.99


def test_an_estimate_holds_the_mean_and_lies_in_its_interval() -> None:
    for name, estimate in estimates(ROWS, seed=0).items():
        assert estimate.value == means(ROWS)[name]
        assert estimate.low <= estimate.value <= estimate.high


def test_a_reward_of_zeros_and_ones_has_the_interval_of_a_share() -> None:
    found = estimates(ROWS, seed=0)
    assert (found["reward"].low, found["reward"].high) == share_interval([2 / 4, 1 / 4], len(ROWS))
    halved = estimates([replace(row, score=row.score / 2) for row in ROWS], seed=0)["reward"]
    assert (halved.low, halved.high) == (1 / 8, 2 / 8)  # the bootstrap over two prompts reaches their means


def test_a_comparison_by_hand() -> None:
    first = {"a": 0.0, "b": 0.5, "c": 1.0, "d": 0.25}
    second = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 0.0}
    found = compare(first, second, seed=0)
    assert found.difference.value == pytest.approx((1.0 + 0.5 + 0.0 - 0.25) / 4)
    assert (found.wins, found.losses, found.ties) == (2, 1, 1)
    assert found.sign_test_p == 1.0
    assert -0.25 <= found.difference.low < found.difference.value < found.difference.high <= 1.0


def test_pairing_removes_what_prompts_have_in_common() -> None:
    hard_and_easy = {str(i): float(i % 2) for i in range(100)}
    better = {key: value + 0.1 for key, value in hard_and_easy.items()}
    difference = compare(hard_and_easy, better, seed=0).difference
    assert difference.low == pytest.approx(0.1) and difference.high == pytest.approx(0.1)


def test_different_prompts_cannot_be_paired() -> None:
    with pytest.raises(AssertionError, match="different prompts"):
        compare({"a": 1.0}, {"b": 1.0}, seed=0)
