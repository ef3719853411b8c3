"""Test credit over several turns of the policy: hand-worked values, a slow version over lists, a single turn, and
masked environment text.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

import rlhf_mcore.algorithms.advantages  # noqa: F401  # its estimators are in the table
from rlhf_mcore.algorithms.advantages import OwnedTurns, grpo, rloo
from rlhf_mcore.algorithms.interfaces import ADVANTAGE_ESTIMATORS, AdvantageInputs
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.algorithms.returns import gae, reinforce
from rlhf_mcore.algorithms.value_loss import value_loss
from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, RolloutCorrectionConfig
from rlhf_mcore.parallel.logprobs import TokenLogprobs
from rlhf_mcore.roles.policy import PolicyObjective
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.types import Microbatch, TrainBatch

NAN = float("nan")
Turn = list[tuple[float, float]]  # a reward and a value per token of the policy


@dataclass
class Episode:
    """An episode with turns of the policy. The environment answers between them."""

    group: int
    turns: list[Turn]
    answers: list[int]  # tokens after the one prompt token and after each turn; the last may be 0
    truncated: bool = False
    end: float = 0.0

    @property
    def tokens(self) -> Turn:
        return [token for turn in self.turns for token in turn]


def episode(group: int, *turns: list[float], truncated: bool = False) -> Episode:
    """Build an episode with these rewards and values of 0."""
    return Episode(group, [[(reward, 0.0) for reward in turn] for turn in turns], [1] * len(turns), truncated)


def inputs(episodes: list[Episode], garbage: float = NAN) -> AdvantageInputs:
    rewards, values, mask, lengths = list[float](), list[float](), list[bool](), list[int]()
    for one in episodes:
        start = len(mask)
        for turn, answer in zip(one.turns, one.answers, strict=True):
            first = len(mask) == start
            rewards += [garbage] * first + [reward for reward, _ in turn] + [garbage] * answer
            values += [garbage] * first + [value for _, value in turn] + [garbage] * answer
            mask += [False] * first + [True] * len(turn) + [False] * answer
        lengths.append(len(mask) - start)
    made = AdvantageInputs(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(mask, dtype=torch.bool),
        OwnedRows(torch.arange(len(episodes)), torch.tensor(lengths, dtype=torch.int64)),
        group_ids=torch.tensor([one.group for one in episodes], dtype=torch.int64),
        truncated=torch.tensor([one.truncated for one in episodes], dtype=torch.bool),
        old_values=torch.tensor(values, dtype=torch.float32),
        bootstrap_values=torch.tensor([one.end if one.truncated else garbage for one in episodes]),
    )
    made.baselines = torch.full((len(episodes),), 0.5, dtype=torch.float64)
    return made


def per_turn(values: Tensor, made: AdvantageInputs, episodes: list[Episode]) -> list[list[list[float]]]:
    """Split [N] by episodes and turns."""
    held = iter(values[made.loss_mask].tolist())
    assert values[~made.loss_mask].eq(0).all()
    return [[[next(held) for _ in turn] for turn in one.turns] for one in episodes]


def test_turns_are_runs_of_trainable_tokens_of_a_row() -> None:
    # Rows of 3, 4, 1 and 3 tokens. The last turn of a row is directly followed by the first turn of the next row.
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 1]).bool()
    found = OwnedTurns.of(mask, OwnedRows(torch.tensor([0, 2, 3, 5]), torch.tensor([3, 9, 4, 1, 9, 3])))
    assert found.tokens.tolist() == [1, 2, 3, 5, 6, 8, 10] and found.of_token.tolist() == [0, 0, 1, 2, 2, 3, 4]
    assert found.first.tolist() == [0, 2, 3, 5, 6] and found.last.tolist() == [1, 2, 4, 5, 6]
    assert found.rows.tolist() == [0, 2, 2, 5, 5] and found.places.tolist() == [0, 0, 1, 0, 1]
    assert found.has_next.tolist() == [False, True, False, True, False]
    assert found.sums(torch.arange(11.0)).tolist() == [3, 3, 11, 8, 10]


def test_gae_steps_over_what_the_environment_wrote() -> None:
    # Two tokens, an answer, one token; gamma 1, lam 1/2, turn_gamma 1/2. Values 1/2, 1/4 | 1; rewards 0, 1 | 2.
    # delta: 2 - 1 = 1; 1 + 1/2 - 1/4 = 5/4, because the value after the first turn is the value before the second;
    # 1/4 - 1/2 = -1/4.
    # A: 1; 5/4 + 1/4 = 3/2, discounted at the end of the turn; -1/4 + 3/4 = 1/2.
    two = [Episode(0, [[(0.0, 0.5), (1.0, 0.25)], [(2.0, 1.0)]], [2, 1])]
    made = inputs(two)
    found = gae(made, AlgorithmConfig(lam=0.5, turn_gamma=0.5))
    assert per_turn(found.advantages, made, two) == [[[0.5, 1.5], [1.0]]]
    assert found.returns is not None and per_turn(found.returns, made, two) == [[[1.0, 1.75], [2.0]]]
    # A turn as one action: delta 1 + 1/2 - 1/2 = 1 with the value of its first token, and 2 - 1. A: 1 + 1/2 1/2 1, and 1.
    found = gae(made, AlgorithmConfig(lam=0.5, turn_gamma=0.5, turn_credit=True))
    assert per_turn(found.advantages, made, two) == [[[1.25, 1.25], [1.0]]]
    assert found.returns is not None and per_turn(found.returns, made, two) == [[[1.75, 1.75], [2.0]]]


def test_a_turn_that_is_cut_off_goes_on_without_discount() -> None:
    cut = [Episode(0, [[(0.0, 0.0)], [(1.0, 0.0)]], [1, 0], truncated=True, end=4.0)]
    made = inputs(cut)
    for turn_credit in (False, True):
        cfg = AlgorithmConfig(lam=1.0, turn_gamma=0.5, turn_credit=turn_credit, bootstrap_truncated=True)
        assert per_turn(gae(made, cfg).advantages, made, cut) == [[[2.5], [5.0]]]


def test_reinforce_sums_what_follows() -> None:
    one = [episode(0, [1.0, 2.0], [0.0, 4.0], [8.0])]
    made = inputs(one)
    found = reinforce(made, AlgorithmConfig(turn_gamma=0.5)).advantages
    assert per_turn(found, made, one) == [[[7.0, 6.0], [8.0, 8.0], [8.0]]]
    found = reinforce(made, AlgorithmConfig(turn_gamma=0.5, turn_credit=True)).advantages
    assert per_turn(found, made, one) == [[[7.0, 7.0], [8.0, 8.0], [8.0]]]


# Turns of a group have rewards 1, 4 | 3, 0 | 2 and returns 5, 4 | 3, 0 | 2. The mean is 10/3 for first turns and 2
# for second turns.
GROUP = [episode(0, [0.0, 1.0], [4.0]), episode(0, [3.0], [0.0, 0.0]), episode(0, [2.0])]


def test_turns_are_compared_with_the_same_turn_of_the_group() -> None:
    made = inputs(GROUP)
    cfg = AlgorithmConfig(normalize_std=False, turn_credit=True)
    first = [5 - 10 / 3, 3 - 10 / 3, 2 - 10 / 3]
    expected = [[[first[0]] * 2, [2.0]], [[first[1]], [-2.0] * 2], [[first[2]]]]
    assert_close(per_turn(grpo(made, cfg).advantages, made, GROUP), expected)
    # rloo: 5 - 5/2, 3 - 7/2, 2 - 4 for the first turns; 4 - 0, 0 - 4 for the second turns.
    expected = [[[2.5, 2.5], [4.0]], [[-0.5], [-4.0, -4.0]], [[-2.0]]]
    assert_close(per_turn(rloo(made, cfg).advantages, made, GROUP), expected)


def test_outcomes_discount_later_turns() -> None:
    made = inputs(GROUP)  # outcomes 1 + 4/2, 3, 2
    for name, scale in (("grpo", 1.0), ("rloo", 1.5)):
        cfg = AlgorithmConfig(normalize_std=False, turn_gamma=0.5)
        found = per_turn(ADVANTAGE_ESTIMATORS[name](made, cfg).advantages, made, GROUP)
        third = scale / 3
        assert_close(found, [[[third] * 2, [third]], [[third], [third] * 2], [[-2 * third]]])


def test_a_turn_that_nobody_else_got_to_has_the_advantage_of_its_response() -> None:
    alone = [episode(0, [0.0], [0.0], [6.0]), episode(0, [0.0], [2.0]), episode(1, [0.0]), episode(1, [4.0], [0.0])]
    made = inputs(alone)
    cfg = AlgorithmConfig(normalize_std=False, turn_credit=True)
    assert per_turn(grpo(made, cfg).advantages, made, alone) == [
        [[2.0], [2.0], [2.0]],
        [[-2.0], [-2.0]],
        [[-2.0]],
        [[2.0], [2.0]],
    ]


def assert_close(found: list[list[list[float]]], expected: list[list[list[float]]]) -> None:
    assert [[len(turn) for turn in one] for one in found] == [[len(turn) for turn in one] for one in expected]
    flat = [[x for one in rows for turn in one for x in turn] for rows in (found, expected)]
    assert flat[0] == pytest.approx(flat[1], rel=1e-4, abs=2e-5)


# ------------------------------------------------------------------------------------------------------------ slow versions


def slow_recursion(one: Episode, cfg: AlgorithmConfig, lam: float, with_values: bool) -> list[list[float]]:
    """Return sums of discounted deltas over tokens or turns. Each step has the discounts of all previous steps."""
    end = one.end if with_values and one.truncated and cfg.bootstrap_truncated else 0.0
    steps: list[tuple[float, float, float]] = []  # reward, value, discount of later steps
    for j, turn in enumerate(one.turns):
        is_last = j == len(one.turns) - 1
        if cfg.turn_credit:
            steps.append((sum(r for r, _ in turn), turn[0][1], 1.0 if is_last else cfg.turn_gamma))
            continue
        for t, (reward, value) in enumerate(turn):
            ends_turn = t == len(turn) - 1 and not is_last
            steps.append((reward, value, cfg.gamma * (cfg.turn_gamma if ends_turn else 1.0)))
    values = [value if with_values else 0.0 for _, value, _ in steps] + [end]
    advantages = []
    for k in range(len(steps)):
        total, weight = 0.0, 1.0
        for i in range(k, len(steps)):
            reward, _, discount = steps[i]
            total += weight * (reward + discount * values[i + 1] - values[i])
            weight *= discount * lam
        advantages.append(total)
    given = iter(advantages)
    if cfg.turn_credit:
        return [[advantage] * len(turn) for turn, advantage in zip(one.turns, given, strict=True)]
    return [[next(given) for _ in turn] for turn in one.turns]


def slow_compared(episodes: list[Episode], cfg: AlgorithmConfig, name: str) -> list[list[list[float]]]:
    def returns(one: Episode) -> list[float]:
        sums = [sum(r for r, _ in turn) for turn in one.turns]
        return [sum(cfg.turn_gamma**k * x for k, x in enumerate(sums[j:])) for j in range(len(sums))]

    def minus_mean_by_length() -> list[float]:
        outcomes, lengths = [returns(one)[0] for one in episodes], [sum(map(len, one.turns)) for one in episodes]
        baselines = []
        for one in episodes:
            own = [i for i, other in enumerate(episodes) if other.group == one.group]
            baselines.append(sum(lengths[i] * outcomes[i] for i in own) / sum(lengths[i] for i in own))
        return [outcome - baseline for outcome, baseline in zip(outcomes, baselines, strict=True)]

    def relative(mine: float, others: list[float]) -> float:
        everyone = [mine, *others]
        if name == "rloo":
            return mine - statistics.fmean(others)
        centered = mine - statistics.fmean(everyone)
        if name == "grpo" and cfg.normalize_std:
            return centered / (statistics.stdev(everyone) + 1e-6) if max(everyone) > min(everyone) else 0.0
        return centered

    if name == "gdpo":
        outcomes = [sum(r for turn in one.turns for r, _ in turn) for one in episodes]

        def normalize(x: float, everyone: list[float], divided: bool) -> float:
            if max(everyone) - min(everyone) < 1e-9:
                return 0.0
            return (x - statistics.fmean(everyone)) / (statistics.stdev(everyone) + 1e-6 if divided else 1)

        of_groups = [
            [x for x, other in zip(outcomes, episodes, strict=True) if other.group == one.group] for one in episodes
        ]
        sums = [normalize(x, group, cfg.normalize_std) for x, group in zip(outcomes, of_groups, strict=True)]
        whole = [normalize(x, sums, True) for x in sums]
        return [[[x] * len(turn) for turn in one.turns] for one, x in zip(episodes, whole, strict=True)]
    if name == "opo":
        return [
            [[x] * len(turn) for turn in one.turns] for one, x in zip(episodes, minus_mean_by_length(), strict=True)
        ]
    out = []
    for i, one in enumerate(episodes):
        others = [returns(other) for k, other in enumerate(episodes) if other.group == one.group and k != i]
        mine = returns(one)
        whole = relative(mine[0], [other[0] for other in others])
        turns = []
        for j, turn in enumerate(one.turns):
            same = [other[j] for other in others if len(other) > j]
            turns.append([relative(mine[j], same) if cfg.turn_credit and same else whole] * len(turn))
        out.append(turns)
    return out


def slow(name: str, episodes: list[Episode], cfg: AlgorithmConfig) -> list[list[list[float]]]:
    if name == "distillation":
        return [[[0.0] * len(turn) for turn in one.turns] for one in episodes]
    if name == "gae":
        return [slow_recursion(one, cfg, cfg.lam, with_values=True) for one in episodes]
    if name == "remax":
        plain = AlgorithmConfig()
        found = [slow_recursion(one, plain, 1.0, with_values=False) for one in episodes]
        return [[[x - 0.5 for x in turn] for turn in one] for one in found]
    if name.endswith("baseline") or name in ("grpo", "rloo", "opo", "gdpo"):
        found = slow_compared(episodes, cfg, name)
    else:
        found = [slow_recursion(one, cfg, 1.0, with_values=False) for one in episodes]
    if name.startswith("reinforce_plus_plus"):
        flat = [x for one in found for turn in one for x in turn]
        mean, deviation = statistics.fmean(flat), statistics.pstdev(flat)
        assume(deviation > 1e-2)
        return [[[(x - mean) / deviation for x in turn] for turn in one] for one in found]
    return found


number = st.integers(-12, 12).map(lambda n: n / 4)
turn = st.lists(st.tuples(number, number), min_size=1, max_size=3)


@st.composite
def steps(draw: st.DrawFn, max_turns: int = 3) -> list[Episode]:
    """Generate groups of 2 to 4 episodes, shuffled."""
    made = []
    for group, size in enumerate(draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))):
        for _ in range(size):
            turns = draw(st.lists(turn, min_size=1, max_size=max_turns))
            answers = [*draw(st.lists(st.integers(1, 2), min_size=len(turns) - 1, max_size=len(turns) - 1)), 0]
            made.append(Episode(group, turns, answers, draw(st.booleans()), draw(number)))
    return draw(st.permutations(made))


configs = st.builds(
    AlgorithmConfig,
    gamma=st.sampled_from([0.5, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    turn_gamma=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    turn_credit=st.booleans(),
    normalize_std=st.booleans(),
    bootstrap_truncated=st.booleans(),
)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=10, deadline=None)
@given(episodes=steps(), cfg=configs)
def test_against_the_slow_version(name: str, episodes: list[Episode], cfg: AlgorithmConfig) -> None:
    made = inputs(episodes)
    found = ADVANTAGE_ESTIMATORS[name](made, cfg)
    assert_close(per_turn(found.advantages, made, episodes), slow(name, episodes, cfg))


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
@settings(max_examples=6, deadline=None)
@given(episodes=steps(max_turns=1), cfg=configs)
def test_one_turn_changes_no_bit(name: str, episodes: list[Episode], cfg: AlgorithmConfig) -> None:
    """Group-relative estimators ignore turn_credit and turn_gamma for one turn. The other estimators ignore turn_gamma."""
    made, plain = inputs(episodes), cfg.model_copy(update={"turn_gamma": 1.0, "turn_credit": False})
    if name in ("gae", "reinforce", "reinforce_plus_plus"):
        cfg = cfg.model_copy(update={"turn_credit": False})
    found, expected = (ADVANTAGE_ESTIMATORS[name](made, each) for each in (cfg, plain))
    assert torch.equal(found.advantages, expected.advantages)
    assert found.returns is None or torch.equal(found.returns, expected.returns)


@settings(max_examples=20, deadline=None)
@given(episodes=steps(), lam=st.sampled_from([0.0, 0.5, 1.0]))
def test_without_discount_by_turns_an_answer_is_no_step(episodes: list[Episode], lam: float) -> None:
    """GAE over the tokens equals GAE without the answers between the tokens, bit for bit."""
    joined = [replace(one, turns=[one.tokens], answers=[0]) for one in episodes]
    whole, apart = inputs(joined), inputs(episodes)
    expected, found = (gae(made, AlgorithmConfig(gamma=0.9, lam=lam)) for made in (whole, apart))
    assert torch.equal(found.advantages[apart.loss_mask], expected.advantages[whole.loss_mask])


# ----------------------------------------------------------------------------------------------- nothing of the environment


def batch_of(made: AdvantageInputs, seed: int, environment: float) -> TrainBatch:
    """Build a step with these tokens, random logprobs from a seed, and ``environment`` at every token that the policy
    did not write.
    """
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> Tensor:
        drawn = -torch.rand(made.loss_mask.shape, generator=generator)
        return torch.where(made.loss_mask, drawn, environment)

    num_rows = made.rows.num_rows
    return TrainBatch(
        lengths=made.rows.lengths,
        num_sampled=made.rows.local_sums(torch.ones_like(made.rewards), made.loss_mask).long(),
        scores=torch.arange(num_rows, dtype=torch.float64),
        truncated=made.truncated,
        group_ids=made.group_ids,
        owners=torch.zeros(num_rows, dtype=torch.int64),
        rows=made.rows.rows,
        token_ids=torch.zeros(made.loss_mask.shape, dtype=torch.int32),
        loss_mask=made.loss_mask,
        rollout_logprobs=numbers(),
        turn_rewards=made.rewards,
        versions=torch.where(made.loss_mask, 3, -5 if environment > 0 else 99).int(),
        policy_version=4,
        ref_logprobs=numbers(),
        old_logprobs=numbers(),
        old_values=made.old_values,
        bootstrap_values=made.bootstrap_values,
    )


class GivenOutputs:
    """A model that outputs given logprobs and entropies."""

    def logprobs_and_entropy(self, outputs: Tensor, *_: object, **__: object) -> TokenLogprobs:
        return TokenLogprobs(*outputs.unbind(), log_mass=None)


def compute_gradients(batch: TrainBatch, cfg: AlgorithmConfig, seed: int, environment: float) -> tuple[Tensor, ...]:
    """Return the advantages, and gradients of actor and critic losses with respect to logprobs, entropies and values,
    of a whole step.
    """
    AdvantageComputer(cfg, merge=lambda values: values)(batch)
    assert batch.advantages is not None and batch.old_logprobs is not None and batch.correction is not None
    assert batch.ref_logprobs is not None and batch.old_values is not None
    weights = batch.loss_mask.float() / batch.loss_mask.sum()
    fields = {"weights": weights, "old_logprobs": batch.old_logprobs, "advantages": batch.advantages}
    fields |= {"correction": batch.correction, "ref_logprobs": batch.ref_logprobs}
    packed = {name: values[None] for name, values in fields.items()}
    lengths = batch.lengths.tolist()
    borders = torch.tensor([0, *batch.lengths.cumsum(0).tolist()], dtype=torch.int32)
    rows = list(range(len(lengths)))
    microbatch = Microbatch(
        batch.token_ids[None].long(), batch.token_ids[None].long(), rows, lengths, borders, max(lengths), packed
    )
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = -torch.rand(3, 1, len(weights), generator=generator)
    outputs = torch.where(batch.loss_mask, drawn, environment).requires_grad_()
    model: Any = GivenOutputs()
    objective = PolicyObjective(cfg, find_policy_loss(cfg), temperature=1.0, kl_coef=0.1)
    loss = objective.loss(model, outputs[:2], microbatch)[0]
    if batch.returns is not None:
        loss = loss + value_loss(outputs[2, 0], batch.old_values, batch.returns, weights, 0.2)[0]
    loss.backward()
    assert outputs.grad is not None
    return batch.advantages, outputs.grad, loss.detach()


@pytest.mark.parametrize("policy_loss", ["ppo_clip", "gspo", "cispo"])
@pytest.mark.parametrize("name", ["gae", "grpo", "reinforce_plus_plus"])
@settings(max_examples=5, deadline=None)
@given(
    episodes=steps(),
    cfg=configs,
    seed=st.integers(0, 9),
    environment=st.sampled_from([NAN, float("inf"), -float("inf"), 1e30, 7.0]),
)
def test_what_the_environment_wrote_teaches_nothing(
    name: str, policy_loss: str, episodes: list[Episode], cfg: AlgorithmConfig, seed: int, environment: float
) -> None:
    """Other values, logprobs, rewards and versions at environment tokens change no bit of an advantage, loss or gradient.

    All these are zero at environment tokens.
    """
    cfg = cfg.model_copy(
        update={
            "advantage": name,
            "policy_loss": policy_loss,
            "whiten_advantages": name == "gae",
            "entropy_coef": 0.1,
            "kl": KLConfig(coef=0.1, placement="reward", estimator="k3"),
            "rollout_correction": RolloutCorrectionConfig(mode="token", max_token_staleness=2, mask_low=0.1),
        }
    )
    clean = compute_gradients(batch_of(inputs(episodes, 0.0), seed, 0.0), cfg, seed, 0.0)
    made = inputs(episodes, environment)
    dirty = compute_gradients(batch_of(made, seed, environment), cfg, seed, environment)
    for one, other in zip(clean, dirty, strict=True):
        assert torch.equal(one, other) and one.isfinite().all()
    assert dirty[1][..., ~made.loss_mask].eq(0).all() and dirty[1].abs().max() > 0
    assert dirty[0][~made.loss_mask].eq(0).all()
