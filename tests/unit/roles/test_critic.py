"""Test the critic over a table of values. The oracle computes token by token in double precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.algorithms.value_loss import ReturnNormalizer
from rlhf_mcore.config.schema import OptimizerConfig, TrainerConfig
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.scalar_models import Critic
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.types import TrainBatch
from tests.rows import flat, pad_rows, padded_batch
from tests.unit.parallel.world import Meeting, ThreadGroup, run_ranks
from tests.unit.roles import lookup
from tests.unit.roles.lookup import Lookup, descend, noise, stay

pytestmark = pytest.mark.usefixtures("world")


@pytest.fixture
def model() -> Lookup:
    return Lookup(width=1)


def critic(
    model: Lookup | None, clip: float | None, rule: Any = stay, plan: MinibatchPlan | None = None, **trainer: Any
) -> Critic:
    which: Any = model
    settings: dict[str, Any] = dict(max_tokens_per_microbatch=64) | trainer
    cfg = OptimizerConfig(lr=0.5)
    spec: Any = None
    layout = model.layout if model is not None else ParallelLayout(1)
    plan = plan or MinibatchPlan(3)
    if model is not None:
        model.rule = rule
    trained = TrainedModel(layout, which, spec, TrainerConfig(**settings), optimizer=cfg, plan=plan, name="critic")
    return Critic(trained, clip)


def batch() -> TrainBatch:
    """Build a batch with old values close to the model's, returns close to these, and garbage outside the responses."""
    made = lookup.batch()
    whole = padded_batch(made)
    values = Lookup(width=1).table.detach().squeeze(1)[whole.token_ids.long().roll(1, 1)]
    nowhere = torch.where(whole.loss_mask, 0.0, torch.nan)
    made.old_values = flat(made, values + noise(values, 3) + nowhere)
    made.returns = flat(made, values + 2 * noise(values, 4) + nowhere)
    return made


def slow_loss(table: Tensor, made: TrainBatch, clip: float | None, which: Sequence[int]) -> dict[str, Any]:
    """Compute PPO's value loss like its reference implementation, one token after the other."""
    made = padded_batch(made)
    at = [(row, t) for row in which for t in made.loss_mask[row].nonzero().flatten().tolist()]
    loss, clipped, mean = torch.zeros((), dtype=torch.float64), 0, 0.0
    for row, t in at:
        value = table[made.token_ids[row, t - 1], 0]
        old, target = made.old_values[row, t].double(), made.returns[row, t].double()
        squares = [(value - target) ** 2]
        if clip is not None:
            squares.append((old + (value - old).clamp(-clip, clip) - target) ** 2)
        loss = loss + 0.5 * max(squares) / len(at)
        clipped += squares[-1] > squares[0]
        mean += value.item() / len(at)
    return {"loss": loss, "clip_fraction": float(clipped) / len(at), "values": mean}


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("max_tokens", [8, 64])
@pytest.mark.parametrize("packing", [True, False])
def test_gradient_and_metrics_equal_the_equation_however_the_batch_is_cut(
    model: Lookup, clip: float | None, max_tokens: int, packing: bool
) -> None:
    made = batch()
    metrics = critic(model, clip, max_tokens_per_microbatch=max_tokens, packing=packing).deliver_update(made)().metrics
    table = model.table.detach().double().requires_grad_()
    expected = slow_loss(table, made, clip, range(6))
    expected["loss"].backward()
    assert model.table.grad is not None and table.grad is not None
    torch.testing.assert_close(model.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)
    assert metrics == {
        "loss/value": pytest.approx(expected["loss"].item(), abs=1e-5),
        "critic/clip_fraction": pytest.approx(expected["clip_fraction"], abs=1e-6),
        "critic/values": pytest.approx(expected["values"], abs=1e-5),
        "critic/grad_norm": pytest.approx(float(table.grad.norm()), rel=1e-4),
        "critic/lr": 0.5,
        "critic/skipped_updates": 0.0,
        "critic/bad_updates_in_a_row": 0.0,
    }
    assert (expected["clip_fraction"] > 0) == (clip is not None)


def test_minibatches_epochs_and_rate_are_its_own(model: Lookup) -> None:
    made = batch()
    table = model.table.detach().double().requires_grad_()
    which = critic(model, 0.2, descend, MinibatchPlan(prompts_per_minibatch=2, epochs=2))
    which.deliver_update(made)()
    for rows in ([0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]):
        (gradient,) = torch.autograd.grad(slow_loss(table, made, 0.2, rows)["loss"], table)
        table.data -= 0.5 * gradient
    torch.testing.assert_close(model.table.detach().double(), table.detach(), rtol=1e-5, atol=1e-5)
    assert which.model.num_updates == 4


def test_values_of_the_states_before_each_token_and_after_the_last(model: Lookup) -> None:
    made = batch()
    which = critic(model, None, max_tokens_per_microbatch=10)
    which.bootstrap = True
    values, bootstrap = which.compute_values(made)
    assert bootstrap is not None
    outputs = model.table.detach().squeeze(1)
    assert values.shape == made.token_ids.shape and values.dtype == bootstrap.dtype == torch.float32
    whole, by_row = padded_batch(made), pad_rows(made, values)
    for row, length in enumerate(made.lengths.tolist()):
        for t in range(whole.token_ids.size(1)):
            before = outputs[whole.token_ids[row, t - 1]] if whole.loss_mask[row, t] else torch.tensor(0.0)
            assert by_row[row, t] == before
        assert bootstrap[row] == outputs[whole.token_ids[row, length - 1]]
    which.bootstrap = False
    again, nothing = which.compute_values(made)
    assert torch.equal(again, values) and nothing is None


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("normalized", [False, True])
def test_shares_of_the_ranks_add_up_to_the_gradient_of_one(model: Lookup, normalized: bool) -> None:
    def body(group: ThreadGroup) -> tuple[Tensor, dict[str, float] | None]:
        mine = Lookup(width=1, layout=ParallelLayout(group.size()))
        which = critic(mine, 0.2)
        which.normalizer = ReturnNormalizer() if normalized else None
        which.deliver_update(batch())()
        assert mine.table.grad is not None
        return mine.table.grad, which.normalizer.state_dict() if which.normalizer is not None else None

    ranks = run_ranks(7, body)  # one rank has no rows
    ((alone, moments),) = run_ranks(1, body)
    torch.testing.assert_close(sum(grad for grad, _ in ranks), alone, rtol=1e-4, atol=1e-6)
    assert all(found == moments for _, found in ranks)  # bit for bit


@pytest.mark.usefixtures("rank_threads")
def test_a_rank_without_the_model_knows_nothing_of_the_update(model: Lookup) -> None:
    layout = ParallelLayout(1, first_rank=1)

    def body(group: ThreadGroup) -> bool:
        which = critic(
            Lookup(width=1, layout=layout, dp_group=ThreadGroup(Meeting(1), 0)) if group.rank() == 1 else None, 0.2
        )
        which.model.layout, which.bootstrap = layout, True
        values, bootstrap = which.compute_values(made := batch())
        assert values.shape == made.token_ids.shape and values[made.loss_mask].all()  # rows of this rank
        assert bootstrap is not None and bootstrap.all()
        return bool(which.deliver_update(made)()) and which.model.num_updates == 1

    assert run_ranks(2, body) == [False, True]


def test_a_critic_in_units_of_the_returns_is_the_plain_one_on_returns_in_these_units(model: Lookup) -> None:
    made = batch()
    assert made.returns is not None and made.old_values is not None
    returns = made.returns[made.loss_mask].double()
    mean, deviation = float(returns.mean()), float(returns.std(unbiased=False))
    whole = critic(model, 0.2)
    whole.normalizer, whole.bootstrap = ReturnNormalizer(), True
    found = whole.deliver_update(made)().metrics
    # Before the first step the units are plain, so the old values stay.
    plain = replace(made, returns=(made.returns - mean) / deviation)
    assert found["loss/value"] == pytest.approx(
        slow_loss(model.table.detach().double(), plain, 0.2, range(6))["loss"].item(), rel=1e-4
    )
    values, last = whole.compute_values(made)
    whole.normalizer = None
    raw, raw_last = whole.compute_values(made)
    torch.testing.assert_close(values, torch.where(made.loss_mask, raw * deviation + mean, 0.0), rtol=1e-5, atol=1e-5)
    assert last is not None and raw_last is not None
    torch.testing.assert_close(last, raw_last * deviation + mean, rtol=1e-5, atol=1e-5)


def test_a_wild_return_does_not_keep_a_critic_with_a_normalizer_from_learning(model: Lookup) -> None:
    made = batch()
    assert made.returns is not None
    made.returns[made.loss_mask.nonzero()[0]] = 3e38
    plain = critic(model, None).deliver_update(made)().metrics
    assert plain["critic/skipped_updates"] == 1.0, "its square is not finite"
    which = critic(model, None)
    which.normalizer = ReturnNormalizer()
    found = which.deliver_update(made)().metrics
    assert found["critic/skipped_updates"] == 0.0 and found["loss/value"] < 100**2
