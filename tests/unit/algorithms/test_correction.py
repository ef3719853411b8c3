"""Test the distance between the logprobs of engine and trainer, and the factors that correct it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.algorithms.correction import (
    RATIO_MODES,
    factors_of_microbatch,
    rollout_correction,
    rollout_ratio_statistics,
    takes_part,
)
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.algorithms.policy_loss import find_divergent
from rlhf_mcore.config.schema import RolloutCorrectionConfig
from tests.rows import everything
from tests.unit.parallel.world import ThreadGroup, run_ranks

NAN = float("nan")


def distances(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, float]:
    return rollout_ratio_statistics(old.flatten(), rollout.flatten(), mask.flatten(), everything(old))


def correction(
    old: Tensor, rollout: Tensor, mask: Tensor, cfg: RolloutCorrectionConfig, staleness: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Compute the correction of tensors [B, T]."""
    ages = None if staleness is None else staleness.flatten()
    found, statistics = rollout_correction(old.flatten(), rollout.flatten(), mask.flatten(), everything(old), cfg, ages)
    return found.view_as(mask), statistics


def test_by_hand():
    old = torch.tensor([[NAN, -1.0, -2.0], [-3.0, NAN, NAN]])
    rollout = torch.tensor([[0.0, -1.25, -1.5], [-3.0, 0.0, NAN]])
    mask = torch.tensor([[False, True, True], [True, False, False]])
    # |-1 + 1.25| + |-2 + 1.5| + 0 = 0.75 over 3 tokens; the largest is 0.5
    assert distances(old, rollout, mask) == {
        "logprob_diff_mean": 0.25,
        "logprob_diff_max": 0.5,
        "logprob_exact": pytest.approx(1 / 3),
    }


def test_an_empty_mask_gives_zeros():
    assert distances(torch.full((2, 2), NAN), torch.zeros(2, 2), torch.zeros(2, 2).bool()) == {
        "logprob_diff_mean": 0.0,
        "logprob_diff_max": 0.0,
        "logprob_exact": 1.0,
    }


def test_a_nan_inside_the_mask_shows():
    found = distances(torch.tensor([[NAN, -1.0]]), torch.tensor([[-1.0, -1.0]]), torch.ones(1, 2).bool())
    assert math.isnan(found["logprob_diff_mean"]) and math.isnan(found["logprob_diff_max"])
    assert found["logprob_exact"] == 0.5


def test_one_bit_is_a_difference():
    one = torch.tensor([[-1.0, -1.0]])
    found = distances(one, torch.nextafter(one, torch.tensor([[0.0, -1.0]])), torch.ones(1, 2).bool())
    assert found["logprob_exact"] == 0.5 and found["logprob_diff_max"] == 2.0**-24


def test_half_precision():
    old = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16, requires_grad=True)
    found = distances(old, torch.tensor([[-1.001, -2.0]]), torch.ones(1, 2).bool())
    assert abs(found["logprob_diff_max"] - 0.001) < 1e-6


# Rows of log ratios: log 2, log 8 | log 1/4, log 2 | no trainable token.
MASK = torch.tensor([[False, True, True], [True, True, False], [False, False, False]])
RATIOS = torch.tensor([[NAN, 2.0, 8.0], [0.25, 2.0, NAN], [NAN, NAN, NAN]])


def compute_factors(staleness: Tensor | None = None, **settings: object) -> tuple[list[list[float]], dict[str, float]]:
    """Return the factors of the trainable tokens of each row, and statistics."""
    rollout = torch.full((3, 3), -3.0)
    cfg = RolloutCorrectionConfig(**settings)  # type: ignore[arg-type]
    factors, statistics = correction(rollout + RATIOS.log(), rollout, MASK, cfg, staleness)
    assert factors[~MASK].eq(0).all() and factors.dtype == torch.float32
    return [row[mask].tolist() for row, mask in zip(factors, MASK, strict=True)], statistics


def close(rows: list[list[float]]) -> list[object]:
    return [pytest.approx(row, rel=1e-5) for row in rows]


def test_off_changes_nothing_and_measures():
    factors, statistics = compute_factors(mode="off")
    assert factors == [[1.0, 1.0], [1.0, 1.0], []]
    expected = {"ratio_mean": 12.25 / 4, "ratio_max": 8.0, "ratio_min": 0.25}
    expected |= {"clipped_fraction": 0.0, "masked_fraction": 0.0, "effective_sample_size": 1.0}
    assert statistics == pytest.approx(expected, rel=1e-5)


def test_truncated_importance_sampling_per_token():
    factors, statistics = compute_factors(mode="token", cap=4.0)
    assert factors == close([[2.0, 4.0], [0.25, 2.0], []])
    assert statistics["clipped_fraction"] == 0.25 and statistics["masked_fraction"] == 0.0
    assert statistics["ratio_max"] == pytest.approx(8.0, rel=1e-5)  # before the cap
    # (2 + 4 + 1/4 + 2)^2 / (4 (4 + 16 + 1/16 + 4))
    assert statistics["effective_sample_size"] == pytest.approx(8.25**2 / (4 * 24.0625), rel=1e-5)


def test_truncated_importance_sampling_per_sequence():
    # Products 16 and 1/2. The row without trainable tokens does not count as a sequence.
    factors, statistics = compute_factors(mode="sequence", cap=4.0)
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
    factors, statistics = compute_factors(mode="token", cap=100.0, mask_low=0.5, mask_high=4.0)
    assert factors == close([[2.0, 0.0], [0.0, 2.0], []])
    assert statistics["masked_fraction"] == 0.5 and statistics["effective_sample_size"] == pytest.approx(0.5)
    factors, statistics = compute_factors(mode="token", cap=1.0, mask_high=4.0)  # masked tokens are not capped
    assert factors == close([[1.0, 0.0], [0.25, 1.0], []])
    assert statistics["clipped_fraction"] == 0.5 and statistics["masked_fraction"] == 0.25
    factors, statistics = compute_factors(mode="sequence", cap=100.0, mask_high=4.0)
    assert factors == close([[0.0, 0.0], [0.5, 0.5], []]) and statistics["masked_fraction"] == 0.5
    _, statistics = compute_factors(mode="token", mask_low=100.0)
    assert statistics["effective_sample_size"] == 0.0


def test_a_geometric_mean_does_not_depend_on_the_length_and_weighs_nothing():
    # Geometric means 4 and sqrt(1/2).
    factors, statistics = compute_factors(mode="geometric", mask_low=0.5, mask_high=3.0)
    assert factors == close([[0.0, 0.0], [1.0, 1.0], []])
    assert statistics["ratio_max"] == pytest.approx(4.0, rel=1e-5)
    assert statistics["ratio_min"] == pytest.approx(0.5**0.5, rel=1e-5)
    assert (statistics["masked_fraction"], statistics["clipped_fraction"]) == (0.5, 0.0)


@pytest.mark.parametrize("mode", ["token", "sequence", "geometric"])
def test_one_token_vetoes_its_response(mode: str):
    factors, statistics = compute_factors(mode=mode, cap=100.0, veto=0.3)  # 1/4 is below the veto
    assert factors[1] == [0.0, 0.0] and min(factors[0]) >= 1.0
    assert statistics["masked_fraction"] == 0.5
    assert compute_factors(mode=mode, cap=100.0, veto=0.2)[1]["masked_fraction"] == 0.0


def test_tokens_whose_probabilities_diverge_are_left_out():
    # Probabilities (trainer, engine) of tokens, and the larger of the two divergences, worked out by hand:
    # (0.5, 0.5): 0. (0.9, 0.99): .9 ln(.9/.99) + .1 ln(.1/.01) = 0.144480. (0.3, 0.1): .3 ln 3 + .7 ln(.7/.9) = 0.153664.
    # (0.03, 0.01): .03 ln 3 + .97 ln(.97/.99) = 0.013162, with the same ratio as the previous token.
    # (1 - 1e-3, 1), with the engine's probability rounded to 1: .001 ln(.001/1e-6) + .999 ln(.999/(1-1e-6)) = 0.005909.
    p = torch.tensor([[0.5, 0.9, 0.3, 0.03, 1 - 1e-3, NAN]], dtype=torch.float64)
    q = torch.tensor([[0.5, 0.99, 0.1, 0.01, 1.0, NAN]], dtype=torch.float64)
    mask = torch.tensor([[True] * 5 + [False]])

    def left_out(bound: float) -> list[bool]:
        assert torch.equal(find_divergent(p.log(), q.log(), bound), find_divergent(q.log(), p.log(), bound))
        cfg = RolloutCorrectionConfig(mode="token", cap=100.0, max_binary_kl=bound)
        factors, statistics = correction(p.log().float(), q.log().float(), mask, cfg)
        assert statistics["masked_fraction"] == pytest.approx(factors[mask].eq(0).double().mean())
        kept = factors != 0
        torch.testing.assert_close(factors[kept], (p / q).float()[kept], rtol=1e-5, atol=0)
        return factors.eq(0).tolist()[0]

    assert left_out(0.1) == [False, True, True, False, False, True]
    for place, divergence in ((1, 0.144480), (2, 0.153664), (3, 0.013162), (4, 0.005909)):
        assert left_out(divergence - 2e-6)[place] and not left_out(divergence + 2e-6)[place]


# The first row's tokens are two versions and one version old. Values outside the mask are arbitrary.
AGES = torch.tensor([[99, 2, 1], [0, 0, 99], [99, 99, 99]])


def test_tokens_and_responses_of_older_policies_are_left_out() -> None:
    factors, statistics = compute_factors(AGES, mode="off", max_token_staleness=1)
    assert factors == [[0.0, 1.0], [1.0, 1.0], []]
    ages = {"staleness_mean": 0.75, "staleness_max": 2.0, "stale_fraction": 0.25}
    assert ages.items() <= statistics.items()
    assert statistics["effective_sample_size"] == pytest.approx(0.75) and statistics["masked_fraction"] == 0.0
    factors, statistics = compute_factors(AGES, mode="token", cap=4.0, max_response_staleness=1)
    assert factors == close([[0.0, 0.0], [0.25, 2.0], []])
    assert statistics["stale_fraction"] == 0.5 and statistics["clipped_fraction"] == 0.25
    # (1/4 + 2)^2 / (4 (1/16 + 4)): the same as without the first row, out of four tokens
    assert statistics["effective_sample_size"] == pytest.approx(2.25**2 / (4 * 4.0625), rel=1e-5)
    factors, statistics = compute_factors(AGES, mode="sequence", cap=4.0, max_token_staleness=1)
    assert factors == close([[0.0, 4.0], [0.5, 0.5], []]), "the ratio is that of the whole response"
    assert compute_factors(AGES, mode="token", max_token_staleness=2)[0] == compute_factors(mode="token")[0]


def test_limits_of_staleness_are_for_asynchronous_runs() -> None:
    nothing = RolloutCorrectionConfig(mode="off")
    assert not takes_part(nothing, True) and takes_part(RolloutCorrectionConfig(mode="token"), False)
    limited = RolloutCorrectionConfig(mode="off", max_token_staleness=1)
    assert takes_part(limited, True) and not takes_part(limited, False)


def test_a_token_of_a_policy_to_come_is_an_error() -> None:
    with pytest.raises(AssertionError, match="newer policy version"):
        compute_factors(AGES - 1)


@settings(max_examples=25, deadline=None)
@given(
    noise=st.lists(st.lists(st.floats(-0.01, 0.01), min_size=1, max_size=4), min_size=1, max_size=5),
    mode=st.sampled_from(["off", "token", "sequence"]),
    is_exact=st.booleans(),
)
def test_without_staleness_weights_are_1_but_for_the_noise_of_the_engine(
    noise: list[list[float]], mode: str, is_exact: bool
) -> None:
    mask = torch.tensor([[t < len(row) for t in range(4)] for row in noise])
    rollout = torch.linspace(-3, -0.1, mask.numel()).view_as(mask)
    off = torch.tensor([[0.0 if is_exact else x for x in row] + [NAN] * (4 - len(row)) for row in noise])
    cfg = RolloutCorrectionConfig(mode=mode, max_token_staleness=0, max_response_staleness=0)
    factors, statistics = correction(rollout + off, rollout, mask, cfg, torch.zeros(mask.shape, dtype=torch.int32))
    assert statistics["stale_fraction"] == statistics["staleness_max"] == 0.0
    if is_exact:
        assert factors[mask].eq(1).all() and statistics["effective_sample_size"] == 1.0
    assert factors[mask].log().abs().max() <= 0.01 * (4 if mode == "sequence" else 1) + 1e-6
    assert 1 - statistics["effective_sample_size"] <= math.expm1(0.08)


@pytest.mark.parametrize("mode", RATIO_MODES)
def test_who_owns_a_row_changes_no_bit(mode: str) -> None:
    """Factors and statistics over all rows, including the effective sample size, do not depend on row owners."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 1, 4, 1, 5, 2])
    old, rollout = (torch.randn(16, generator=generator) for _ in range(2))
    ages = torch.randint(0, 4, (16,), generator=generator, dtype=torch.int32)
    cfg = RolloutCorrectionConfig(mode=mode, max_token_staleness=2, mask_high=2.0, veto=0.1)

    mask = torch.arange(16) % 5 > 0
    alone = OwnedRows(torch.arange(6), lengths)
    factors, statistics = rollout_correction(old, rollout, mask, alone, cfg, ages)
    assert statistics["stale_fraction"] > 0 and 0 < statistics["effective_sample_size"] < 1

    def body(group: ThreadGroup, owners: Tensor) -> bool:
        def merge(values: Tensor) -> Tensor:
            group.reduce(values, dist.ReduceOp.SUM)
            return values

        rows = OwnedRows((owners == group.rank()).nonzero().flatten(), lengths, merge)
        mine = (owners == group.rank()).repeat_interleave(lengths)
        other, found = rollout_correction(old[mine], rollout[mine], mask[mine], rows, cfg, ages[mine])
        return torch.equal(other, factors[mine]) and found == statistics

    for owners in (torch.tensor([0, 1, 2, 0, 1, 2]), torch.tensor([2, 2, 0, 0, 2, 2])):
        assert run_ranks(3, partial(body, owners=owners)) == [True] * 3


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


@pytest.mark.parametrize("mode", RATIO_MODES)
@pytest.mark.parametrize("veto", [None, 0.3])
@pytest.mark.parametrize("max_binary_kl", [None, 0.05])
def test_the_factors_of_a_microbatch_are_those_of_the_step(mode: str, veto: float | None, max_binary_kl: float | None):
    rollout = torch.full((3, 3), -3.0)
    cfg = RolloutCorrectionConfig(mode=mode, cap=3.0, mask_low=0.2, veto=veto, max_binary_kl=max_binary_kl)
    expected, _ = correction(rollout + RATIOS.log(), rollout, MASK, cfg)
    ids = torch.arange(3)[:, None].expand(3, 3)
    factors = factors_of_microbatch(rollout + RATIOS.log(), rollout, MASK, ids, 3, cfg)
    torch.testing.assert_close(torch.where(MASK, factors, 0), expected)


def test_extreme_ratios_stay_finite():
    old, rollout = torch.tensor([[-800.0, 0.0]]), torch.tensor([[0.0, -800.0]])
    factors, statistics = correction(old, rollout, torch.ones(1, 2).bool(), RolloutCorrectionConfig(mode="token"))
    assert factors.tolist() == [[pytest.approx(math.exp(-20)), 2.0]]
    assert all(math.isfinite(value) for value in statistics.values())


ratios = st.lists(st.lists(st.floats(-3, 3, width=32), max_size=4), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(rows=ratios, mode=st.sampled_from(RATIO_MODES), cap=st.sampled_from([0.5, 2.0, 1e9]))
@example(rows=[[0.5], []], mode="geometric", cap=2.0)  # the mean of a one-token row is its token
def test_correction_against_a_loop(rows: list[list[float]], mode: str, cap: float):
    mask = torch.tensor([[t < len(row) for t in range(5)] for row in rows])
    difference = torch.tensor([row + [NAN] * (5 - len(row)) for row in rows])
    cfg = RolloutCorrectionConfig(mode=mode, cap=cap, mask_low=0.1, mask_high=5.0)
    factors, statistics = correction(difference - 1.0, torch.full((len(rows), 5), -1.0), mask, cfg)
    units, expected = [], []
    for row in rows:
        whole = {"sequence": sum(row), "geometric": sum(row) / max(len(row), 1)}
        own = [math.exp(whole[mode])] * len(row) if mode in whole else [math.exp(d) for d in row]
        weights = [1.0 if mode == "geometric" else min(r, cap) for r in own]
        expected.append([weight if 0.1 <= r <= 5.0 else 0.0 for weight, r in zip(weights, own, strict=True)])
        units += own[:1] if mode in whole else own
    edges = (0.1, 5.0)
    assume(all(abs(unit - edge) > 1e-3 for unit in units for edge in edges))
    for row, (kept, wanted) in enumerate(zip(mask, expected, strict=True)):
        assert factors[row][kept].tolist() == pytest.approx(wanted, rel=1e-3)
    if units:
        assert statistics["ratio_mean"] == pytest.approx(sum(units) / len(units), rel=1e-3)
        assert statistics["masked_fraction"] == pytest.approx(sum(not 0.1 <= u <= 5.0 for u in units) / len(units))
