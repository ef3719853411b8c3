"""Compare every advantage estimator with hand-worked values and slow loops over lists, and check shared properties."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import rlhf_mcore.algorithms.advantages  # noqa: F401  # its estimators are in the table
from rlhf_mcore.algorithms.advantages import gdpo, group_relative, grpo, rloo, whiten
from rlhf_mcore.algorithms.interfaces import ADVANTAGE_ESTIMATORS, AdvantageInputs
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.returns import gae, reinforce, reinforce_plus_plus, token_rewards
from rlhf_mcore.config.schema import AlgorithmConfig
from tests.rows import advantage_inputs, everything
from tests.unit.parallel.world import ThreadGroup, run_ranks

NAN = float("nan")


@dataclass
class Response:
    """A response as plain numbers: a reward and a value per trainable token, and the critic's value at its end."""

    group: int
    rewards: list[float]
    values: list[float]
    end: float = 0.0
    truncated: bool = False
    greedy: float = 0.0  # score of the greedy response to its prompt


def inputs(responses: list[Response], garbage: float = NAN, gap: int = 1) -> AdvantageInputs:
    """Build rows with ``gap`` positions of garbage before and between the trainable tokens."""
    width = 2 + (1 + gap) * max((len(r.rewards) for r in responses), default=0)
    shape = (len(responses), width)
    rewards, values = torch.full(shape, garbage), torch.full(shape, garbage)
    loss_mask = torch.zeros(shape, dtype=torch.bool)
    for row, response in enumerate(responses):
        places = [1 + gap + t * (1 + gap) for t in range(len(response.rewards))]
        loss_mask[row, places] = True
        rewards[row, places] = torch.tensor(response.rewards)
        values[row, places] = torch.tensor(response.values)
    made = advantage_inputs(
        rewards,
        loss_mask,
        group_ids=torch.tensor([r.group for r in responses], dtype=torch.int64),
        truncated=torch.tensor([r.truncated for r in responses], dtype=torch.bool),
        old_values=values,
        bootstrap_values=torch.tensor([r.end if r.truncated else garbage for r in responses]),
    )
    made.baselines = torch.tensor([r.greedy for r in responses], dtype=torch.float64)
    return made


def per_token(values: torch.Tensor, made: AdvantageInputs) -> list[list[float]]:
    lengths = made.rows.lengths.tolist()
    return [row[mask].tolist() for row, mask in zip(values.split(lengths), made.loss_mask.split(lengths), strict=True)]


def test_gae_by_hand():
    # lam 1/2, gamma 1. delta_2 = 1 - 1/2, delta_1 = 1/2 - 1/4, delta_0 = 1/4 - 1/2; A = delta + A_next / 2: 0, 1/2, 1/2.
    # Truncated in a state worth 2: delta_2 = 1 + 2 - 1/2 = 5/2, so 1/2, 3/2, 5/2.
    # The end of a complete response is worth nothing. Without bootstrapping, a truncated end is worth nothing either.
    responses = [
        Response(0, [0.0, 0.0, 1.0], [0.5, 0.25, 0.5], end=9.0),
        Response(1, [0.0, 0.0, 1.0], [0.5, 0.25, 0.5], end=2.0, truncated=True),
    ]
    made = inputs(responses)
    result = gae(made, AlgorithmConfig(gamma=1.0, lam=0.5, bootstrap_truncated=True))
    assert per_token(result.advantages, made) == [[0.0, 0.5, 0.5], [0.5, 1.5, 2.5]]
    assert result.returns is not None
    assert per_token(result.returns, made) == [[0.5, 0.75, 1.0], [1.0, 1.75, 3.0]]
    made.bootstrap_values = None
    assert per_token(gae(made, AlgorithmConfig(gamma=1.0, lam=0.5)).advantages, made) == [[0.0, 0.5, 0.5]] * 2


def test_running_into_the_token_limit_is_discouraged():
    # Five tokens, truncated, score 0, and a critic that expects 3/5 everywhere. With lam 1, each token's advantage is 0 - 3/5.
    made = inputs([Response(0, [0.0] * 5, [0.6] * 5, end=0.6, truncated=True)])
    found = per_token(gae(made, AlgorithmConfig(gamma=1.0, lam=1.0)).advantages, made)
    assert found == [pytest.approx([-0.6] * 5)]
    bootstrapped = gae(made, AlgorithmConfig(gamma=1.0, lam=1.0, bootstrap_truncated=True))
    assert per_token(bootstrapped.advantages, made) == [pytest.approx([0.0] * 5)]


def test_gae_discounts():
    # gamma 1/2, lam 1: returns are discounted rewards 4, 0 + 4/2, 2 + 2/2; truncated in a state worth 8: 4 + 8/2, 8/2, 2 + 4/2.
    rewards, values = [2.0, 0.0, 4.0], [1.0, -1.0, 0.5]
    made = inputs([Response(0, rewards, values), Response(0, rewards, values, end=8.0, truncated=True)])
    result = gae(made, AlgorithmConfig(gamma=0.5, lam=1.0, bootstrap_truncated=True))
    assert result.returns is not None
    assert per_token(result.returns, made) == [[3.0, 2.0, 4.0], [4.0, 4.0, 8.0]]
    assert per_token(result.advantages, made) == [[2.0, 3.0, 3.5], [3.0, 5.0, 7.5]]


def test_vapo_has_one_lam_for_the_critic_and_one_that_follows_the_length():
    # Values 0, reward 1 at the end: A_t = lam^(remaining steps). With alpha 0.5, lam is 1 - 2/4 for four tokens and 0 for two.
    long, short = Response(0, [0, 0, 0, 1.0], [0.0] * 4), Response(0, [0, 1.0], [0.0] * 2)
    made = inputs([long, short])
    result = ADVANTAGE_ESTIMATORS["gae"](made, AlgorithmConfig(gamma=1.0, lam=0.3, critic_lam=1.0, lam_alpha=0.5))
    assert result.returns is not None
    assert per_token(result.advantages, made) == [pytest.approx([0.125, 0.25, 0.5, 1]), pytest.approx([0, 1])]
    assert per_token(result.returns, made) == [pytest.approx([1.0] * 4), pytest.approx([1.0] * 2)]
    one = ADVANTAGE_ESTIMATORS["gae"](made, AlgorithmConfig(gamma=1.0, lam=0.5, lam_alpha=None))
    assert one.returns is not None and per_token(one.returns, made)[1] == pytest.approx([0.5, 1.0])


def test_opo_by_hand():
    # Lengths 1 and 3, outcomes 1 and 0: the baseline is (1 * 1 + 3 * 0) / 4.
    made = inputs([Response(0, [1.0], [0.0]), Response(0, [0, 0, 0.0], [0.0] * 3)])
    advantages = per_token(ADVANTAGE_ESTIMATORS["opo"](made, AlgorithmConfig()).advantages, made)
    assert advantages == [pytest.approx([0.75]), pytest.approx([-0.25] * 3)]


def test_remax_by_hand():
    # Scores 1 and 0 for one prompt, whose greedy response scores 0.25. The first response pays a KL of 0.1 and 0.2
    # before its last token.
    # Rewards to go: 1 - 0.1 - 0.2, 1 - 0.2, 1. The other prompt's response scores like its greedy response, so its
    # advantage is exactly 0.
    first = Response(0, [-0.1, -0.2, 1.0], [9.0] * 3, greedy=0.25)
    made = inputs([first, Response(0, [0.0], [9.0], greedy=0.25), Response(1, [0.0, 0.75], [9.0] * 2, greedy=0.75)])
    for cfg in (AlgorithmConfig(), AlgorithmConfig(gamma=0.5, lam=0.1)):
        advantages = per_token(ADVANTAGE_ESTIMATORS["remax"](made, cfg).advantages, made)
        assert advantages == [pytest.approx([0.45, 0.55, 0.75], abs=1e-6), [-0.25], [0.0, 0.0]]


def test_gdpo_tells_equal_sums_of_unequal_parts_apart():
    # Two groups of two: parts (1, 0), (0, 0) and (1, 1), (0, 0). In a pair, each unequal part becomes +-1/sqrt(2):
    # sums s, -s, 2s, -2s.
    # Their mean is 0 and their deviation sqrt(10 s^2 / 3), so A = +-sqrt(0.3), +-2 sqrt(0.3). GRPO gives both groups
    # equal advantages.
    made = inputs([Response(group, [total], [0.0]) for group, total in ((0, 1.0), (0, 0.0), (1, 2.0), (1, 0.0))])
    made.score_parts = torch.tensor([[1, 0], [0, 0], [1, 1], [0, 0]], dtype=torch.float64)
    cfg = AlgorithmConfig(advantage="gdpo", reward_weights={"right": 1.0, "format": 1.0})
    root = math.sqrt(0.3)
    expected = [[root], [-root], [2 * root], [-2 * root]]
    assert per_token(gdpo(made, cfg).advantages, made) == [pytest.approx(a, rel=1e-5) for a in expected]
    by_sum = per_token(grpo(made, cfg).advantages, made)
    assert by_sum[0] == pytest.approx(by_sum[2], rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3),
    parts=st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 1), st.integers(0, 900)), min_size=12, max_size=12),
    weights=st.tuples(*[st.sampled_from([-1.0, 0.3, 1.0])] * 3),
    normalize_std=st.booleans(),
)
def test_gdpo_against_the_papers_equations(sizes: list[int], parts: list, weights: tuple, normalize_std: bool):
    responses = [Response(group, [0.0] * 2, [0.0] * 2) for group, size in enumerate(sizes) for _ in range(size)]
    made, own = inputs(responses), [list(map(float, part)) for part in parts[: len(responses)]]
    made.score_parts = torch.tensor(own, dtype=torch.float64)
    cfg = AlgorithmConfig(reward_weights=dict(zip("abc", weights, strict=True)), normalize_std=normalize_std)
    result = per_token(gdpo(made, cfg).advantages, made)
    for row, expected in zip(result, slow_gdpo(own, list(weights), responses, normalize_std), strict=True):
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gae_without_an_end_of_a_truncated_response_is_refused():
    made = inputs([Response(0, [1.0], [0.0], truncated=True)])
    made.bootstrap_values = None
    with pytest.raises(AssertionError, match="truncated"):
        gae(made, AlgorithmConfig(bootstrap_truncated=True))


def test_whitened_gae_keeps_its_returns():
    made = inputs([Response(0, [0.0, 3.0], [0.0, 0.0]), Response(1, [1.0, 0.0], [0.0, 0.0])])
    plain = gae(made, AlgorithmConfig(gamma=1.0, lam=1.0))
    whitened = gae(made, AlgorithmConfig(gamma=1.0, lam=1.0, whiten_advantages=True))
    # 3, 3, 1, 0: mean 7/4, mean square 19/4, variance 19/4 - 49/16 = 27/16.
    scale = math.sqrt(27) / 4
    expected = [[1.25 / scale, 1.25 / scale], [-0.75 / scale, -1.75 / scale]]
    assert per_token(whitened.advantages, made) == [pytest.approx(row, rel=1e-6) for row in expected]
    torch.testing.assert_close(whitened.returns, plain.returns, rtol=0, atol=0)


def test_rloo_by_hand():
    # Rewards 1, 0, 5 for one prompt: 1 - 5/2, 0 - 6/2, 5 - 1/2. For another prompt: 2 - 4, 4 - 2.
    responses = [Response(g, [0.0, r], [0.0, 0.0]) for g, r in [(0, 1.0), (7, 2.0), (0, 0.0), (7, 4.0), (0, 5.0)]]
    made = inputs(responses)
    advantages = per_token(rloo(made, AlgorithmConfig()).advantages, made)
    assert advantages == [[-1.5, -1.5], [-2.0, -2.0], [-3.0, -3.0], [2.0, 2.0], [4.5, 4.5]]


def test_rewards_of_all_tokens_count_in_an_outcome():
    made = inputs([Response(0, [0.25, 0.75], [0.0, 0.0]), Response(0, [0.0, 3.0], [0.0, 0.0])])
    advantages = per_token(grpo(made, AlgorithmConfig(normalize_std=False)).advantages, made)
    assert advantages == [[-1.0, -1.0], [1.0, 1.0]]  # 1 and 3


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_is_refused(name: str):
    made = inputs([Response(0, [1.0], [0.0]), Response(1, [1.0], [0.0]), Response(1, [2.0], [0.0])])
    with pytest.raises(ValueError, match=r"single response.*at least 2"):
        ADVANTAGE_ESTIMATORS[name](made, AlgorithmConfig())


def test_reinforce_by_hand():
    made = inputs([Response(0, [1.0, -2.0, 4.0], [9.0] * 3), Response(0, [2.0], [9.0], end=5.0, truncated=True)])
    # 4; -2 + 4/2; 1 + 0. Without a critic, a truncated response gets no extra value.
    advantages = reinforce(made, AlgorithmConfig(gamma=0.5)).advantages
    assert per_token(advantages, made) == [[1.0, 0.0, 4.0], [2.0]]


def test_reinforce_plus_plus_by_hand():
    # Rewards to go with gamma 1: 1, 2 and 3, 3. Mean 9/4, variance (1 + 4 + 9 + 9)/4 - 81/16 = 11/16.
    made = inputs([Response(0, [-1.0, 2.0], [0.0, 0.0]), Response(1, [0.0, 3.0], [0.0, 0.0])])
    advantages = per_token(reinforce_plus_plus(made, AlgorithmConfig()).advantages, made)
    scale = math.sqrt(11) / 4
    assert advantages[0] == pytest.approx([-1.25 / scale, -0.25 / scale], rel=1e-6)
    assert advantages[1] == pytest.approx([0.75 / scale, 0.75 / scale], rel=1e-6)


def test_reinforce_plus_plus_with_baseline_by_hand():
    # Outcomes 1, 3 | 0, 0, 6 over the groups' means: -1, 1 | -2, -2, 4; the tokens: -1, 1, 1, -2, -2, 4.
    numbers = [(0, [1.0]), (0, [0.0, 3.0]), (1, [0.0]), (1, [0.0]), (1, [6.0])]
    made = inputs([Response(g, rewards, [0.0] * len(rewards)) for g, rewards in numbers])
    tokens = [-1.0, 1.0, 1.0, -2.0, -2.0, 4.0]
    mean, scale = statistics.mean(tokens), statistics.pstdev(tokens)
    expected = [(x - mean) / scale for x in tokens]
    advantages = per_token(
        ADVANTAGE_ESTIMATORS["reinforce_plus_plus_baseline"](made, AlgorithmConfig()).advantages, made
    )
    assert [x for row in advantages for x in row] == pytest.approx(expected, rel=1e-6)


def whiten_rows(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return whiten(values.flatten(), mask.flatten(), everything(values)).view_as(values)


@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 1e6])
def test_rounding_of_equal_values_is_no_signal(size: float):
    exact = torch.full((4, 6), size)
    # One or two units in the last place of float32, positive and negative.
    noisy = exact * (1 + torch.tensor([0, 1, -1, 2, 0, -2]) * 2.0**-23)
    assert noisy.unique().numel() > 2
    mask = torch.ones(4, 6, dtype=torch.bool)
    assert whiten_rows(noisy, mask).eq(0).all()
    relative = group_relative(noisy[0], torch.zeros(6, dtype=torch.int64), normalize_std=True)
    assert relative.eq(0).all()


def test_whitening_does_not_scale_up_what_a_good_critic_leaves():
    # Deviations of 1e-6: (1e-6)^2 vanishes next to eps = 1e-8. The root of eps is 1e-4, so they become 1e-2.
    values = torch.tensor([[1e-6, -1e-6], [-1e-6, 1e-6]])
    found = whiten_rows(values, torch.ones(2, 2, dtype=torch.bool))
    torch.testing.assert_close(found, values * 1e4, rtol=1e-3, atol=0)


def test_small_differences_of_large_values_are_still_differences():
    # Mean 1e4, deviation 1.
    found = whiten_rows(torch.tensor([[10001.0, 9999.0]]), torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1.0]]))


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("base", [1e6, -1e6, 3e6])
def test_scores_that_differ_by_one_in_a_million_are_different(name: str, base: float):
    rows, mask = everything(torch.zeros(4, 3)), torch.ones(4, 3, dtype=torch.bool).flatten()
    scores = torch.tensor([base, base + 1, base, base], dtype=torch.float64)
    rewards = token_rewards(scores, mask, rows)
    made = AdvantageInputs(rewards, mask, rows, torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.bool))
    found = ADVANTAGE_ESTIMATORS[name](made, AlgorithmConfig()).advantages.view(4, 3)
    exact = {"grpo": 1.5, "rloo": 1.0}.get(name, math.sqrt(3.0))  # (3/4) / (1/2); 1; (3/4) / sqrt(3/16)
    assert found[1].tolist() == pytest.approx([exact] * 3, rel=1e-4)
    assert found[0].tolist() == pytest.approx([-exact / 3] * 3, rel=1e-4)


def test_scores_beyond_the_places_of_float32_are_different_in_a_group():
    rows, mask = everything(torch.zeros(2, 2)), torch.ones(4, dtype=torch.bool)
    scores = torch.tensor([1e12, 1e12 + 4], dtype=torch.float64)
    turns = torch.tensor([0.5, 0.0, 0.25, 0.0])
    for turn_rewards in (None, turns):
        rewards = token_rewards(scores, mask, rows, turn_rewards=turn_rewards)
        made = AdvantageInputs(rewards, mask, rows, torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
        found = ADVANTAGE_ESTIMATORS["grpo"](made, AlgorithmConfig()).advantages
        assert found.tolist() == pytest.approx([-math.sqrt(0.5)] * 2 + [math.sqrt(0.5)] * 2, rel=1e-4)


def test_whitening_an_empty_mask_gives_zeros():
    assert whiten_rows(torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool)).tolist() == [[0.0] * 3] * 2


# Slow versions read the paper's formula directly, over lists of one response or group.


def slow_gae(response: Response, cfg: AlgorithmConfig) -> list[float]:
    """Compute the double sum of eq. 16."""
    length, gamma, lam = len(response.rewards), cfg.gamma, cfg.lam
    values = [*response.values, response.end if response.truncated and cfg.bootstrap_truncated else 0.0]
    deltas = [response.rewards[t] + gamma * values[t + 1] - values[t] for t in range(length)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(length - t)) for t in range(length)]


def slow_normalized(tokens: list[list[float]]) -> list[list[float]]:
    flat = [x for row in tokens for x in row]
    if not flat:
        return tokens
    mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
    return [[(x - mean) / (deviation + 1e-8) for x in row] for row in tokens]


def spread(responses: list[Response], advantage: Callable[[float, list[float]], float]) -> list[list[float]]:
    """Return each outcome's advantage, relative to the other outcomes of its group, at every token."""
    totals = [sum(r.rewards) for r in responses]
    out = []
    for i, response in enumerate(responses):
        others = [totals[j] for j, other in enumerate(responses) if other.group == response.group and j != i]
        out.append([advantage(totals[i], others)] * len(response.rewards))
    return out


def by_length(responses: list[Response], group: int) -> float:
    """Return the mean of the group's outcomes, weighted by length."""
    own = [(len(r.rewards), sum(r.rewards)) for r in responses if r.group == group]
    return sum(n * r for n, r in own) / max(sum(n for n, _ in own), 1)


def slow_gdpo(
    parts: list[list[float]], weights: list[float], responses: list[Response], normalize_std: bool = True
) -> list[list[float]]:
    """Compute equations 4 to 6 of GDPO, response by response."""

    def normalize(mine: float, everyone: list[float], divided: bool = True) -> float:
        centered = mine - statistics.fmean(everyone)
        return centered / (statistics.stdev(everyone) + 1e-6) if divided and max(everyone) > min(everyone) else centered

    sums = [
        sum(
            weight
            * normalize(
                own, [p[k] for p, r in zip(parts, responses, strict=True) if r.group == response.group], normalize_std
            )
            for k, (own, weight) in enumerate(zip(mine, weights, strict=True))
        )
        for mine, response in zip(parts, responses, strict=True)
    ]
    spread = max(sums) - min(sums)
    return [
        [normalize(s, sums) if spread > 1e-9 else 0.0] * len(r.rewards) for s, r in zip(sums, responses, strict=True)
    ]


def slow(name: str, responses: list[Response], cfg: AlgorithmConfig) -> list[list[float]]:
    rewards_to_go = [
        [sum(cfg.gamma**k * x for k, x in enumerate(r.rewards[t:])) for t in range(len(r.rewards))] for r in responses
    ]
    over_mean = spread(responses, lambda mine, others: mine - statistics.fmean([mine, *others]))
    if name == "gae":
        return [slow_gae(r, cfg) for r in responses]
    if name == "grpo":
        if not cfg.normalize_std:
            return over_mean
        return spread(
            responses,
            lambda mine, others: (
                (mine - statistics.fmean([mine, *others])) / (statistics.stdev([mine, *others]) + 1e-6)
            ),
        )
    if name == "rloo":
        return spread(responses, lambda mine, others: mine - statistics.fmean(others))
    if name == "opo":
        return [[sum(r.rewards) - by_length(responses, r.group)] * len(r.rewards) for r in responses]
    if name == "gdpo":
        return slow_gdpo([[sum(r.rewards)] for r in responses], [1.0], responses, cfg.normalize_std)
    if name == "reinforce":
        return rewards_to_go
    if name == "distillation":
        return [[0.0] * len(r.rewards) for r in responses]
    if name == "remax":
        return [[sum(r.rewards[t:]) - r.greedy for t in range(len(r.rewards))] for r in responses]
    return slow_normalized(rewards_to_go if name == "reinforce_plus_plus" else over_mean)


number = st.integers(-12, 12).map(lambda n: n / 4)
token = st.tuples(number, number)


@st.composite
def steps(draw: st.DrawFn, equal: bool = False) -> list[Response]:
    """Generate groups of 2 to 4 responses of 0 to 5 tokens, shuffled. ``equal``: one score for all, on the last token."""
    sizes = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    score, made = draw(number), []
    for group, size in enumerate(sizes):
        for _ in range(size):
            tokens = draw(st.lists(token, min_size=1 if equal else 0, max_size=5))
            rewards = [0.0] * (len(tokens) - 1) + [score] if equal else [r for r, _ in tokens]
            greedy = score if equal else draw(number)
            made.append(Response(group, rewards, [v for _, v in tokens], draw(number), draw(st.booleans()), greedy))
    return draw(st.permutations(made))


configs = st.builds(
    AlgorithmConfig,
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    normalize_std=st.booleans(),
    bootstrap_truncated=st.booleans(),
)

turn_configs = st.builds(
    lambda cfg, **keys: cfg.model_copy(update=keys),
    configs,
    turn_gamma=st.sampled_from([0.0, 0.5, 1.0]),
    turn_credit=st.booleans(),
)  # turns of one token


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=20, deadline=None)
@given(responses=steps(), cfg=configs, gap=st.integers(0, 2))
def test_against_the_slow_version(name: str, responses: list[Response], cfg: AlgorithmConfig, gap: int):
    made = inputs(responses, gap=gap)
    result = ADVANTAGE_ESTIMATORS[name](made, cfg)
    expected = slow(name, responses, cfg)
    assert per_token(result.advantages, made) == [pytest.approx(row, rel=1e-4, abs=2e-5) for row in expected]
    assert result.advantages[~made.loss_mask].eq(0).all()
    if name == "gae":
        assert result.returns is not None
        expected = [
            [a + v for a, v in zip(row, r.values, strict=True)] for row, r in zip(expected, responses, strict=True)
        ]
        assert per_token(result.returns, made) == [pytest.approx(row, rel=1e-4, abs=2e-5) for row in expected]
        assert result.returns[~made.loss_mask].eq(0).all()
    else:
        assert result.returns is None


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=6, deadline=None)
@given(responses=steps(equal=True), whitened=st.booleans())
def test_equal_scores_give_zero_and_finite_advantages(name: str, responses: list[Response], whitened: bool):
    """All responses have one score. REINFORCE is zero after whitening, and GAE with a perfect critic."""
    if name == "gae":
        score = responses[0].rewards[-1]
        responses = [replace(r, values=[score] * len(r.values), truncated=False) for r in responses]
    made = inputs(responses)
    cfg = AlgorithmConfig(gamma=1.0, lam=0.95, whiten_advantages=whitened or name == "reinforce")
    result = ADVANTAGE_ESTIMATORS[name](made, cfg)
    assert result.advantages.eq(0).all()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=6, deadline=None)
@given(responses=steps(), cfg=turn_configs, garbage=st.sampled_from([NAN, float("inf"), -float("inf"), 1e30]))
def test_masks_never_leak(name: str, responses: list[Response], cfg: AlgorithmConfig, garbage: float):
    clean = ADVANTAGE_ESTIMATORS[name](inputs(responses, garbage=0.0), cfg)
    dirty = ADVANTAGE_ESTIMATORS[name](inputs(responses, garbage=garbage), cfg)
    assert torch.equal(clean.advantages, dirty.advantages)
    assert clean.returns is None or torch.equal(clean.returns, dirty.returns)
    assert clean.advantages.isfinite().all()


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=6, deadline=None)
@given(responses=steps(), cfg=turn_configs, data=st.data())
def test_permuting_responses_permutes_advantages(
    name: str, responses: list[Response], cfg: AlgorithmConfig, data: st.DataObject
):
    order = data.draw(st.permutations(range(len(responses))))
    renamed = [replace(responses[i], group=100 - responses[i].group) for i in order]
    straight = ADVANTAGE_ESTIMATORS[name](inputs(responses), cfg).advantages.view(len(order), -1)
    permuted = ADVANTAGE_ESTIMATORS[name](inputs(renamed), cfg).advantages.view(len(order), -1)
    torch.testing.assert_close(permuted, straight[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=5, deadline=None)
@given(responses=steps(), cfg=turn_configs, whitened=st.booleans(), data=st.data())
def test_who_owns_a_row_changes_no_bit(
    name: str, responses: list[Response], cfg: AlgorithmConfig, whitened: bool, data: st.DataObject
):
    cfg = cfg.model_copy(update={"whiten_advantages": whitened})
    whole = inputs(responses)
    expected = ADVANTAGE_ESTIMATORS[name](whole, cfg)
    owners = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(responses), max_size=len(responses))))

    def body(group: ThreadGroup) -> bool:
        """Run a rank of three. Some ranks may own no rows."""

        def merge(values: torch.Tensor) -> torch.Tensor:
            group.reduce(values, dist.ReduceOp.SUM)
            return values

        rows = OwnedRows((owners == group.rank()).nonzero().flatten(), whole.rows.lengths, merge)
        mine = owners[whole.rows.token_rows] == group.rank()
        made = replace(
            whole,
            rewards=whole.rewards[mine],
            loss_mask=whole.loss_mask[mine],
            rows=rows,
            old_values=whole.old_values[mine],
        )
        found = ADVANTAGE_ESTIMATORS[name](made, cfg)
        if expected.returns is not None and not torch.equal(found.returns, expected.returns[mine]):
            return False
        return torch.equal(found.advantages, expected.advantages[mine])

    assert run_ranks(3, body) == [True] * 3
