"""Compare losses over pairs with TRL's own functions and the papers' equations, and test hostile pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.algorithms.supervised import (
    PREFERENCE_LOSSES,
    Pairs,
    find_preference_loss,
    mean_divergence,
    sum_of_pairs,
)
from rlhf_mcore.config import choices
from rlhf_mcore.config.schema import DpoConfig
from tests.unit.pairs import each_value

LOGPROBS = [[-3.25, -7.5], [-12.0, -4.75], [-0.5, -0.625], [-40.0, -95.0]]
REFERENCE = [[-4.0, -6.75], [-10.5, -5.0], [-0.75, -0.5], [-42.5, -60.0]]
LENGTHS = [[3, 5], [8, 2], [1, 1], [16, 40]]

# Results of DPOTrainer.dpo_loss, CPOTrainer.cpo_loss, ORPOTrainer.odds_ratio_loss (with the chosen responses' mean
# negative log-likelihood)
# and KTOTrainer.kto_loss of TRL 0.19.1 for the numbers above in float64.
# They are the mean loss, its gradient with respect to the sums of logprobs, row by row, and the rewards.
TRL: dict[str, tuple[dict[str, Any], float, list[float], list[float]]] = {
    "dpo": (
        {"loss": "dpo", "beta": 0.1},
        0.5258114736,
        [
            -0.0115642539,
            0.0115642539,
            -0.0135909672,
            0.0135909672,
            -0.0122656525,
            0.0122656525,
            -0.0005744342,
            0.0005744342,
        ],
        [0.075, -0.075, -0.15, 0.025, 0.025, -0.0125, 0.25, -3.5],
    ),
    "cdpo": (
        {"loss": "dpo", "beta": 0.3, "label_smoothing": 0.2},
        1.0947380215,
        [
            -0.0142020575,
            0.0142020575,
            -0.0321237141,
            0.0321237141,
            -0.0203928469,
            0.0203928469,
            0.0149990245,
            -0.0149990245,
        ],
        [0.225, -0.225, -0.45, 0.075, 0.075, -0.0375, 0.75, -10.5],
    ),
    "ipo": (
        {"loss": "ipo", "beta": 0.1},
        21.6310644531,
        [-0.7666666667, 0.46, -0.33203125, 1.328125, -2.3125, 2.3125, -0.1240234375, 0.049609375],
        [0.025, -0.015, -0.01875, 0.0125, 0.025, -0.0125, 0.015625, -0.0875],
    ),
    "simpo": (
        {"loss": "simpo", "beta": 2.0, "gamma": 1.0},
        0.9514049546,
        [
            -0.0902617472,
            0.0541570483,
            -0.0200513313,
            0.0802053252,
            -0.3395893496,
            0.3395893496,
            -0.0242906207,
            0.0097162483,
        ],
        [-2.1666666667, -3.0, -3.0, -4.75, -1.0, -1.25, -5.0, -4.75],
    ),
    "orpo": (
        {"loss": "orpo", "beta": 0.1},
        1.4476547359,
        [
            -0.0878624027,
            0.0023140061,
            -0.0323083838,
            0.0036261946,
            -0.2771713396,
            0.0230045228,
            -0.0165343147,
            0.0003681089,
        ],
        [-0.1083333333, -0.15, -0.15, -0.2375, -0.05, -0.0625, -0.25, -0.2375],
    ),
    "kto": (
        {"loss": "kto", "beta": 0.1},
        0.4350420318,
        [-0.003125, 0.0031074876, -0.0030857806, 0.0031230477, -0.0031230477, 0.0031190262, -0.0031011958, 0.000331366],
        [0.075, -0.075, -0.15, 0.025, 0.025, -0.0125, 0.25, -3.5],
    ),
    "kto_weighted": (
        {"loss": "kto", "beta": 0.25, "desirable_weight": 1.5, "undesirable_weight": 0.5},
        0.4689697442,
        [
            -0.01171875,
            0.0037720766,
            -0.0108385576,
            0.0038910309,
            -0.0116730926,
            0.0038598901,
            -0.0111754051,
            0.0000020521,
        ],
        [0.1875, -0.1875, -0.375, 0.0625, 0.0625, -0.03125, 0.625, -8.75],
    ),
}


def pairs(dtype: torch.dtype = torch.float64, divergence: float = 0.75) -> tuple[Pairs, Tensor]:
    logprobs = torch.tensor(LOGPROBS, dtype=dtype, requires_grad=True)
    return Pairs(logprobs, torch.tensor(LENGTHS), torch.tensor(REFERENCE, dtype=dtype), divergence), logprobs


def sums_of(pairs: Pairs, weights: Tensor, cfg: DpoConfig) -> tuple[Tensor, dict[str, Tensor]]:
    return sum_of_pairs(pairs, weights, find_preference_loss(cfg), cfg.nll_coef)


@pytest.mark.parametrize("name", TRL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_gradients_are_trls(name: str, dtype: torch.dtype) -> None:
    keys, loss, gradient, rewards = TRL[name]
    made, logprobs = pairs(dtype)
    total, sums = sums_of(made, torch.full((4,), 0.25), DpoConfig(**keys))
    total.backward()
    assert logprobs.grad is not None
    assert total.item() == pytest.approx(loss, rel=1e-6)
    torch.testing.assert_close(logprobs.grad.flatten().double(), torch.tensor(gradient).double(), rtol=1e-6, atol=1e-6)
    chosen, rejected = torch.tensor(rewards).double().view(4, 2).unbind(1)
    assert sums["chosen"].item() == pytest.approx(float(chosen.sum()), rel=1e-6, abs=1e-6)
    assert sums["rejected"].item() == pytest.approx(float(rejected.sum()), rel=1e-6, abs=1e-6)
    assert sums["margin"].item() == pytest.approx(float((chosen - rejected).sum()), rel=1e-6, abs=1e-6)
    assert sums["accuracy"].item() == float((chosen > rejected).sum())


def test_every_declared_loss_is_there() -> None:
    assert PREFERENCE_LOSSES.keys() == choices.PREFERENCE_LOSSES.keys() == {cfg["loss"] for cfg, *_ in TRL.values()}


def test_dpo_by_hand() -> None:
    """Sigmoid(log 3) = 3/4. The gradient is beta times the policy's error of 1/4."""
    logprobs = torch.tensor([[math.log(9.0) - 5, -5.0]], requires_grad=True)
    made = Pairs(logprobs, torch.tensor([[1, 1]]), torch.tensor([[-5.0, -5.0]]))
    loss, sums = sums_of(made, torch.ones(1), DpoConfig(beta=0.5))
    loss.backward()
    assert loss.item() == pytest.approx(-math.log(0.75))
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[pytest.approx(-0.125), pytest.approx(0.125)]]
    assert {name: value.item() for name, value in sums.items()} == {
        "accuracy": 1.0,
        "margin": pytest.approx(math.log(3)),
        "chosen": pytest.approx(math.log(3)),
        "rejected": 0.0,
    }


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "kto"])
def test_the_likelihood_of_chosen_responses_is_added(name: str) -> None:
    keys, loss, gradient, _ = TRL[name]
    made, logprobs = pairs()
    total, _ = sums_of(made, torch.full((4,), 0.25), DpoConfig(**keys, nll_coef=0.5))
    total.backward()
    assert logprobs.grad is not None
    assert total.item() == pytest.approx(loss + 0.5 * (3.25 / 3 + 12 / 8 + 0.5 / 1 + 40 / 16) / 4, rel=1e-6)
    added = [value for length, _ in LENGTHS for value in (-0.5 / 4 / length, 0.0)]
    expected = [one + other for one, other in zip(gradient, added, strict=True)]
    assert logprobs.grad.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_the_divergence_is_a_mean_that_is_not_negative() -> None:
    assert mean_divergence(torch.tensor([-5.0, -9.0, -2.0]), torch.tensor([-6.5, -9.5, -2.25])) == 0.75
    assert mean_divergence(torch.tensor([-6.0]), torch.tensor([-5.0])) == 0.0


@pytest.mark.parametrize("name", TRL)
def test_pairs_that_do_not_count_may_hold_anything(name: str) -> None:
    cfg = DpoConfig(**TRL[name][0])
    made, logprobs = pairs()
    nan = torch.full((2, 2), math.nan, dtype=torch.float64)
    wide = Pairs(
        torch.cat([made.logprobs, nan]),
        torch.cat([made.lengths, torch.zeros(2, 2)]),
        torch.cat([torch.tensor(REFERENCE), nan]),
        0.75,
    )
    alone, sums = sums_of(made, torch.full((4,), 0.25), cfg)
    with_others, more = sums_of(wide, torch.tensor([0.25] * 4 + [0.0] * 2), cfg)
    with_others.backward()
    assert with_others.item() == pytest.approx(alone.item(), rel=1e-12)
    assert more == pytest.approx({key: value.item() for key, value in sums.items()}, rel=1e-12)
    assert logprobs.grad is not None and logprobs.grad.isfinite().all()


@each_value(
    ("name", list(TRL)),
    (
        "row",
        [
            [0.0, 0.0],  # both responses are certain
            [-1e-30, -1e5],
            [-1e5, -1e-30],
            [-1e-8, -3e-8],
            [-1e30, -1e30],
        ],
    ),
)
def test_extreme_pairs_have_finite_gradients(name: str, row: list[float]) -> None:
    logprobs = torch.tensor([row], requires_grad=True)
    made = Pairs(logprobs, torch.tensor([[1, 1]]), torch.tensor([[-1.0, -1.0]]))
    loss, _ = sums_of(made, torch.ones(1), DpoConfig(**TRL[name][0]))
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad is not None and logprobs.grad.isfinite().all(), logprobs.grad


def test_a_tie_is_half_right() -> None:
    same = Pairs(torch.tensor([[-2.0, -2.0]]), torch.tensor([[4, 4]]), torch.tensor([[-2.0, -2.0]]))
    loss, sums = sums_of(same, torch.ones(1), DpoConfig())
    assert (loss.item(), sums["accuracy"].item(), sums["margin"].item()) == (pytest.approx(math.log(2)), 0.5, 0.0)


@pytest.mark.parametrize("mean", [-1e-6, -1e-3, -0.5, -0.7, -2.0, -50.0])
def test_odds_are_exact_for_certain_and_for_improbable_responses(mean: float) -> None:
    """log(p / (1 - p)) = -log(expm1(-m)) in float64, which avoids rounding 1 - p."""
    logprobs = torch.tensor([[mean, -1.0]])
    loss, _ = sums_of(Pairs(logprobs, torch.tensor([[1, 1]])), torch.ones(1), DpoConfig(loss="orpo", beta=1.0))
    odds = [-math.log(math.expm1(-m)) for m in (mean, -1.0)]
    assert loss.item() == pytest.approx(-mean + math.log1p(math.exp(odds[1] - odds[0])), rel=1e-5)
