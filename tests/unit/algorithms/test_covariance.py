"""Test KL-Cov and Clip-Cov: the chosen tokens of a minibatch, for all row owners, and the losses at chosen tokens."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mcore.algorithms.covariance import CHOSEN, choose_largest, choose_tokens, token_covariances
from rlhf_mcore.algorithms.interfaces import POLICY_LOSSES
from rlhf_mcore.algorithms.masking import OwnedRows
from rlhf_mcore.types import TrainBatch
from tests.unit.algorithms.tokens import loss_inputs
from tests.unit.parallel.world import ThreadGroup, run_ranks

NAN = float("nan")
numbers = st.floats(-3, 3, width=32)
step_rows = st.lists(
    st.lists(st.tuples(numbers, st.integers(-2, 2), st.booleans()), max_size=6), min_size=1, max_size=6
)


def batch_of(rows: list[list[tuple[float, int, bool]]], own: list[int]) -> TrainBatch:
    """Build a batch of a rank's own rows from tokens (old logprob, advantage, trainable). Other tokens are NaN."""
    tokens = [token for row in own for token in rows[row]]
    counts = torch.tensor([sum(mask for *_, mask in row) for row in rows], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    mask = torch.tensor([mask for *_, mask in tokens], dtype=torch.bool)
    return TrainBatch(
        lengths=lengths,
        num_sampled=counts,
        scores=torch.zeros(len(rows)),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        group_ids=torch.arange(len(rows)),
        owners=torch.zeros(len(rows), dtype=torch.int64),
        rows=torch.tensor(own, dtype=torch.int64),
        token_ids=torch.zeros(len(tokens), dtype=torch.int32),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(tokens)),
        policy_version=7,
        old_logprobs=torch.tensor([old if mask else NAN for old, _, mask in tokens]),
        advantages=torch.tensor([float(a) if mask else NAN for _, a, mask in tokens]),
    )


def alone(batch: TrainBatch) -> OwnedRows:
    return OwnedRows(batch.rows, batch.lengths)


@settings(max_examples=30, deadline=None)
@given(rows=step_rows, share=st.sampled_from([0.01, 0.3, 0.7, 1.0]), cut=st.integers(0, 6))
def test_kl_cov_chooses_the_largest_covariances_of_each_minibatch(rows: list, share: float, cut: int) -> None:
    """Compared with sorted lists of covariances as in equation 9. Among equal ones, the first is chosen."""
    batch = batch_of(rows, list(range(len(rows))))
    parts = [part for part in (list(range(len(rows)))[:cut], list(range(len(rows)))[cut:]) if part]
    chosen = choose_tokens(batch, parts, alone(batch), share)
    assert not chosen[~batch.loss_mask].any()
    starts = [sum(map(len, rows[:row])) for row in range(len(rows))]
    for part in parts:
        places = [starts[row] + t for row in part for t, (*_, mask) in enumerate(rows[row]) if mask]
        tokens = [(old, a) for row in part for old, a, mask in rows[row] if mask]
        if not tokens:
            continue
        means = [math.fsum(values) / len(tokens) for values in zip(*tokens, strict=True)]
        covariances = [(old - means[0]) * (a - means[1]) for old, a in tokens]
        count = max(1, int(share * len(tokens)))
        assert int(chosen[places].sum()) == count
        smallest = sorted(covariances, reverse=True)[count - 1]
        for place, covariance in zip(places, covariances, strict=True):
            if abs(covariance - smallest) > 1e-9:
                assert bool(chosen[place]) == (covariance > smallest)


def test_of_equal_values_the_first_are_chosen():
    rows = OwnedRows(torch.tensor([0, 1, 2]), torch.tensor([2, 2, 2]))
    values = torch.tensor([1.0, 0.0, 5.0, 1.0, -0.0, 1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, True, False])

    def first(count: int) -> list[int]:
        return choose_largest(values, mask, count, rows).nonzero().flatten().tolist()

    assert [first(count) for count in (1, 2, 3, 4, 5, 9)] == [
        [2],
        [0, 2],
        [0, 2, 3],
        [0, 1, 2, 3],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4],
    ]
    assert choose_largest(-values.abs() - 1, mask, 2, rows).nonzero().flatten().tolist() == [1, 4]


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False), min_size=1, max_size=30), count=st.integers(1, 30))
@example(values=[1e-20, 3e-20, 2e-20, -1e-20], count=2)  # numbers that become equal when 1 is added
def test_any_values_can_be_ordered(values: list[float], count: int) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    rows = OwnedRows(torch.tensor([0]), torch.tensor([len(values)]))
    chosen = choose_largest(tensor, torch.ones(len(values), dtype=torch.bool), count, rows)
    assert sorted(tensor[chosen].tolist()) == sorted(values)[-count:]


def test_clip_cov_draws_from_the_band_by_chance_and_anew_at_every_step():
    # Logprobs -1 and -3, advantages 1 and -1, half each. Covariances are 1 * 1 or 1 * -1, and the band contains only 1.
    rows = [[(-1.0, 1, True), (-3.0, -1, True), (-1.0, -1, True), (-3.0, 1, True)] * 50]
    batch, band = batch_of(rows, [0]), (0.5, 2.0)
    chosen = choose_tokens(batch, [[0]], alone(batch), 0.1, band)
    covariances = token_covariances(batch.old_logprobs, batch.advantages, batch.loss_mask, alone(batch))
    assert covariances.tolist() == [1.0, 1.0, -1.0, -1.0] * 50
    assert int(chosen.sum()) == 20 and covariances[chosen].eq(1).all()
    batch.policy_version = 8
    again = choose_tokens(batch, [[0]], alone(batch), 0.1, band)
    assert int(again.sum()) == 20 and not torch.equal(again, chosen)
    # A random choice among 100 candidates in order includes some of each half.
    assert 4 <= int(chosen[:100].sum()) <= 16
    assert not choose_tokens(batch, [[0]], alone(batch), 0.1, (1.5, 2.0)).any()


@pytest.mark.parametrize("band", [None, (0.1, 2.0)])
def test_the_choice_does_not_depend_on_who_owns_a_row(band: tuple[float, float] | None) -> None:
    generator = torch.Generator().manual_seed(3)
    draws = torch.randn(9, 20, 2, generator=generator).tolist()
    rows = [[(old, round(a), t % 5 != 0) for t, (old, a) in enumerate(row[: 3 + 2 * k])] for k, row in enumerate(draws)]
    parts = [[0, 1, 2, 3], [4, 5, 6, 7, 8]]
    whole = batch_of(rows, list(range(9)))
    expected = choose_tokens(whole, parts, alone(whole), 0.3, band).split(whole.lengths.tolist())
    assert any(part.any() for part in expected)

    def of_rank(group: ThreadGroup) -> list[tuple[int, Tensor]]:
        own = [row for row in range(9) if row % 4 == group.rank()]
        batch = batch_of(rows, own)

        def merge(values: Tensor) -> Tensor:
            group.reduce(values, dist.ReduceOp.SUM)
            return values

        owned = OwnedRows(batch.rows, batch.lengths, merge)
        chosen = choose_tokens(batch, parts, owned, 0.3, band)
        return list(zip(own, chosen.split(batch.lengths[batch.rows].tolist()), strict=True))

    for results in run_ranks(4, of_rank):
        for row, chosen in results:
            assert torch.equal(chosen, expected[row]), row


def test_kl_cov_by_hand():
    # Ratios 2 and 1/2 at chosen tokens, 2 at another: -(2 * 3 - 0.5 log 2) - (0.5 * 3 - 0.5 log 2) - 2 * 3. Their
    # slopes change by -+0.5.
    old = torch.full((1, 3), -1.0)
    logprobs = (old + torch.tensor([[2.0, 0.5, 2.0]]).log()).requires_grad_()
    made = loss_inputs(logprobs, old, torch.full((1, 3), 3.0), torch.ones(1, 3))
    made.fields = {CHOSEN: torch.tensor([[True, True, False]])}
    loss, metrics = POLICY_LOSSES["kl_cov"](made, kl_coef=0.5)
    loss.backward()
    assert loss.item() == pytest.approx(-13.5 + math.log(2))
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-5.5, -2.0, -6.0]]))
    assert metrics["clip_fraction_high"].item() == metrics["clip_fraction_low"].item() == 0


def test_clip_cov_by_hand():
    # Ratio 1.1 is within the bounds, 1.5 is clipped at 1.2. The first and the fourth token are left out.
    old = torch.full((1, 4), -1.0)
    logprobs = (old + torch.tensor([[1.1, 1.1, 1.5, 1.5]]).log()).requires_grad_()
    made = loss_inputs(logprobs, old, torch.full((1, 4), 2.0), torch.ones(1, 4))
    made.fields = {CHOSEN: torch.tensor([[True, False, False, True]])}
    loss, metrics = POLICY_LOSSES["clip_cov"](made, clip_low=0.2, clip_high=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(-2.2 - 2.4)
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -2.2, 0.0, 0.0]]))
    # Two tokens are clipped, one of them is chosen, and one more is chosen.
    assert metrics["clip_fraction_high"].item() == 3 and metrics["clip_fraction_low"].item() == 0
