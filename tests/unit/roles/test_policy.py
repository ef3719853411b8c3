"""Actor and reference over a bigram model: logits are a row of a table. The real model is in tests/distributed.

The oracle goes token by token in double precision, without masks, weights or microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig, OptimizerConfig, ScheduleConfig, TrainerConfig
from rlhf_mcore.data.collate import Row, make_train_batch
from rlhf_mcore.roles import policy as module
from rlhf_mcore.roles.policy import Actor, Policy
from rlhf_mcore.types import Microbatch, TrainBatch

pytestmark = pytest.mark.usefixtures("world")

VOCAB = 7
TEMPERATURE = 0.7
NUM_ROWS = 6


@dataclass
class Bigram:
    """What the role needs of a model, and functions in the place of mcore.step and mcore.optimizer."""

    table: Tensor = field(init=False)
    layout: Any = field(default_factory=lambda: SimpleNamespace(tp=1, pp=1, vpp=None, ep=1, sequence_parallel=False))
    is_last_stage: bool = True
    aux_loss_coef: float = 0.0
    calls: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        self.table = table.requires_grad_()

    @property
    def groups(self) -> Any:
        return SimpleNamespace(layout=self.layout, collection=SimpleNamespace(dp=dist.group.WORLD))

    def outputs(self, microbatch: Microbatch, temperature: float) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(self.table[microbatch.token_ids] / temperature, dim=-1)
        labels = microbatch.fields["labels"].unsqueeze(-1)
        return log_p.gather(-1, labels).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    def forward_logprobs(self, model: Any, parts: Sequence[Microbatch], temperature: float) -> list[Any]:
        with torch.no_grad():
            return [self.outputs(part, temperature) for part in parts]

    def forward_backward(
        self, model: Any, parts: Sequence[Microbatch], temperature: float, loss: Callable[..., Any]
    ) -> Any:
        self.calls.append([len(part.rows) for part in parts])
        self.table.grad = None
        found = []
        for part in parts:
            value, metrics = loss(*self.outputs(part, temperature), part)
            value.backward()
            found.append({"loss": value.detach().clone(), **metrics})
        return found

    def optimizer_step(self, model: Any, optimizer: Any, lr: float) -> tuple[bool, float]:
        assert self.table.grad is not None
        self.calls.append(("step", lr))
        return optimizer(self, lr), float(self.table.grad.norm())


def stay(model: Bigram, lr: float) -> bool:
    return True


@pytest.fixture
def bigram(monkeypatch: pytest.MonkeyPatch) -> Bigram:
    made = Bigram()
    for name in ("forward_logprobs", "forward_backward", "optimizer_step"):
        monkeypatch.setattr(module, name, getattr(made, name))
    return made


def actor(model: Bigram, algorithm: AlgorithmConfig, optimizer: Any = stay, **trainer: Any) -> Actor:
    settings: dict[str, Any] = dict(max_tokens_per_microbatch=64)
    cfg = OptimizerConfig(lr=0.5, schedule=ScheduleConfig(warmup_updates=2))
    return Actor(model, TrainerConfig(**{**settings, **trainer}), TEMPERATURE, optimizer, cfg, algorithm)  # type: ignore[arg-type]


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCAB, (count,), generator=generator).tolist()

    return [Row(ids(1 + k % 3), ids(1 + (3 * k) % 5), [0.0] * (1 + (3 * k) % 5), 0.0) for k in range(NUM_ROWS)]


def batch(minibatches: int = 1) -> TrainBatch:
    """With made-up old and reference logprobs close to the model's, and an advantage per row."""
    made = make_train_batch(
        rows(), list(range(6)), [0, 0, 1, 1, 2, 2], [k * minibatches // 6 for k in range(6)], 6, minibatches, 0
    )
    generator = torch.Generator().manual_seed(3)
    truth = Bigram().outputs
    whole = Microbatch(made.token_ids, made.token_ids, [], [], fields={"labels": made.token_ids.roll(-1, 1)})
    logprobs = truth(whole, TEMPERATURE)[0].detach().roll(1, 1)
    noise = [0.4 * torch.randn(logprobs.shape, generator=generator) for _ in range(2)]
    nowhere = torch.where(made.loss_mask, 0.0, 50.0)  # garbage outside of the responses
    made.old_logprobs, made.ref_logprobs = logprobs + noise[0] + nowhere, logprobs + noise[1] + nowhere
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


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("max_tokens", [8, 16, 64])
@pytest.mark.parametrize("packing", [True, False])
def test_gradient_and_metrics_equal_the_equations_however_the_batch_is_cut(
    bigram: Bigram, name: str, max_tokens: int, packing: bool
) -> None:
    cfg, made = ALGORITHMS[name], batch()
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


def test_old_logprobs_of_the_model_itself_give_the_plain_policy_gradient(bigram: Bigram) -> None:
    # Ratios are 1, so the gradient is that of -mean over rows of mean over tokens of A log p (REINFORCE).
    made, cfg = batch(), AlgorithmConfig()
    which = actor(bigram, cfg)
    made.old_logprobs, _ = which.compute_logprobs(made)
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
@pytest.mark.parametrize("role", ["reference", "actor"])
def test_logprobs_and_entropy_by_token(bigram: Bigram, packing: bool, role: str) -> None:
    made = batch()
    trainer = TrainerConfig(max_tokens_per_microbatch=10, packing=packing)
    policy = Policy(bigram, trainer, TEMPERATURE)  # type: ignore[arg-type]
    if role == "actor":
        policy = actor(bigram, AlgorithmConfig(), max_tokens_per_microbatch=10, packing=packing)
    logprobs, entropy = policy.compute_logprobs(made)
    assert logprobs.shape == entropy.shape == made.token_ids.shape and logprobs.dtype == torch.float32
    scaled = [[math.exp(x / TEMPERATURE) for x in row] for row in bigram.table.tolist()]
    for row in range(6):
        for t in range(made.token_ids.size(1)):
            p = 1.0
            if 0 < t < made.lengths[row]:
                weights = scaled[made.token_ids[row, t - 1]]
                p = weights[made.token_ids[row, t]] / sum(weights)
                spread = -sum(w / sum(weights) * math.log(w / sum(weights)) for w in weights)
                assert entropy[row, t].item() == pytest.approx(spread, abs=1e-5)
            else:
                assert entropy[row, t] == 0.0
            assert logprobs[row, t].item() == pytest.approx(math.log(p), abs=1e-5)


def test_minibatches_and_epochs_in_order(bigram: Bigram) -> None:
    which = actor(bigram, AlgorithmConfig(), ppo_epochs=2, max_tokens_per_microbatch=1000)
    made = batch(minibatches=3)
    metrics = which.update(made)
    # Six updates of two rows each, in a warm-up of two updates to a rate of one half.
    assert bigram.calls == [[2], ("step", 0.25), [2], ("step", 0.5)] + [[2], ("step", 0.5)] * 4
    assert which.num_updates == 6 and metrics["actor/lr"] == pytest.approx((0.25 + 5 * 0.5) / 6)
    which.update(made)
    assert which.num_updates == 12 and bigram.calls[-1] == ("step", 0.5)


def test_metrics_are_means_over_updates_and_each_has_its_own_counts(bigram: Bigram) -> None:
    cfg, made = ALGORITHMS["all"], batch(minibatches=3)
    metrics = actor(bigram, cfg).update(made)
    table = bigram.table.detach().double()
    parts = [slow_loss(table, made, cfg, rows_of) for rows_of in ([0, 1], [2, 3], [4, 5])]
    assert metrics["loss/total"] == pytest.approx(sum(p["loss"].item() for p in parts) / 3, abs=1e-5)
    assert metrics["loss/kl"] == pytest.approx(sum(p["kl"] for p in parts) / 3, abs=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(sum(p["entropy"] for p in parts) / 3, abs=1e-5)


def test_every_update_starts_from_the_weights_that_the_last_one_left(bigram: Bigram) -> None:
    def descend(model: Bigram, lr: float) -> bool:
        assert model.table.grad is not None
        model.table.data -= lr * model.table.grad
        return True

    cfg, made = ALGORITHMS["all"], batch(minibatches=2)
    table = bigram.table.detach().double().requires_grad_()
    actor(bigram, cfg, descend, ppo_epochs=2).update(made)
    for lr, which in ((0.25, [0, 1, 2]), (0.5, [3, 4, 5]), (0.5, [0, 1, 2]), (0.5, [3, 4, 5])):
        (gradient,) = torch.autograd.grad(slow_loss(table, made, cfg, which)["loss"], table)
        table.data -= lr * gradient
    torch.testing.assert_close(bigram.table.detach().double(), table.detach(), rtol=1e-5, atol=1e-5)


def test_skipped_updates_are_counted(bigram: Bigram) -> None:
    answers = iter([True, False, False])
    metrics = actor(bigram, AlgorithmConfig(), lambda model, lr: next(answers)).update(batch(minibatches=3))
    assert metrics["actor/skipped_updates"] == pytest.approx(2 / 3)


def test_a_rank_without_rows_takes_part_and_adds_nothing(bigram: Bigram) -> None:
    made = make_train_batch([], [], [], [], 6, 1, 0)
    which = actor(bigram, ALGORITHMS["all"])
    logprobs, _ = which.compute_logprobs(made)
    assert logprobs.shape == (0, 1)
    made.old_logprobs = made.ref_logprobs = made.advantages = logprobs
    metrics = which.update(made)
    assert bigram.table.grad is not None and not bigram.table.grad.any()
    assert metrics["loss/total"] == 0.0 and metrics["actor/entropy"] == 0.0


@pytest.mark.parametrize("packing", [True, False])
def test_microbatches_suit_the_layout(bigram: Bigram, packing: bool) -> None:
    bigram.layout = SimpleNamespace(tp=4, pp=3, vpp=2, ep=1, sequence_parallel=True)
    which = Policy(bigram, TrainerConfig(max_tokens_per_microbatch=12, packing=packing), 1.0)  # type: ignore[arg-type]
    parts = which.microbatches(batch(), list(range(6)), {})
    assert len(parts) % 3 == 0  # an interleaved pipeline wants a multiple of its stages
    assert all(part.token_ids.size(1) % 4 == 0 for part in parts)  # sequence parallelism cuts tokens in four
    assert sorted(row for part in parts for row in part.rows) == list(range(6))
    bigram.layout = SimpleNamespace(tp=4, pp=3, vpp=None, ep=1, sequence_parallel=False)
    parts = which.microbatches(batch(), [0, 3], {})
    assert sum(part.token_ids.numel() for part in parts) >= sum(int(batch().lengths[row]) for row in (0, 3))
    assert sorted(row for part in parts for row in part.rows) == [0, 3]
