"""Statistics of an evaluation, without torch. Resampling uses whole prompts, because samples of one prompt are not independent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

RESAMPLES = 1000
CONFIDENCE = 0.95
INDICES_PER_BLOCK = 1 << 22  # bootstrap indices per block; bounds the memory for any number of prompts


@dataclass(frozen=True, slots=True)
class Graded:
    """A response with its grade. ``answer`` is its vote in a majority; "" abstains."""

    prompt_id: str
    index: int  # row of the prompt in the data
    data_source: str
    sample: int
    score: float
    correct: bool
    answer: str
    num_tokens: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts and its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two policies on the same prompts. ``difference``: mean of (evaluated - baseline) with its interval."""

    difference: Estimate
    wins: int  # prompts on which the evaluated policy is better
    losses: int
    ties: int
    sign_test_p: float


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, the probability that at least one of ``k`` responses is correct: 1 - C(n-c, k) / C(n, k).

    ``n``: sampled responses. ``c``: correct responses among these.

    Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv 2107.03374), eq. 1.
    """
    assert 0 <= c <= n and 1 <= k <= n, (n, c, k)
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Compute the accuracy of the most frequent answer. If answers are tied, return the mean of their accuracies.

    Self-consistency, Wang et al. 2022 (arXiv 2203.11171). An empty answer does not vote. Without any vote the result is 0.
    """
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        if answer:
            votes.setdefault(answer, []).append(right)
    most = max(map(len, votes.values()), default=0)
    leaders = [sum(right) / len(right) for right in votes.values() if len(right) == most]
    return math.fsum(leaders) / len(leaders) if leaders else 0.0


def majority_at_k(answers: Sequence[str], correct: Sequence[bool], k: int) -> float:
    """Compute the mean of ``majority`` over n // k disjoint blocks of ``k`` consecutive responses."""
    runs = range(0, len(answers) - k + 1, k)
    return math.fsum(majority(answers[i : i + k], correct[i : i + k]) for i in runs) / len(runs)


def ks_of(n: int) -> list[int]:
    """Return the values of k for pass@k and majority@k with ``n`` samples: powers of two up to n, and n."""
    return sorted({n, *(1 << i for i in range(n.bit_length()) if 1 << i <= n)})


def by_prompt(rows: Sequence[Graded]) -> dict[int, list[Graded]]:
    """Group responses by prompt. Prompts keep the data order; responses are sorted by sample number."""
    groups: dict[int, list[Graded]] = {}
    for row in sorted(rows, key=lambda row: (row.index, row.sample)):
        groups.setdefault(row.index, []).append(row)
    return groups


def prompt_values(group: Sequence[Graded]) -> dict[str, float]:
    """Compute the contribution of one prompt to every mean. ``pass_at_1`` is named accuracy."""
    n, c = len(group), sum(row.correct for row in group)
    answers, correct = [row.answer for row in group], [row.correct for row in group]
    values = {
        "reward": math.fsum(row.score for row in group) / n,
        "accuracy": c / n,
        "response_length_mean": sum(row.num_tokens for row in group) / n,
        "truncated_fraction": sum(row.truncated for row in group) / n,
    }
    for k in ks_of(n)[1:]:
        values[f"pass_at_{k}"] = pass_at_k(n, c, k)
    for k in ks_of(n)[1:]:
        values[f"majority_at_{k}"] = majority_at_k(answers, correct, k)
    return values


def means(rows: Sequence[Graded]) -> dict[str, float]:
    """Compute the means of ``prompt_values`` over prompts. The result does not depend on the order of ``rows``."""
    table = [prompt_values(group) for group in by_prompt(rows).values()]
    return {name: mean([values[name] for values in table]) for name in table[0]}


def sources(rows: Sequence[Graded]) -> dict[str, list[Graded]]:
    """Group rows by the names of their data sources."""
    names = sorted({row.data_source for row in rows})
    return {name: [row for row in rows if row.data_source == name] for name in names}


def estimates(rows: Sequence[Graded], seed: int) -> dict[str, Estimate]:
    """Compute ``means`` with confidence intervals over prompts: ``share_interval`` for shares, the bootstrap for other means."""
    table = [prompt_values(group) for group in by_prompt(rows).values()]
    names = list(table[0])
    columns = np.array([[values[name] for name in names] for values in table])
    low, high = bootstrap_interval(columns, seed)
    shares = set(names) - {"response_length_mean"} - (set() if all(row.score in (0, 1) for row in rows) else {"reward"})
    for i, name in enumerate(names):
        if name in shares:
            low[i], high[i] = share_interval(columns[:, i].tolist(), len(rows))
    values = means(rows)
    return {name: Estimate(values[name], float(low[i]), float(high[i])) for i, name in enumerate(names)}


def length_quantiles(rows: Sequence[Graded]) -> dict[str, float]:
    """Compute median, 95th percentile and maximum of response tokens. Each quantile is an observed length (nearest rank)."""
    lengths = sorted(row.num_tokens for row in rows)

    def rank(share: float) -> float:
        return float(lengths[max(math.ceil(share * len(lengths)), 1) - 1])

    return {"response_length_p50": rank(0.5), "response_length_p95": rank(0.95), "response_length_max": rank(1.0)}


def compare(first: Mapping[str, float], second: Mapping[str, float], seed: int) -> Comparison:
    """Compare paired values, one per prompt. Both mappings must have the same keys.

    The interval is a paired bootstrap (Efron & Tibshirani 1993, ch. 13): prompts are resampled, each with both values.
    The p value is an exact two-sided sign test. It ignores prompts without a difference.
    """
    assert first.keys() == second.keys(), "compared on different prompts"
    differences = [second[key] - first[key] for key in first]
    low, high = bootstrap_interval(np.array(differences)[:, None], seed)
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return Comparison(
        Estimate(mean(differences), float(low[0]), float(high[0])),
        wins=wins,
        losses=losses,
        ties=len(differences) - wins - losses,
        sign_test_p=sign_test(wins, losses),
    )


def sign_test(wins: int, losses: int) -> float:
    """Compute the exact binomial two-sided p value of ``wins`` against ``losses``, for equal probabilities. It is at most 1."""
    n = wins + losses
    tail = sum(math.comb(n, i) for i in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)


def share_interval(values: Sequence[float], num_responses: int) -> tuple[float, float]:
    """Return (low, high): the score interval (Wilson 1927, JASA 22, 209) of the mean of ``values``, a share in [0, 1] per prompt.

    The interval also keeps its level near 0 and 1. A percentile bootstrap of few prompts does not (88 % at 0.05 with 50 prompts).

    Shares of prompts with several responses vary less than values of 0 and 1. They therefore count as a larger number of prompts
    (the effective sample size of Korn and Graubard 1998, Survey Methodology 24, 193), limited by the number of responses.
    The variance also includes two additional prompts, one all wrong and one all right. Otherwise a few similar prompts would give
    a too narrow interval.
    """
    share, num_prompts = mean(values), len(values)
    others = [*values, 0.0, 1.0]
    centre = mean(others)
    variance = math.fsum((value - centre) ** 2 for value in others) / len(others)
    size = max(min(num_prompts * centre * (1 - centre) / variance, num_responses), num_prompts)
    squared = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) ** 2
    centre, half = (
        share + squared / (2 * size),
        math.sqrt(squared * (share * (1 - share) + squared / (4 * size)) / size),
    )
    divisor = 1 + squared / size
    return min(max((centre - half) / divisor, 0.0), share), max(min((centre + half) / divisor, 1.0), share)


def bootstrap_interval(values: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (low, high), each [M]: the bootstrap percentile interval of the column means of ``values`` [P, M].

    Each resample selects P rows with replacement. The indices are raw words of Philox4x64-10 (as for the order of prompts), so
    they are the same with every version of numpy.
    """
    num_rows = len(values)
    words = np.random.Philox(key=seed)
    per_block = max(INDICES_PER_BLOCK // num_rows, 1)
    drawn = []
    for start in range(0, RESAMPLES, per_block):
        count = min(per_block, RESAMPLES - start)
        indices = (words.random_raw(count * num_rows) % np.uint64(num_rows)).astype(np.int64).reshape(count, num_rows)
        drawn += [values[row].mean(axis=0) for row in indices]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.stack(drawn), [tail, 1 - tail], axis=0)
    return low, high


def mean(values: Sequence[float]) -> float:
    """Compute the mean from an exact sum, so that the result does not depend on the order."""
    return math.fsum(values) / len(values)
