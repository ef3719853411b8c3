"""Compare the actor's whole loss, logprobs and entropy with TRL's GRPOTrainer, in value and gradient."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.algorithms.registry import find_policy_loss
from rlhf_mcore.config.schema import AlgorithmConfig, KLConfig
from rlhf_mcore.parallel.logprobs import TokenLogprobs
from rlhf_mcore.roles.policy import PolicyObjective
from rlhf_mcore.types import Microbatch
from tests.logits import given_logprobs
from tests.oracles import published
from tests.oracles.ragged import CONSTANT_LENGTH, LENGTHS, WIDTH, Ragged, leaf
from tests.unit.parallel.world import Meeting, ThreadGroup

trl = published.trl()
LOSS_TYPES = {"token": "bnpo", "sequence": "grpo", "constant": "dr_grpo"}  # ours -> TRL's


def theirs(batch: Ragged, new: Tensor, entropy: Tensor, cfg: AlgorithmConfig, factors: Tensor | None) -> Tensor:
    """Compute TRL's loss from given logprobs and entropies. All fields that the loss reads from its trainer are constants."""
    same = SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (new, entropy, None),
        accelerator=same,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=cfg.kl.coef,
        current_gradient_accumulation_steps=1,
        entropy_coef=cfg.entropy_coef,
        epsilon_high=cfg.clip_high,
        epsilon_low=cfg.clip_low,
        importance_sampling_level="sequence" if cfg.policy_loss == "gspo" else "token",
        loss_type=LOSS_TYPES[cfg.loss_aggregation],
        max_completion_length=CONSTANT_LENGTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_adaptive_entropy=False,
        use_vllm=factors is not None,
        vllm_importance_sampling_correction=factors is not None,
        _entropy_bonus_enabled=cfg.entropy_coef != 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    prompts = torch.zeros(len(LENGTHS), 1, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": prompts + 1,
        "completion_ids": torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64),
        "completion_mask": batch.mask.long(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "importance_sampling_ratio": factors,
    }
    return trl.grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)


def ours(batch: Ragged, new: Tensor, entropy: Tensor, cfg: AlgorithmConfig, factors: Tensor | None) -> Tensor:
    """Compute the actor's loss for one microbatch with the whole batch."""
    objective = PolicyObjective(cfg, find_policy_loss(cfg), temperature=1.0, kl_coef=cfg.kl.coef)
    fields = {
        "weights": batch.weights(cfg.loss_aggregation),
        "old_logprobs": batch.old,
        "advantages": batch.advantages,
        "ref_logprobs": batch.ref,
    }
    if factors is not None:
        fields["correction"] = factors
    ids = torch.zeros(len(LENGTHS), WIDTH, dtype=torch.int64)
    microbatch = Microbatch(ids, ids, list(range(len(LENGTHS))), [WIDTH] * len(LENGTHS), fields=fields)
    given: Any = _GivenOutputs()
    return objective.loss(given, torch.stack([new, entropy]), microbatch)[0]


class _GivenOutputs:
    """A model that outputs given logprobs and entropies."""

    def logprobs_and_entropy(self, outputs: Tensor, *_: object, **__: object) -> TokenLogprobs:
        return TokenLogprobs(*outputs.unbind(), log_mass=None)


@pytest.mark.parametrize(("name", "aggregation"), [*(("ppo_clip", each) for each in LOSS_TYPES), ("gspo", "sequence")])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_whole_loss(seed: int, name: str, aggregation: str, corrected: bool, with_kl: bool) -> None:
    """Policy term, KL and entropy bonus agree together. The correction weighs only the policy term in both.

    TRL uses the sequence form of GSPO. It equals our token form if all tokens of a response have one advantage and one
    factor.
    """
    batch = Ragged(seed)
    if name == "gspo":
        batch.advantages = batch.advantages[:, :1].expand_as(batch.advantages)
    cfg = AlgorithmConfig(
        policy_loss=name,
        clip_low=0.1,
        clip_high=0.3,
        loss_aggregation=aggregation,
        # TRL's bonus is always a mean over tokens.
        entropy_coef=0.2 if aggregation == "token" else 0.0,
        kl=KLConfig(coef=0.3 if with_kl else 0.0, clip=None),
    )
    factors = torch.exp(batch.old - batch.rollout).clamp(max=1.2) if corrected else None
    if factors is not None:
        factors[1, 2] = factors[3] = 0.0
        factors = factors[:, :1].expand_as(factors) if name == "gspo" else factors
    found, gradients = [], []
    for loss in (ours, theirs):
        new, entropy = leaf(batch.new), leaf(batch.values.abs())
        value = loss(batch, new, entropy, cfg, factors)
        value.backward()
        found.append(value.detach())
        gradients.append([x.grad if x.grad is not None else torch.zeros_like(x) for x in (new, entropy)])
    assert float(gradients[1][0].abs().max()) > 1e-3, "there must be something to compare"
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_logprobs_and_entropy(temperature: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = scale * torch.randn(4, 9, 37, generator=generator)
    labels = torch.randint(0, 37, (4, 9), generator=generator)
    alone: Any = ThreadGroup(Meeting(1), 0)
    here, there = leaf(logits), leaf(logits.double())
    found = given_logprobs(here, labels, vocab_size=37, temperature=temperature, group=alone)
    expected = trl.utils.selective_log_softmax_and_entropy(there, labels, temperature=temperature)
    weights = torch.randn(2, 4, 9, generator=generator)
    for value, reference in zip(found[:2], expected, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-5)
    for values in (found[:2], expected):
        sum((value * weight).sum() for value, weight in zip(values, weights, strict=True)).backward()
    assert here.grad is not None and there.grad is not None
    torch.testing.assert_close(here.grad.double(), there.grad, rtol=2e-5, atol=2e-5)
