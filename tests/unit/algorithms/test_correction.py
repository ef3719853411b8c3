"""The distance between the engine's logprobs and the trainer's, and factors that make up for it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.algorithms.correction import rollout_correction, rollout_ratio_statistics
from rlhf_mcore.config.schema import RolloutCorrectionConfig
from tests.rows import everything

NAN = float("nan")


def distances(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    return rollout_ratio_statistics(old.flatten(), rollout.flatten(), mask.flatten(), everything(old))


def correction(
    old: Tensor, rollout: Tensor, mask: Tensor, cfg: RolloutCorrectionConfig
) -> tuple[Tensor, dict[str, float]]:
    """Of tensors [B, T]."""
    found, statistics = rollout_correction(old.flatten(), rollout.flatten(), mask.flatten(), everything(old), cfg)
    return found.view_as(mask), statistics


def test_by_hand():
    old = torch.tensor([[NAN, -1.0, -2.0], [-3.0, NAN, NAN]])
    rollout = torch.tensor([[0.0, -1.25, -1.5], [-3.0, 0.0, NAN]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    # |-1 + 1.25| + |-2 + 1.5| + 0 = 0.75 over 3 tokens, the largest of them 0.5
    assert distances(old, rollout, mask) == {"logprob_diff_mean": 0.25, "logprob_diff_max": 0.5}


def test_an_empty_mask_gives_zeros():
    assert list(distances(torch.full((2, 2), NAN), torch.zeros(2, 2), torch.zeros(2, 2).bool()).values()) == [0.0, 0.0]


def test_a_nan_inside_the_mask_shows():
    found = distances(torch.tensor([[NAN, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool())
    assert math.isnan(found["logprob_diff_mean"]) and math.isnan(found["logprob_diff_max"])


def test_half_precision():
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    found = distances(old, torch.tensor([[-1.001, -2.0]]), torch.ones(1, 2).bool())
    assert abs(found["logprob_diff_max"] - 0.001) < 1e-6


# Rows of log ratios log 2, log 8 | log 1/4, log 2 | none trainable.
MASK = torch.tensor([[False, True, True], [True, True, False], [False, False, False]])
RATIOS = torch.tensor([[NAN, 2.0, 8.0], [0.25, 2.0, NAN], [NAN, NAN, NAN]])


def corrected(**settings: object) -> tuple[list[list[float]], dict[str, float]]:
    """Factors on the trainable tokens of each row, and statistics."""
    rollout = torch.full((3, 3), -3.0)
    factors, statistics = correction(rollout + RATIOS.log(), rollout, MASK, RolloutCorrectionConfig(**settings))
    assert factors[~MASK].eq(0).all() and factors.dtype == torch.float32
    return [row[mask].tolist() for row, mask in zip(factors, MASK, strict=True)], statistics


def close(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, rel=1e-5) for row in rows]


def test_off_changes_nothing_and_measures():
    factors, statistics = corrected(mode="off")
    assert factors == [[1.0, 1.0], [1.0, 1.0], []]
    expected = {"ratio_mean": 12.25 / 4, "ratio_max": 8.0, "ratio_min": 0.25}
    expected |= {"clipped_fraction": 0.0, "masked_fraction": 0.0, "effective_sample_size": 1.0}
    assert statistics == pytest.approx(expected, rel=1e-5)


def test_truncated_importance_sampling_per_token():
    factors, statistics = corrected(mode="token", cap=4.0)
    assert factors == close([[2.0, 4.0], [0.25, 2.0], []])
    assert statistics["clipped_fraction"] == 0.25 and statistics["masked_fraction"] == 0.0
    assert statistics["ratio_max"] == pytest.approx(8.0, rel=1e-5)  # before the cap
    # (2 + 4 + 1/4 + 2)^2 / (4 (4 + 16 + 1/16 + 4))
    assert statistics["effective_sample_size"] == pytest.approx(8.25**2 / (4 * 24.0625), rel=1e-5)


def test_truncated_importance_sampling_per_sequence():
    # Products 16 and 1/2; the row without a token is no sequence.
    factors, statistics = corrected(mode="sequence", cap=4.0)
    assert factors == close([[4.0, 4.0], [0.5, 0.5], []])
    expected = {
        "ratio_mean": 8.25,
        "ratio_max": 16.0,
        "ratio_min": 0.5,
        "clipped_fraction": 0.5,
        "masked_fraction": 0.0,
    }
    assert statistics == pytest.approx(expected | {"effective_sample_size": 4.5**2 / (2 * 16.25)}, rel=1e-5)


def test_a_band_masks_what_lies_outside_of_it():
    factors, statistics = corrected(mode="token", cap=100.0, mask_low=0.5, mask_high=4.0)
    assert factors == close([[2.0, 0.0], [0.0, 2.0], []])
    assert statistics["masked_fraction"] == 0.5 and statistics["effective_sample_size"] == pytest.approx(0.5)
    factors, statistics = corrected(mode="token", cap=1.0, mask_high=4.0)  # what is masked is not capped
    assert factors == close([[1.0, 0.0], [0.25, 1.0], []])
    assert statistics["clipped_fraction"] == 0.5 and statistics["masked_fraction"] == 0.25
    factors, statistics = corrected(mode="sequence", cap=100.0, mask_high=4.0)
    assert factors == close([[0.0, 0.0], [0.5, 0.5], []]) and statistics["masked_fraction"] == 0.5
    _, statistics = corrected(mode="token", mask_low=100.0)
    assert statistics["effective_sample_size"] == 0.0


@pytest.mark.parametrize("mode", ["off", "token", "sequence"])
def test_nothing_to_correct(mode: str):
    cfg = RolloutCorrectionConfig(mode=mode, cap=0.5)
    for shape in ((0, 3), (2, 3)):
        factors, statistics = correction(torch.full(shape, NAN), torch.zeros(shape), torch.zeros(shape).bool(), cfg)
        assert factors.shape == shape and factors.eq(0).all()
        assert statistics["ratio_mean"] == statistics["effective_sample_size"] == 1.0
    same = torch.tensor([[-1.0, -2.0]])
    factors, statistics = correction(same, same, torch.ones(1, 2).bool(), RolloutCorrectionConfig(mode=mode))
    assert factors.tolist() == [[1.0, 1.0]] and statistics["effective_sample_size"] == 1.0


def test_extreme_ratios_stay_finite():
    old, rollout = torch.tensor([[-800.0, 0.0]]), torch.tensor([[0.0, -800.0]])
    factors, statistics = correction(old, rollout, torch.ones(1, 2).bool(), RolloutCorrectionConfig(mode="token"))
    assert factors.tolist() == [[pytest.approx(math.exp(-20)), 2.0]]
    assert all(math.isfinite(value) for value in statistics.values())


ratios = st.lists(st.lists(st.floats(-3, 3, width=32), max_size=4), min_size=1, max_size=5)


@settings(max_examples=50, deadline=None)
@given(rows=ratios, mode=st.sampled_from(["token", "sequence"]), cap=st.sampled_from([0.5, 2.0, 1e9]))
def test_correction_against_a_loop(rows: list[list[float]], mode: str, cap: float):
    mask = torch.tensor([[t < len(row) for t in range(5)] for row in rows])
    difference = torch.tensor([row + [NAN] * (5 - len(row)) for row in rows])
    cfg = RolloutCorrectionConfig(mode=mode, cap=cap, mask_low=0.1, mask_high=5.0)
    factors, statistics = correction(difference - 1.0, torch.full((len(rows), 5), -1.0), mask, cfg)
    units, expected = [], []
    for row in rows:
        own = [math.exp(sum(row))] * len(row) if mode == "sequence" else [math.exp(d) for d in row]
        expected.append([min(r, cap) if 0.1 <= r <= 5.0 else 0.0 for r in own])
        units += own[:1] if mode == "sequence" else own
    edges = (0.1, 5.0)
    assume(all(abs(unit - edge) > 1e-3 for unit in units for edge in edges))
    for row, (kept, wanted) in enumerate(zip(mask, expected, strict=True)):
        assert factors[row][kept].tolist() == pytest.approx(wanted, rel=1e-3)
    if units:
        assert statistics["ratio_mean"] == pytest.approx(sum(units) / len(units), rel=1e-3)
        assert statistics["masked_fraction"] == pytest.approx(sum(not 0.1 <= u <= 5.0 for u in units) / len(units))
