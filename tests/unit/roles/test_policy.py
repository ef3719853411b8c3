"""Test actor and reference over a bigram model, whose logits are a row of a table. tests/distributed tests a real model.

The oracle computes token by token in double precision, without masks, weights or microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import (
    AlgorithmConfig,
    KLConfig,
    OptimizerConfig,
    RolloutCorrectionConfig,
    ScheduleConfig,
    TrainerConfig,
)
from rlhf_mcore.geometry import LocalParameter, Shard
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.residency.sharing import Movable
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Actor, Reference
from rlhf_mcore.roles.trained_model import MinibatchPlan, TrainedModel
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.reinforcement import PolicyLearner, Roles
from rlhf_mcore.types import Ragged, TrainBatch
from tests.rows import flat, padded_batch
from tests.unit.pairs import pairwise
from tests.unit.parallel.world import Meeting, ThreadGroup, run_ranks
from tests.unit.roles import lookup
from tests.unit.roles.lookup import VOCAB, Lookup, descend, noise, stay

pytestmark = pytest.mark.usefixtures("world")

TEMPERATURE = 0.7
# Bound for two computations of the table's logprobs in fp32, or of such numbers in double precision. All numbers are below 8.
# Each of about four operations rounds by half a unit in the last place of 4 to 8, 2**-22. Gradients of a row and
# means differ by less.
ROUNDED = 2 * 4 * 2**-22


@pytest.fixture
def bigram() -> Lookup:
    return Lookup()


def actor(
    model: Lookup | None,
    algorithm: AlgorithmConfig,
    rule: Any = stay,
    *,
    prompts_per_minibatch: int = 3,
    ppo_epochs: int = 1,
    **trainer: Any,
) -> Actor:
    settings: dict[str, Any] = dict(max_tokens_per_microbatch=64)
    cfg = OptimizerConfig(lr=0.5, schedule=ScheduleConfig(warmup=2))
    plan = MinibatchPlan(prompts_per_minibatch, ppo_epochs, algorithm.loss_aggregation, algorithm.constant_length)
    layout = model.layout if model is not None else ParallelLayout(1)
    spec: Any = Lookup().spec
    which: Any = model
    if model is not None:
        model.rule = rule
    limits = TrainerConfig(**{**settings, **trainer})
    trained = TrainedModel(layout, which, spec, limits, optimizer=cfg, plan=plan, name="actor")
    return Actor(trained, TEMPERATURE, algorithm)


def update(which: Actor, made: TrainBatch) -> dict[str, float]:
    result = which.deliver_update(made)()
    return result.metrics if result is not None else {}


def reference(model: Lookup, **trainer: Any) -> Reference:
    which: Any = model
    return Reference(RoleModel(model.layout, which, Lookup().spec, TrainerConfig(**trainer)), TEMPERATURE)


def batch(owner: int | None = None) -> TrainBatch:
    """Build a batch with old and reference logprobs close to the model's, and an advantage per row."""
    made = lookup.batch(owner=owner)
    whole = padded_batch(made)
    log_p = torch.log_softmax(Lookup().table.detach() / TEMPERATURE, dim=-1)
    ids = whole.token_ids.long()
    logprobs = log_p[ids.roll(1, 1), ids]
    nowhere = torch.where(whole.loss_mask, 0.0, 50.0)  # garbage outside the responses
    made.old_logprobs, made.ref_logprobs = (flat(made, logprobs + noise(logprobs, seed) + nowhere) for seed in (3, 4))
    made.advantages = flat(made, torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0])[:, None] * whole.loss_mask)
    return made


def slow_loss(table: Tensor, made: TrainBatch, cfg: AlgorithmConfig, which: Sequence[int]) -> dict[str, Any]:
    """Compute the printed equations of PPO, GRPO, Dr. GRPO and DAPO, one token after the other."""
    log_p = torch.log_softmax(table / TEMPERATURE, dim=-1)
    made = padded_batch(made)
    tokens = sum(int(made.loss_mask[row].sum()) for row in which)
    total, out = torch.zeros((), dtype=torch.float64), dict.fromkeys(("kl", "entropy", "low", "high", "ratio"), 0.0)
    policy = 0.0
    for row in which:
        at = made.loss_mask[row].nonzero().flatten().tolist()
        weight = {
            "token": 1 / tokens,
            "sequence": 1 / (len(at) * len(which)),
            "constant": 1 / ((cfg.constant_length or 1) * len(which)),
        }[cfg.loss_aggregation]
        for t in at:
            before, now = made.token_ids[row, t - 1], made.token_ids[row, t]
            logprob, advantage = log_p[before, now], float(made.advantages[row, t])
            ratio = (logprob - made.old_logprobs[row, t].double()).exp()
            clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
            surrogate = torch.min(ratio * advantage, clipped * advantage)
            d = made.ref_logprobs[row, t].double() - logprob
            kl = d.exp() - 1 - d
            entropy = -(log_p[before].exp() * log_p[before]).sum()
            loss = -surrogate - cfg.entropy_coef * entropy
            if cfg.kl.placement == "loss":
                loss = loss + cfg.kl.coef * kl
            total = total + weight * loss
            policy -= weight * surrogate.item()
            out["kl"] += kl.item() / tokens
            out["entropy"] += entropy.item() / tokens
            out["ratio"] += ratio.item() / tokens
            out["low"] += float(ratio < 1 - cfg.clip_low and advantage < 0) / tokens
            out["high"] += float(ratio > 1 + cfg.clip_high and advantage > 0) / tokens
    return {"loss": total, "policy": policy, **out}


ALGORITHMS = {
    "token": AlgorithmConfig(loss_aggregation="token"),
    "sequence with kl": AlgorithmConfig(loss_aggregation="sequence", kl=KLConfig(coef=0.3)),
    "constant with entropy": AlgorithmConfig(loss_aggregation="constant", constant_length=9, entropy_coef=0.2),
    "all": AlgorithmConfig(clip_low=0.1, clip_high=0.3, entropy_coef=0.05, kl=KLConfig(coef=0.1)),
    "kl in the reward": AlgorithmConfig(kl=KLConfig(coef=0.1, placement="reward")),
}


def kl_in_loss(cfg: AlgorithmConfig) -> float:
    """Return the coefficient of the KL in the loss, as the advantage computation does for a constant coefficient."""
    return cfg.kl.coef if cfg.kl.placement == "loss" else 0.0


@pairwise(
    ("name", list(ALGORITHMS)),
    ("max_tokens", [8, 16, 64]),
    ("packing", [True, False]),
)
def test_gradient_and_metrics_equal_the_equations_however_the_batch_is_cut(
    bigram: Lookup, name: str, max_tokens: int, packing: bool
) -> None:
    cfg, made = ALGORITHMS[name], batch()
    made.kl_coef = kl_in_loss(cfg)
    metrics = actor(bigram, cfg, max_tokens_per_microbatch=max_tokens, packing=packing).deliver_update(made)().metrics
    table = bigram.table.detach().double().requires_grad_()
    expected = slow_loss(table, made, cfg, range(6))
    expected["loss"].backward()
    assert bigram.table.grad is not None and table.grad is not None
    torch.testing.assert_close(bigram.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)
    assert metrics["loss/total"] == pytest.approx(expected["loss"].item(), abs=1e-5)
    assert metrics["loss/policy"] == pytest.approx(expected["policy"], abs=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
    assert metrics["actor/importance_ratio"] == pytest.approx(expected["ratio"], abs=1e-5)
    assert metrics["actor/clip_fraction_low"] == pytest.approx(expected["low"], abs=1e-6)
    assert metrics["actor/clip_fraction_high"] == pytest.approx(expected["high"], abs=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(float(table.grad.norm()), rel=1e-4)
    if cfg.kl.coef and cfg.kl.placement == "loss":
        assert metrics["loss/kl"] == pytest.approx(expected["kl"], abs=1e-5)
    else:
        assert "loss/kl" not in metrics
    assert (len(bigram.calls[0]) > 1) == (max_tokens < 64)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("prompts", [1, 2])
def test_metrics_of_a_steps_updates_are_means_over_its_tokens_not_over_its_updates(
    bigram: Lookup, name: str, prompts: int
) -> None:
    """Minibatches of different sizes run twice each without a change of the model. The result equals one update of all rows."""
    cfg, made = ALGORITHMS[name], batch()
    made.kl_coef = kl_in_loss(cfg)
    sampled = made.num_sampled.view(3, 2).sum(1)
    assert len(set(sampled.tolist())) > 1, "prompts with as many tokens would hide it"
    metrics = update(actor(bigram, cfg, prompts_per_minibatch=prompts, ppo_epochs=2), made)
    expected = slow_loss(bigram.table.detach().double(), made, cfg, range(6))
    assert metrics["loss/total"] == pytest.approx(expected["loss"].item(), abs=1e-5)
    assert metrics["loss/policy"] == pytest.approx(expected["policy"], abs=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
    assert metrics["actor/importance_ratio"] == pytest.approx(expected["ratio"], abs=1e-5)
    assert metrics["actor/clip_fraction_low"] == pytest.approx(expected["low"], abs=1e-6)
    assert metrics["actor/clip_fraction_high"] == pytest.approx(expected["high"], abs=1e-6)
    if cfg.kl.coef and cfg.kl.placement == "loss":
        assert metrics["loss/kl"] == pytest.approx(expected["kl"], abs=1e-5)


def test_old_logprobs_of_the_model_itself_give_the_plain_policy_gradient(bigram: Lookup) -> None:
    # Ratios are 1, so the gradient equals REINFORCE's: -mean over rows of the mean over tokens of A log p.
    made, cfg = batch(), AlgorithmConfig()
    which = actor(bigram, cfg)
    made.old_logprobs = which.compute_logprobs(made)
    metrics = update(which, made)
    assert metrics["actor/importance_ratio"] == pytest.approx(1.0, abs=ROUNDED)
    assert metrics["actor/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/clip_fraction_low"] == metrics["actor/clip_fraction_high"] == 0.0
    table = bigram.table.detach().double().requires_grad_()
    log_p = torch.log_softmax(table / TEMPERATURE, dim=-1)
    whole = padded_batch(made)
    for row in range(6):
        at = whole.loss_mask[row].nonzero().flatten().tolist()
        values = [log_p[whole.token_ids[row, t - 1], whole.token_ids[row, t]] for t in at]
        (-whole.advantages[row, at[0]].double() * sum(values) / len(at) / 6).backward(retain_graph=True)
    assert bigram.table.grad is not None and table.grad is not None
    torch.testing.assert_close(bigram.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence", "token"])
def test_truncated_responses_are_compared_with_and_not_learned_from(bigram: Lookup, aggregation: str) -> None:
    """The loss mask of such a row is 0, and its score counts in its group's mean, as in TRL's mask_truncated_completions."""
    cfg = AlgorithmConfig(mask_truncated=True, normalize_std=False, loss_aggregation=aggregation)
    made = lookup.batch()
    made.scores = torch.tensor([1.0, 0.0, 0.0, 3.0, 2.0, 0.0], dtype=torch.float64)
    made.truncated[[1, 4]] = True
    advantages = {0: 0.5, 2: -1.5, 3: 1.5, 5: -1.0}  # relative to the mean of the pair
    recorder: Any = SimpleNamespace(phase=lambda name: nullcontext())
    results, _ = PolicyLearner(Roles(actor(bigram, cfg)), AdvantageComputer(cfg), recorder).learn(1, made)
    table = bigram.table.detach().double().requires_grad_()
    log_p = torch.log_softmax(table / TEMPERATURE, dim=-1)
    whole = padded_batch(made)
    at = {row: whole.loss_mask[row].nonzero().flatten().tolist() for row in advantages}
    num_tokens = sum(len(places) for places in at.values())
    for row, places in at.items():
        values = [log_p[whole.token_ids[row, t - 1], whole.token_ids[row, t]] for t in places]
        weight = 1 / num_tokens if aggregation == "token" else 1 / len(places) / 6
        (-advantages[row] * weight * sum(values)).backward(retain_graph=True)
    assert bigram.table.grad is not None and table.grad is not None
    torch.testing.assert_close(bigram.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)
    assert results[0].metrics["actor/importance_ratio"] == pytest.approx(1.0, abs=ROUNDED)
    assert made.old_logprobs is not None and (made.old_logprobs[made.loss_mask] < 0).all(), "of all sampled tokens"


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("mode", ["off", "token", "sequence"])
def test_old_logprobs_of_the_update_itself_give_the_same_update(mode: str) -> None:
    """This includes all values computed from them: the correction with its band and ages, and the KL."""
    correction = RolloutCorrectionConfig(mode=mode, cap=1.2, mask_low=0.8, max_token_staleness=1)
    cfg = AlgorithmConfig(kl=KLConfig(coef=0.1), entropy_coef=0.1, rollout_correction=correction)

    def body(group: ThreadGroup) -> list[tuple[Tensor, dict[str, float], Tensor]]:
        found = []
        for skipped in (False, True):
            made, mine = batch(), Lookup(layout=ParallelLayout(2))
            which, estimation = actor(mine, cfg, packing=False, max_tokens_per_microbatch=16), AdvantageComputer(cfg)
            made.rollout_logprobs = -1.5 - noise(made.rollout_logprobs, 5).abs() * made.loss_mask
            made.versions, made.policy_version = torch.arange(len(made.token_ids)).int() % 3, 2
            made.scores = torch.arange(6).double() % 4
            made.old_logprobs = None if skipped else which.compute_logprobs(made)
            assert which.makes_one_update(made)
            metrics = estimation(made) | update(which, made)
            if skipped:
                made.old_logprobs = which.logprobs_of_update(made)
                metrics |= estimation.compare(made)
            assert mine.table.grad is not None and made.old_logprobs is not None
            found.append((mine.table.grad, metrics, made.old_logprobs))
        return found

    for (gradient, before, computed), (again, after, kept) in run_ranks(2, body):
        torch.testing.assert_close(again, gradient, rtol=0, atol=ROUNDED)
        torch.testing.assert_close(kept, computed, rtol=0, atol=ROUNDED)
        assert after == pytest.approx(before, rel=5 * ROUNDED, abs=ROUNDED)  # ratios of up to five tokens
        assert after["rollout/stale_fraction"] > 0 and after["actor/importance_ratio"] == 1.0
        assert (after["rollout/effective_sample_size"] < 0.999) and (
            (after["rollout/masked_fraction"] > 0) == (mode != "off")
        )


def with_support(made: TrainBatch) -> list[list[int]]:
    """Add a support to the batch: tokens at an even distance to the sampled token, and no support at every third place.

    Returns it.
    """
    sampled = zip(made.loss_mask.tolist(), made.token_ids.tolist(), strict=True)
    parts = [
        sorted((token + 2 * k) % VOCAB for k in range(VOCAB // 2)) if is_sampled and place % 3 else []
        for place, (is_sampled, token) in enumerate(sampled)
    ]
    ids = [each for part in parts for each in part]
    made.support = Ragged(torch.tensor([len(part) for part in parts]).int(), torch.tensor(ids).int())
    return parts


@pytest.mark.parametrize("packing", [True, False])
def test_with_a_support_ratios_are_of_it_and_kl_and_entropy_are_not(bigram: Lookup, packing: bool) -> None:
    cfg, plain, made = ALGORITHMS["all"], batch(), batch()
    plain.kl_coef = made.kl_coef = 0.1
    supports = with_support(made)
    which = actor(bigram, cfg, packing=packing, max_tokens_per_microbatch=16)
    own = which.compute_logprobs(made)
    assert made.log_mass is not None
    log_p = torch.log_softmax(bigram.table.detach().double() / TEMPERATURE, dim=-1)
    ids = made.token_ids.tolist()
    for place, (is_sampled, support) in enumerate(zip(made.loss_mask.tolist(), supports, strict=True)):
        mass = float(log_p[ids[place - 1], support].logsumexp(0)) if support else 0.0
        expected = (float(log_p[ids[place - 1], ids[place]]) - mass, mass) if is_sampled else (0.0, 0.0)
        assert (float(own[place]), float(made.log_mass[place])) == pytest.approx(expected, abs=ROUNDED)
    before, after = update(which, plain), update(which, made)
    for name in ("loss/kl", "actor/entropy"):
        assert after[name] == pytest.approx(before[name], abs=ROUNDED)
    assert abs(after["actor/importance_ratio"] - before["actor/importance_ratio"]) > 0.1
    made.old_logprobs = made.log_mass = None
    update(which, made)
    torch.testing.assert_close(which.logprobs_of_update(made), own, rtol=0, atol=ROUNDED)
    assert made.log_mass is not None


def test_a_step_of_several_updates_is_not_one(bigram: Lookup) -> None:
    for settings in ({"prompts_per_minibatch": 2}, {"ppo_epochs": 2}):
        assert not actor(bigram, AlgorithmConfig(), **settings).makes_one_update(batch())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("role", [reference, lambda model, **trainer: actor(model, AlgorithmConfig(), **trainer)])
def test_logprobs_by_token(bigram: Lookup, packing: bool, role: Any) -> None:
    made = batch()
    logprobs = role(bigram, max_tokens_per_microbatch=10, packing=packing).compute_logprobs(made)
    assert logprobs.shape == made.token_ids.shape and logprobs.dtype == torch.float32
    assert len(bigram.calls[0][1]) > 1
    made.old_logprobs = logprobs
    whole = padded_batch(made)
    scaled = [[math.exp(x / TEMPERATURE) for x in row] for row in bigram.table.tolist()]
    for row in range(6):
        for t in range(whole.token_ids.size(1)):
            p = 1.0  # outside the response
            if whole.loss_mask[row, t]:
                weights = scaled[whole.token_ids[row, t - 1]]
                p = weights[whole.token_ids[row, t]] / sum(weights)
            assert whole.old_logprobs[row, t].item() == pytest.approx(math.log(p), abs=1e-5)


def test_minibatches_and_epochs_in_order(bigram: Lookup) -> None:
    which = actor(bigram, AlgorithmConfig(), prompts_per_minibatch=1, ppo_epochs=2, max_tokens_per_microbatch=1000)
    made = batch()
    metrics = update(which, made)
    # Six updates of two rows each. The warm-up takes two updates to a rate of one half.
    assert bigram.calls == [[2], ("step", 0.25), [2], ("step", 0.5)] + [[2], ("step", 0.5)] * 4
    assert which.model.num_updates == 6 and metrics["actor/lr"] == pytest.approx((0.25 + 5 * 0.5) / 6)
    update(which, made)
    assert which.model.num_updates == 12 and bigram.calls[-1] == ("step", 0.5)


def test_every_update_starts_from_the_weights_that_the_last_one_left(bigram: Lookup) -> None:
    cfg, made = ALGORITHMS["all"], batch()
    made.kl_coef = kl_in_loss(cfg)
    table = bigram.table.detach().double().requires_grad_()
    actor(bigram, cfg, descend, prompts_per_minibatch=2, ppo_epochs=2).deliver_update(made)()
    # Two prompts with two rows each, then the remaining prompt; twice.
    for lr, which in ((0.25, [0, 1, 2, 3]), (0.5, [4, 5]), (0.5, [0, 1, 2, 3]), (0.5, [4, 5])):
        (gradient,) = torch.autograd.grad(slow_loss(table, made, cfg, which)["loss"], table)
        table.data -= lr * gradient
    torch.testing.assert_close(bigram.table.detach().double(), table.detach(), rtol=1e-5, atol=1e-5)


def test_skipped_updates_are_counted(bigram: Lookup) -> None:
    answers = iter([True, False, False])
    which = actor(bigram, AlgorithmConfig(), lambda model, lr: next(answers), prompts_per_minibatch=1)
    metrics = update(which, batch())
    assert metrics["actor/skipped_updates"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fault_23_a_loss_that_is_not_finite_makes_no_update(bigram: Lookup, value: float) -> None:
    which, bad, good = actor(bigram, AlgorithmConfig(), descend, prompts_per_minibatch=1), batch(), batch()
    assert bad.advantages is not None
    bad.advantages[int(bad.lengths[:2].sum()) :] *= value  # the first minibatch is finite
    before = bigram.table.detach().clone()
    metrics = update(which, bad)
    assert [call[0] for call in bigram.calls].count("step") == 1
    assert metrics["actor/skipped_updates"] == pytest.approx(2 / 3) and metrics["actor/bad_updates_in_a_row"] == 2
    assert bigram.table.isfinite().all() and not torch.equal(bigram.table, before)
    assert update(which, good)["actor/bad_updates_in_a_row"] == 0


def test_fault_23_weights_that_an_update_has_spoiled_are_told(bigram: Lookup) -> None:
    def spoil(model: Lookup, lr: float) -> bool:
        model.table.data[2, 3] = math.nan
        return True

    assert "actor/not_finite" not in update(actor(bigram, AlgorithmConfig(), descend), batch())
    assert update(actor(bigram, AlgorithmConfig(), spoil), batch())["actor/not_finite"] == 1.0


@pytest.mark.usefixtures("rank_threads")
@pairwise(
    ("name", list(ALGORITHMS)),
    ("dp", [2, 7]),
    (
        "owner, packing",
        [
            ("dealt", True),
            ("dealt", False),
            ("first", True),
            ("last", False),
        ],
    ),
)
def test_shares_of_the_ranks_add_up_to_the_gradient_of_one_whoever_owns_the_rows(
    bigram: Lookup, name: str, dp: int, owner: str, packing: bool
) -> None:
    cfg = ALGORITHMS[name]

    def body(group: ThreadGroup) -> tuple[Tensor, dict[str, float]]:
        made = batch({"dealt": None, "first": 0, "last": dp - 1}[owner])
        made.kl_coef = kl_in_loss(cfg)
        mine = Lookup(layout=ParallelLayout(dp))
        metrics = update(actor(mine, cfg, packing=packing), made)
        assert mine.table.grad is not None
        return mine.table.grad, metrics

    ranks = run_ranks(dp, body)
    table = bigram.table.detach().double().requires_grad_()

    def oracle(_: ThreadGroup) -> dict[str, Any]:
        made = batch()
        return slow_loss(table, made, cfg, range(6))

    (expected,) = run_ranks(1, oracle)  # the same batch in a world of one
    expected["loss"].backward()
    assert table.grad is not None
    torch.testing.assert_close(sum(grad for grad, _ in ranks).double(), table.grad, rtol=1e-4, atol=1e-6)
    for _, metrics in ranks:  # all ranks report the same values
        assert metrics["loss/total"] == pytest.approx(expected["loss"].item(), abs=1e-5)
        assert metrics["actor/entropy"] == pytest.approx(expected["entropy"], abs=1e-5)


@pytest.mark.usefixtures("rank_threads")
def test_a_rank_without_the_model_knows_nothing_of_the_update(bigram: Lookup) -> None:
    def body(group: ThreadGroup) -> dict[str, float]:
        layout = ParallelLayout(1, first_rank=1)
        which = actor(
            Lookup(layout=layout, dp_group=ThreadGroup(Meeting(1), 0)) if group.rank() == 1 else None, AlgorithmConfig()
        )
        which.model.layout = layout
        return update(which, batch())  # its own rows are trained on

    outside, inside = run_ranks(2, body)
    assert outside == {}
    table = bigram.table.detach().double()
    (expected,) = run_ranks(1, lambda _: slow_loss(table, batch(), AlgorithmConfig(), range(6)))
    assert inside["loss/total"] == pytest.approx(expected["loss"].item(), abs=1e-5)


def parameters(*tensors: Tensor) -> list[LocalParameter]:
    return [LocalParameter(f"w{k}", tensor, Shard(0, 1)) for k, tensor in enumerate(tensors)]


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_refreshed_reference_has_the_actors_weights(offloaded: bool) -> None:
    mine, theirs = [torch.zeros(3), torch.zeros(2, 2)], [torch.arange(3.0), torch.ones(2, 2)]
    events: list[str] = []

    class Moving:
        @contextmanager
        def use(self, *kinds: str, writes: bool = False) -> Iterator[None]:
            events.append(f"{kinds[0]} on the device{' and changed' if writes else ''}")
            yield
            events.append("off the device")

    frozen: Any = SimpleNamespace(
        movable=Moving() if offloaded else Movable(), local_parameters=lambda: parameters(*mine)
    )
    trained: Any = SimpleNamespace(
        model=SimpleNamespace(movable=Movable(), local_parameters=lambda: parameters(*theirs))
    )
    spec: Any = None
    held = RoleModel(ParallelLayout(1), frozen, spec, TrainerConfig())
    Reference(held, 1.0).refresh(SimpleNamespace(model=trained))  # type: ignore[arg-type]
    assert [x.tolist() for x in mine] == [[0.0, 1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]]]
    theirs[0] += 1
    assert mine[0].tolist() == [0.0, 1.0, 2.0]  # a copy
    assert events == (["weights on the device and changed", "off the device"] if offloaded else [])


def test_a_reference_takes_over_nothing_where_there_is_no_model() -> None:
    nothing: Any = None
    held = RoleModel(ParallelLayout(1), nothing, nothing, TrainerConfig())
    Reference(held, 1.0).refresh(actor(None, AlgorithmConfig()))
    assert held.model is None


def test_correction_factors_weigh_the_policy_loss(bigram: Lookup) -> None:
    made, cfg = batch(), AlgorithmConfig(loss_aggregation="token")
    made.correction = torch.where(made.loss_mask, 0.5, 0.0)
    halved = update(actor(bigram, cfg), made)
    made.correction = None
    assert halved["loss/policy"] == pytest.approx(0.5 * update(actor(bigram, cfg), made)["loss/policy"], abs=1e-6)
    made.correction = made.loss_mask.float()
    made.correction[: int(made.lengths[0])] = 0.0  # the first row
    part = update(actor(bigram, cfg), made)
    rest = slow_loss(bigram.table.detach().double(), made, cfg, range(1, 6))
    share = float(made.num_sampled[1:].sum() / made.num_sampled.sum())
    assert part["loss/policy"] == pytest.approx(share * rest["policy"], abs=1e-5), (
        "the count of the whole minibatch stays"
    )


def test_correction_leaves_kl_and_entropy_alone(bigram: Lookup) -> None:
    """The correction masks every token of the policy term. The other two terms remain complete."""
    cfg = AlgorithmConfig(loss_aggregation="token", entropy_coef=0.2, kl=KLConfig(coef=0.3))
    made = batch()
    made.kl_coef, made.correction = 0.3, torch.zeros(made.loss_mask.shape)
    found = update(actor(bigram, cfg), made)
    gradient = bigram.table.grad
    assert made.advantages is not None
    made.advantages = torch.zeros_like(made.advantages)
    table = bigram.table.detach().double().requires_grad_()
    expected = slow_loss(table, made, cfg, range(6))
    expected["loss"].backward()
    assert found["loss/policy"] == 0.0
    assert found["loss/total"] == pytest.approx(expected["loss"].item(), abs=1e-5)
    assert found["loss/kl"] == pytest.approx(expected["kl"], abs=1e-5)
    assert found["actor/entropy"] == pytest.approx(expected["entropy"], abs=1e-5)
    assert gradient is not None and table.grad is not None
    torch.testing.assert_close(gradient.double(), table.grad, rtol=1e-4, atol=1e-6)
