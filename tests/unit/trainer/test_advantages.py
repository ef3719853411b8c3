from __future__ import annotations

import math

import pytest
import torch

from rlhf_mcore.config.schema import (
    AlgorithmConfig,
    KLConfig,
    KLControllerConfig,
    OverlongConfig,
    RolloutCorrectionConfig,
)
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.types import TEACHER_LOGPROBS, TrainBatch
from tests.rows import Row, batch_of, flat, pad_rows

pytestmark = pytest.mark.usefixtures("world")


def batch(scores: list[float], responses: list[int], groups: list[int]) -> TrainBatch:
    """Prompts of one token."""
    rows = [Row([1], [2] * n, [0.0] * n, score) for n, score in zip(responses, scores, strict=True)]
    made = batch_of(rows, groups)
    made.old_logprobs = torch.zeros(made.token_ids.shape)
    made.ref_logprobs = torch.zeros(made.token_ids.shape)
    return made


def estimate(made: TrainBatch, **settings: object) -> dict[str, float]:
    return AdvantageComputer(AlgorithmConfig(**settings))(made)  # type: ignore[arg-type]


def test_scores_become_advantages_of_every_response_token() -> None:
    made = batch([1.0, 0.0, 0.0, 3.0], [2, 1, 3, 1], [0, 0, 1, 1])
    estimate(made)
    assert made.rewards is not None and made.advantages is not None
    assert pad_rows(made, made.rewards).tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 3, 0, 0]]
    # Group 0: mean 1/2, sample deviation sqrt(1/2); group 1: mean 3/2, deviation 3 sqrt(1/2).
    unit = math.sqrt(0.5)
    expected = [[0, unit, unit, 0], [0, -unit, 0, 0], [0, -unit, -unit, -unit], [0, unit, 0, 0]]
    torch.testing.assert_close(pad_rows(made, made.advantages), torch.tensor(expected), rtol=0, atol=3e-6)


def test_without_the_standard_deviation() -> None:
    made = batch([1.0, 0.0, 0.0, 3.0], [2, 1, 3, 1], [0, 0, 1, 1])
    estimate(made, normalize_std=False)
    assert made.advantages is not None
    found = pad_rows(made, made.advantages).tolist()
    assert found == [[0, 0.5, 0.5, 0], [0, -0.5, 0, 0], [0, -1.5, -1.5, -1.5], [0, 1.5, 0, 0]]


def test_rows_in_any_order_find_their_group() -> None:
    made = batch([3.0, 1.0, 0.0, 0.0], [1, 1, 1, 1], [1, 0, 1, 0])
    estimate(made, normalize_std=False)
    assert made.advantages is not None
    assert pad_rows(made, made.advantages)[:, 1].tolist() == [1.5, 0.5, -1.5, -0.5]


def with_kl(placement: str, coef: float) -> tuple[TrainBatch, dict[str, float]]:
    made = batch([1.0, 1.0], [2, 1], [0, 0])
    made.old_logprobs = flat(made, torch.tensor([[9.0, -1.0, -2.0], [9.0, -3.0, 9.0]]))
    made.ref_logprobs = flat(made, torch.tensor([[5.0, -1.5, -2.0], [5.0, -1.0, 5.0]]))
    kl = KLConfig(coef=coef, estimator="k1", placement=placement)
    return made, estimate(made, normalize_std=False, kl=kl)


def test_kl_in_the_reward_is_charged_on_every_response_token() -> None:
    made, metrics = with_kl("reward", 0.1)
    # k1 = old - ref: 1/2 and 0 in the first row, -2 in the second. Tokens outside the responses do not count.
    assert made.rewards is not None and made.advantages is not None
    torch.testing.assert_close(pad_rows(made, made.rewards).float(), torch.tensor([[0, -0.05, 1.0], [0, 1.2, 0]]))
    # Outcomes 0.95 and 1.2, mean 1.075.
    torch.testing.assert_close(pad_rows(made, made.advantages), torch.tensor([[0, -0.125, -0.125], [0, 0.125, 0]]))
    assert metrics["kl/mean"] == pytest.approx((0.5 + 0.0 - 2.0) / 3) and metrics["kl/coef"] == 0.1
    assert made.kl_coef == 0.0, "it is in the reward, not in the loss"


def test_the_kl_is_of_whole_distributions_where_tokens_were_drawn_from_a_part() -> None:
    """Ratios use the policy's logprobs within the kept part, which are larger by -log_mass. The reference has full logprobs."""
    plain, expected = with_kl("reward", 0.1)
    made, _ = with_kl("reward", 0.1)
    assert made.old_logprobs is not None and plain.rewards is not None
    made.log_mass = torch.linspace(-0.3, -0.1, len(made.token_ids))
    made.old_logprobs = made.old_logprobs - made.log_mass
    metrics = estimate(made, normalize_std=False, kl=KLConfig(coef=0.1, estimator="k1", placement="reward"))
    assert made.rewards is not None and metrics["kl/mean"] == pytest.approx(expected["kl/mean"], abs=1e-6)
    torch.testing.assert_close(made.rewards, plain.rewards)


def test_one_far_token_does_not_outweigh_the_score() -> None:
    made = batch([1.0, 1.0], [2, 1], [0, 0])
    made.old_logprobs = flat(made, torch.tensor([[0.0, -12.0, -1.0], [0.0, -1.0, 0.0]]))
    made.ref_logprobs = flat(made, torch.tensor([[0.0, 0.0, -1.0], [0.0, -1.0, 0.0]]))
    kl = KLConfig(coef=0.02, estimator="k3", placement="reward")
    metrics = estimate(made, normalize_std=False, kl=kl)
    # k3 of d = 12 is 162741.8; at most 10 of it are charged, 0.02 each.
    assert made.rewards is not None
    torch.testing.assert_close(pad_rows(made, made.rewards).float(), torch.tensor([[0, -0.2, 1.0], [0, 1.0, 0]]))
    assert metrics["kl/mean"] == pytest.approx(10 / 3)
    estimate(made, normalize_std=False, kl=KLConfig(coef=0.02, estimator="k3", placement="reward", clip=None))
    assert made.rewards is not None and made.rewards[1] == pytest.approx(-3254.84, rel=1e-4)


@pytest.mark.parametrize(("placement", "coef"), [("loss", 0.1), ("reward", 0.0)])
def test_kl_elsewhere_leaves_rewards_alone(placement: str, coef: float) -> None:
    made, metrics = with_kl(placement, coef)
    assert made.rewards is not None and made.advantages is not None
    assert pad_rows(made, made.rewards).tolist() == [[0, 0, 1], [0, 1, 0]]
    assert made.kl_coef == (coef if placement == "loss" else 0.0) and metrics["kl/coef"] == coef
    assert not made.advantages.any()


def test_no_reference_is_needed_without_kl() -> None:
    made = batch([1.0, 0.0], [1, 1], [0, 0])
    made.ref_logprobs = None
    assert not [name for name in estimate(made, normalize_std=False) if name.startswith("kl/")]
    assert made.advantages is not None and made.advantages.tolist() == [0, 0.5, 0, -0.5]


def test_the_weight_of_the_kl_moves_after_the_step_that_used_it() -> None:
    made = batch([1.0, 0.0], [1, 1], [0, 0])
    made.ref_logprobs = torch.full((4,), -0.5)  # k1 is 1/2 everywhere
    controller = KLControllerConfig(final=0.1, steps=3)
    cfg = AlgorithmConfig(normalize_std=False, kl=KLConfig(coef=0.02, estimator="k1", controller=controller))
    estimation = AdvantageComputer(cfg)
    assert [estimation(made)["kl/coef"] for _ in range(4)] == pytest.approx([0.02, 0.06, 0.1, 0.1])


def test_an_engine_that_drew_from_another_distribution_is_made_up_for() -> None:
    made = batch([1.0, 0.0], [2, 1], [0, 0])
    assert made.old_logprobs is not None
    made.rollout_logprobs[1:3] = torch.tensor(
        [-math.log(4.0), math.log(2.0)]
    )  # ratios 4 and 1/2, and 1 in the second row
    told = estimate(made)
    assert made.correction is None and told["rollout/ratio_max"] == pytest.approx(4.0)
    estimate(made, rollout_correction=RolloutCorrectionConfig(mode="token", cap=3.0))
    assert made.correction is not None
    torch.testing.assert_close(made.correction, torch.tensor([0.0, 3.0, 0.5, 0.0, 1.0]))


def test_long_responses_lose_some_of_their_score() -> None:
    made = batch([1.0, 1.0, 1.0], [2, 3, 4], [0, 0, 0])
    overlong = OverlongConfig(enabled=True, max_tokens=4, cache_tokens=2, penalty=1.0)
    metrics = estimate(made, normalize_std=False, overlong=overlong)
    assert made.rewards is not None and pad_rows(made, made.rewards).sum(1).tolist() == [1.0, 0.5, 0.0]
    assert metrics["reward/overlong_mean"] == pytest.approx(-0.5)


def with_teacher(made: TrainBatch, teacher: list[float]) -> TrainBatch:
    """Give every response token the policy's logprob -1, and the teacher's in the order of the tokens."""
    made.old_logprobs = torch.where(made.loss_mask, -1.0, 0.0)
    logprobs = torch.zeros(made.token_ids.shape)
    logprobs[made.loss_mask] = torch.tensor(teacher)
    made.fields[TEACHER_LOGPROBS] = logprobs
    return made


def test_a_teacher_alone() -> None:
    made = with_teacher(batch([1.0, 0.0], [2, 1], [0, 0]), [-0.5, -3.0, -1.0])
    metrics = AdvantageComputer(AlgorithmConfig(advantage="distillation"), teacher_coef=0.5)(made)
    assert made.advantages is not None
    assert pad_rows(made, made.advantages).tolist() == [[0, 0.25, -1.0], [0, 0, 0]], "scores do not count"
    assert metrics["teacher/kl"] == pytest.approx((-0.5 + 2.0 + 0.0) / 3)


def test_a_teacher_beside_scores() -> None:
    made = with_teacher(batch([1.0, 0.0], [2, 1], [0, 0]), [-0.5, -3.0, -1.0])
    computer = AdvantageComputer(AlgorithmConfig(normalize_std=False), teacher_coef=0.5)
    computer(made)
    assert computer.needs_old_logprobs(made) and made.advantages is not None
    assert pad_rows(made, made.advantages).tolist() == [[0, 0.75, -0.5], [0, -0.5, 0]]
