"""Actor and reference over a bigram model: logits are a row of a table. The real model is in tests/distributed.

The oracle goes token by token in double precision, without masks, weights or microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig, ScheduleConfig, TrainerConfig
from rlhf_mcore.roles import policy as module
from rlhf_mcore.roles.policy import Actor, Policy, Reference
from rlhf_mcore.roles.trained import Updates
from rlhf_mcore.types import LocalParameter, Shard, TrainBatch
from tests.unit.roles import lookup
from tests.unit.roles.lookup import Layout, Lookup, descend, noise, stay

pytestmark = pytest.mark.usefixtures("world")

TEMPERATURE = 0.7


@pytest.fixture
def bigram(monkeypatch: pytest.MonkeyPatch) -> Lookup:
    return Lookup().take_over(monkeypatch)


def actor(
    model: Lookup | None,
    algorithm: AlgorithmConfig,
    optimizer: Any = stay,
    *,
    prompts_per_minibatch: int = 3,
    ppo_epochs: int = 1,
    **trainer: Any,
) -> Actor:
    settings: dict[str, Any] = dict(max_tokens_per_microbatch=64)
    cfg = OptimizerConfig(lr=0.5, schedule=ScheduleConfig(warmup_updates=2))
    updates = Updates(prompts_per_minibatch, ppo_epochs, algorithm.loss_aggregation, algorithm.constant_length)
    spec: Any = Lookup().spec
    which: Any = model
    return Actor(
        which, spec, TrainerConfig(**{**settings, **trainer}), optimizer, cfg, updates, "actor", TEMPERATURE, algorithm
    )


def policy(model: Lookup | None, **trainer: Any) -> Policy:
    which: Any = model
    return Policy(which, Lookup().spec, TrainerConfig(**trainer), TEMPERATURE)


def batch() -> TrainBatch:
    """With made-up old and reference logprobs close to the model's, and an advantage per row."""
    made = lookup.batch()
    log_p = torch.log_softmax(Lookup().table.detach() / TEMPERATURE, dim=-1)
    logprobs = log_p[made.token_ids.roll(1, 1), made.token_ids]
    nowhere = torch.where(made.loss_mask, 0.0, 50.0)  # garbage outside of the responses
    made.old_logprobs, made.ref_logprobs = (logprobs + noise(logprobs, seed) + nowhere for seed in (3, 4))
    made.advantages = torch.tensor([1.0, -1.0, 0.5, -0.5, 0.0, 2.0])[:, None] * made.loss_mask
    return made


def slow_loss(table: Tensor, made: TrainBatch, cfg: AlgorithmConfig, which: Sequence[int]) -> dict[str, Any]:
    """Equations of PPO, GRPO, Dr. GRPO and DAPO as they are printed, one token after the other."""
    log_p = torch.log_softmax(table / TEMPERATURE, dim=-1)
    assert made.old_logprobs is not None and made.ref_logprobs is not None and made.advantages is not None
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
    """What the estimation of advantages says of a step with a constant weight."""
    return cfg.kl.coef if cfg.kl.placement == "loss" else 0.0


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("max_tokens", [8, 16, 64])
@pytest.mark.parametrize("packing", [True, False])
def test_gradient_and_metrics_equal_the_equations_however_the_batch_is_cut(
    bigram: Lookup, name: str, max_tokens: int, packing: bool
) -> None:
    cfg, made = ALGORITHMS[name], batch()
    made.kl_coef = kl_in_loss(cfg)
    metrics = actor(bigram, cfg, max_tokens_per_microbatch=max_tokens, packing=packing).update(made)
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


def test_old_logprobs_of_the_model_itself_give_the_plain_policy_gradient(bigram: Lookup) -> None:
    # Ratios are 1, so the gradient is that of -mean over rows of mean over tokens of A log p (REINFORCE).
    made, cfg = batch(), AlgorithmConfig()
    which = actor(bigram, cfg)
    made.old_logprobs = which.compute_logprobs(made)
    metrics = which.update(made)
    assert metrics["actor/importance_ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["actor/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/clip_fraction_low"] == metrics["actor/clip_fraction_high"] == 0.0
    table = bigram.table.detach().double().requires_grad_()
    log_p = torch.log_softmax(table / TEMPERATURE, dim=-1)
    assert made.advantages is not None
    for row in range(6):
        at = made.loss_mask[row].nonzero().flatten().tolist()
        values = [log_p[made.token_ids[row, t - 1], made.token_ids[row, t]] for t in at]
        (-made.advantages[row, at[0]].double() * sum(values) / len(at) / 6).backward(retain_graph=True)
    assert bigram.table.grad is not None and table.grad is not None
    torch.testing.assert_close(bigram.table.grad.double(), table.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("role", [policy, lambda model, **trainer: actor(model, AlgorithmConfig(), **trainer)])
def test_logprobs_by_token(bigram: Lookup, packing: bool, role: Any) -> None:
    made = batch()
    logprobs = role(bigram, max_tokens_per_microbatch=10, packing=packing).compute_logprobs(made)
    assert logprobs.shape == made.token_ids.shape and logprobs.dtype == torch.float32
    assert len(bigram.calls[0][1]) > 1
    scaled = [[math.exp(x / TEMPERATURE) for x in row] for row in bigram.table.tolist()]
    for row in range(6):
        for t in range(made.token_ids.size(1)):
            p = 1.0  # outside of the response
            if made.loss_mask[row, t]:
                weights = scaled[made.token_ids[row, t - 1]]
                p = weights[made.token_ids[row, t]] / sum(weights)
            assert logprobs[row, t].item() == pytest.approx(math.log(p), abs=1e-5)


def test_minibatches_and_epochs_in_order(bigram: Lookup) -> None:
    which = actor(bigram, AlgorithmConfig(), prompts_per_minibatch=1, ppo_epochs=2, max_tokens_per_microbatch=1000)
    made = batch()
    metrics = which.update(made)
    # Six updates of two rows each, in a warm-up of two updates to a rate of one half.
    assert bigram.calls == [[2], ("step", 0.25), [2], ("step", 0.5)] + [[2], ("step", 0.5)] * 4
    assert which.num_updates == 6 and metrics["actor/lr"] == pytest.approx((0.25 + 5 * 0.5) / 6)
    which.update(made)
    assert which.num_updates == 12 and bigram.calls[-1] == ("step", 0.5)


def test_metrics_are_means_over_updates_and_each_has_its_own_counts(bigram: Lookup) -> None:
    cfg, made = ALGORITHMS["all"], batch()
    made.kl_coef = kl_in_loss(cfg)
    metrics = actor(bigram, cfg, prompts_per_minibatch=1).update(made)
    table = bigram.table.detach().double()
    parts = [slow_loss(table, made, cfg, rows_of) for rows_of in ([0, 1], [2, 3], [4, 5])]
    assert metrics["loss/total"] == pytest.approx(sum(p["loss"].item() for p in parts) / 3, abs=1e-5)
    assert metrics["loss/kl"] == pytest.approx(sum(p["kl"] for p in parts) / 3, abs=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(sum(p["entropy"] for p in parts) / 3, abs=1e-5)


def test_every_update_starts_from_the_weights_that_the_last_one_left(bigram: Lookup) -> None:
    cfg, made = ALGORITHMS["all"], batch()
    made.kl_coef = kl_in_loss(cfg)
    table = bigram.table.detach().double().requires_grad_()
    actor(bigram, cfg, descend, prompts_per_minibatch=2, ppo_epochs=2).update(made)
    # Two prompts with two rows each, then the prompt that is left; twice.
    for lr, which in ((0.25, [0, 1, 2, 3]), (0.5, [4, 5]), (0.5, [0, 1, 2, 3]), (0.5, [4, 5])):
        (gradient,) = torch.autograd.grad(slow_loss(table, made, cfg, which)["loss"], table)
        table.data -= lr * gradient
    torch.testing.assert_close(bigram.table.detach().double(), table.detach(), rtol=1e-5, atol=1e-5)


def test_skipped_updates_are_counted(bigram: Lookup) -> None:
    answers = iter([True, False, False])
    which = actor(bigram, AlgorithmConfig(), lambda model, lr: next(answers), prompts_per_minibatch=1)
    metrics = which.update(batch())
    assert metrics["actor/skipped_updates"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_fault_23_a_loss_that_is_not_finite_makes_no_update(bigram: Lookup, value: float) -> None:
    which, bad, good = actor(bigram, AlgorithmConfig(), descend, prompts_per_minibatch=1), batch(), batch()
    assert bad.advantages is not None
    bad.advantages[2:] *= value  # the first minibatch is sound
    before = bigram.table.detach().clone()
    metrics = which.update(bad)
    assert [call[0] for call in bigram.calls].count("step") == 1
    assert metrics["actor/skipped_updates"] == pytest.approx(2 / 3) and metrics["actor/bad_updates_in_a_row"] == 2
    assert bigram.table.isfinite().all() and not torch.equal(bigram.table, before)
    assert which.update(good)["actor/bad_updates_in_a_row"] == 0


def test_fault_23_weights_that_an_update_has_spoiled_are_told(bigram: Lookup) -> None:
    def spoil(model: Lookup, lr: float) -> bool:
        model.table.data[2, 3] = math.nan
        return True

    assert "actor/not_finite" not in actor(bigram, AlgorithmConfig(), descend).update(batch())
    assert actor(bigram, AlgorithmConfig(), spoil).update(batch())["actor/not_finite"] == 1.0


def test_a_rank_without_rows_takes_part_and_adds_nothing(bigram: Lookup) -> None:
    made = batch()
    bigram.layout, bigram.dp_rank = Layout(dp=7), 6
    which = actor(bigram, ALGORITHMS["all"])
    assert not which.compute_logprobs(made).any()
    metrics = which.update(made)
    assert bigram.calls == [("forward", [0]), [0], ("step", 0.25)]
    assert bigram.table.grad is not None and not bigram.table.grad.any()
    assert metrics["loss/total"] == 0.0 and metrics["actor/entropy"] == 0.0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_shares_of_the_ranks_add_up_to_the_gradient_of_one(bigram: Lookup, name: str) -> None:
    cfg, made = ALGORITHMS[name], batch()
    made.kl_coef = kl_in_loss(cfg)
    table = bigram.table.detach().double().requires_grad_()
    slow_loss(table, made, cfg, range(6))["loss"].backward()
    total, logprobs = torch.zeros_like(bigram.table), torch.zeros(made.token_ids.shape)
    for rank in range(4):
        bigram.layout, bigram.dp_rank = Layout(dp=4), rank
        which = actor(bigram, cfg)
        logprobs += which.compute_logprobs(made)
        which.update(made)
        assert bigram.table.grad is not None
        total += bigram.table.grad
    assert table.grad is not None
    torch.testing.assert_close(total.double(), table.grad, rtol=1e-4, atol=1e-6)
    bigram.layout, bigram.dp_rank = Layout(), 0
    assert torch.equal(logprobs, policy(bigram).compute_logprobs(made))


def test_a_rank_without_the_model_knows_nothing_of_the_update(bigram: Lookup) -> None:
    assert actor(None, AlgorithmConfig()).update(batch()) == {}
    assert bigram.calls == []


def parameters(*tensors: Tensor) -> list[LocalParameter]:
    return [LocalParameter(f"w{k}", tensor, Shard(0, 1)) for k, tensor in enumerate(tensors)]


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_refreshed_reference_has_the_actors_weights(monkeypatch: pytest.MonkeyPatch, offloaded: bool) -> None:
    # Models are lists of tensors here; what they are in truth is a matter of local_parameters.
    monkeypatch.setattr(module, "local_parameters", lambda model: parameters(*model))
    mine, theirs = [torch.zeros(3), torch.zeros(2, 2)], [torch.arange(3.0), torch.ones(2, 2)]
    events: list[str] = []

    class Host:
        @contextmanager
        def resident(self) -> Iterator[None]:
            events.append("on the device")
            yield
            events.append("off the device")

        def store(self) -> None:
            events.append("stored")

    trainer, host = TrainerConfig(), Host() if offloaded else None
    which = Reference(mine, None, trainer, 1.0, host_weights=host)  # type: ignore[arg-type]
    which.refresh(SimpleNamespace(model=theirs))  # type: ignore[arg-type]
    assert [x.tolist() for x in mine] == [[0.0, 1.0, 2.0], [[1.0, 1.0], [1.0, 1.0]]]
    theirs[0] += 1
    assert mine[0].tolist() == [0.0, 1.0, 2.0]  # a copy
    assert events == (["on the device", "stored", "off the device"] if offloaded else [])


def test_a_reference_takes_over_nothing_where_there_is_no_model() -> None:
    trainer: Any = TrainerConfig()
    nothing: Any = None
    which = Reference(nothing, nothing, trainer, 1.0)
    which.refresh(policy(None))
    assert which.model is None
    # The reference's ranks are the actor's: one that holds a part of neither gets the same zeros for rows that nobody has.
    assert not which.compute_logprobs(batch()).any()


def test_correction_factors_weigh_the_policy_loss(bigram: Lookup) -> None:
    made, cfg = batch(), AlgorithmConfig(loss_aggregation="token")
    made.correction = torch.where(made.loss_mask, 0.5, 0.0)
    halved = actor(bigram, cfg).update(made)
    made.correction = None
    assert halved["loss/policy"] == pytest.approx(0.5 * actor(bigram, cfg).update(made)["loss/policy"], abs=1e-6)
    made.correction = made.loss_mask.float()
    made.correction[0] = 0.0
    part = actor(bigram, cfg).update(made)
    rest = slow_loss(bigram.table.detach().double(), made, cfg, range(1, 6))
    share = float(made.loss_mask[1:].sum() / made.loss_mask.sum())
    assert part["loss/policy"] == pytest.approx(share * rest["policy"], abs=1e-5), (
        "the count of the whole minibatch stays"
    )


def test_correction_leaves_kl_and_entropy_alone(bigram: Lookup) -> None:
    """Every token is left out of the policy term: what stays are the other two terms, whole."""
    cfg = AlgorithmConfig(loss_aggregation="token", entropy_coef=0.2, kl=KLConfig(coef=0.3))
    made = batch()
    made.kl_coef, made.correction = 0.3, torch.zeros(made.loss_mask.shape)
    found = actor(bigram, cfg).update(made)
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
