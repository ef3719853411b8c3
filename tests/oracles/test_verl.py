"""Compare estimators, losses, aggregations, KLs, corrections and logprobs with verl's, in value and gradient.

If they differ on purpose, the test explains the difference. For example, verl divides the variance by N - 1 in
whitening, and we divide by N.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf_mcore.algorithms.advantages  # noqa: F401  # its estimators are in the table
from rlhf_mcore.algorithms.advantages import whiten
from rlhf_mcore.algorithms.correction import rollout_correction
from rlhf_mcore.algorithms.covariance import CHOSEN, choose_tokens
from rlhf_mcore.algorithms.interfaces import ADVANTAGE_ESTIMATORS
from rlhf_mcore.algorithms.kl import kl_penalty
from rlhf_mcore.algorithms.masking import weighted_sum
from rlhf_mcore.algorithms.registry import find_advantage_estimator, find_policy_loss
from rlhf_mcore.algorithms.value_loss import value_loss
from rlhf_mcore.config.schema import AlgorithmConfig, CovarianceConfig, RolloutCorrectionConfig
from tests.logits import given_logprobs
from tests.oracles import published
from tests.oracles.ragged import AGGREGATIONS, CONSTANT_LENGTH, LENGTHS, Ragged, leaf
from tests.rows import advantage_inputs, everything
from tests.unit.parallel.world import Meeting, ThreadGroup

verl = published.verl()
near_and_far = pytest.mark.parametrize(
    "batch", [Ragged(1), Ragged(2), Ragged(3).far_apart(), Ragged(4).far_apart()], ids=["1", "2", "far 3", "far 4"]
)
NUM_TOKENS = sum(LENGTHS)


def assert_same(ours: Tensor, theirs: Tensor, mask: Tensor | None = None, rtol: float = 1e-6) -> None:
    """Check that values are equal inside the mask and not all tiny."""
    chosen = (ours, theirs) if mask is None else (ours[mask], theirs[mask])
    assert float(chosen[1].abs().max()) > 1e-3, "there must be something to compare"
    torch.testing.assert_close(chosen[0].double(), chosen[1].double(), rtol=rtol, atol=rtol)


def assert_same_with_gradient(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], at: Tensor) -> None:
    """Check that two scalar functions have the same value and gradient."""
    here, there = leaf(at), leaf(at)
    value, reference = ours(here), theirs(there)
    assert_same(value.detach(), reference.detach())
    value.backward()
    reference.backward()
    assert here.grad is not None and there.grad is not None
    assert_same(here.grad, there.grad)


def actor_config(cfg: AlgorithmConfig) -> Any:
    made = verl.core_algos.ActorConfig()
    settings = dict(
        clip_ratio=0.2, clip_ratio_low=cfg.clip_low, clip_ratio_high=cfg.clip_high, clip_ratio_c=cfg.dual_clip
    )
    for name, value in settings.items():
        setattr(made, name, value)
    made.get = lambda name, default: settings.get(name, default)
    made.global_batch_info = {"batch_num_tokens": NUM_TOKENS, "global_batch_size": len(LENGTHS)}
    made.global_batch_info["loss_scale_factor"] = CONSTANT_LENGTH
    return made


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("ours", "theirs"), [("ppo_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")])
@pytest.mark.parametrize("corrected", [False, True])
@near_and_far
def test_policy_losses(batch: Ragged, ours: str, theirs: str, aggregation: str, corrected: bool) -> None:
    cfg = AlgorithmConfig(policy_loss=ours, clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    factors = torch.exp(batch.old - batch.rollout).clamp(max=1.2) if corrected else None
    if factors is not None:
        factors[1, 2] = factors[3] = 0.0  # a rejected token and a rejected sequence
    loss = verl.core_algos.get_policy_loss_fn(theirs)
    assert_same_with_gradient(
        lambda new: find_policy_loss(cfg)(batch.loss_inputs(new, aggregation, factors))[0],
        lambda new: loss(
            batch.old,
            new,
            batch.advantages,
            batch.floats,
            loss_agg_mode=AGGREGATIONS[aggregation],
            config=actor_config(cfg),
            rollout_is_weights=factors,
        )[0],
        batch.new,
    )


@pytest.mark.parametrize("loss", ["kl_cov", "clip_cov"])
@pytest.mark.parametrize("seed", [1, 2])
def test_losses_that_hold_back_tokens_of_high_covariance(seed: int, loss: str) -> None:
    """verl computes the covariance with the current logprobs, ours uses the old ones. Here our choice gets verl's logprobs.

    verl selects tokens of the band at random, and the share 1.0 selects all of them. The ratios are 1, because verl
    selects only unclipped tokens.
    """
    batch, share = Ragged(seed), {"kl_cov": 0.2, "clip_cov": 1.0}[loss]
    new = batch.new if loss == "kl_cov" else batch.old
    cfg = AlgorithmConfig(policy_loss=loss, covariance=CovarianceConfig(share=share, low=0.1, high=0.8, kl_coef=0.5))
    mask, rows = batch.mask.flatten(), everything(batch.mask)
    step = SimpleNamespace(
        old_logprobs=new.flatten(),
        advantages=batch.advantages.flatten(),
        loss_mask=mask,
        num_sampled=torch.tensor(LENGTHS),
        policy_version=0,
    )
    band = None if loss == "kl_cov" else (0.1, 0.8)
    chosen = choose_tokens(step, [list(range(len(LENGTHS)))], rows, share, band)  # type: ignore[arg-type]
    chosen = chosen.view_as(batch.mask)
    assert 0 < int(chosen.sum()) < NUM_TOKENS / 2
    theirs = actor_config(cfg)
    names = ("kl_cov_ratio", "clip_cov_ratio", "ppo_kl_coef", "clip_cov_lb", "clip_cov_ub")
    theirs.policy_loss = SimpleNamespace(**dict(zip(names, (share, share, 0.5, 0.1, 0.8), strict=True)))

    def ours(logprobs: Tensor) -> Tensor:
        inputs = batch.loss_inputs(logprobs, "token", None)
        inputs.fields = {CHOSEN: chosen}
        return find_policy_loss(cfg)(inputs)[0]

    reference = verl.core_algos.get_policy_loss_fn(loss)
    assert_same_with_gradient(
        ours, lambda x: reference(batch.old, x, batch.advantages, batch.floats, "token-mean", theirs)[0], new
    )


def test_greedy_responses_as_baselines() -> None:
    batch = Ragged(1)
    generator = torch.Generator().manual_seed(3)
    rewards = torch.where(batch.mask, torch.randn(batch.mask.shape, generator=generator), 0)
    baselines, nobody = torch.randn(len(LENGTHS), generator=generator), torch.zeros(len(LENGTHS))
    inputs = advantage_inputs(rewards, batch.mask, nobody.long(), nobody.bool())
    inputs.baselines = baselines.double()
    theirs, _ = verl.core_algos.compute_remax_outcome_advantage(rewards, baselines, batch.floats)
    ours = find_advantage_estimator("remax")(inputs, AlgorithmConfig()).advantages
    assert_same(ours.view_as(theirs), theirs, batch.mask, rtol=1e-5)  # verl sums in float32


@pytest.mark.parametrize("normalize_std", [True, False])
def test_parts_of_scores(normalize_std: bool) -> None:
    """verl divides by the deviation over tokens, with N - 1.

    All responses here have the same length, so the results differ by a factor.
    """
    rows, width, groups = 8, 3, torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])
    parts = torch.randn(rows, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * torch.tensor(
        [1.0, 9.0]
    )
    mask = torch.ones(rows, width, dtype=torch.bool)
    inputs = advantage_inputs(torch.zeros(rows, width), mask, groups, torch.zeros(rows, dtype=torch.bool))
    inputs.score_parts = parts
    cfg = AlgorithmConfig(advantage="gdpo", normalize_std=normalize_std, reward_weights={"a": 1.0, "b": 0.5})
    found = find_advantage_estimator("gdpo")(inputs, cfg).advantages.view(rows, width)
    theirs, _ = verl.core_algos.compute_gdpo_outcome_advantage(
        torch.zeros(rows, width),
        mask.double(),
        groups.numpy(),
        norm_adv_by_std_in_grpo=normalize_std,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5]},
        non_tensor_batch={"a": parts[:, 0].numpy(), "b": parts[:, 1].numpy()},
        batch={"prompts": torch.zeros(rows, 1), "attention_mask": torch.ones(rows, 1 + width, dtype=torch.int64)},
    )
    factor = math.sqrt(width * (rows - 1) / (rows * width - 1))
    assert_same(found, theirs * factor, rtol=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations(aggregation: str) -> None:
    batch = Ragged(5)
    assert_same_with_gradient(
        lambda values: weighted_sum(values, batch.weights(aggregation)),
        lambda values: verl.core_algos.agg_loss(
            values, batch.floats, AGGREGATIONS[aggregation], loss_scale_factor=CONSTANT_LENGTH
        ),
        batch.advantages,
    )


@pytest.mark.parametrize(("estimator", "clip"), [("k1", None), ("k2", None), ("k3", 10.0)])
@near_and_far
def test_kl(batch: Ragged, estimator: str, clip: float | None) -> None:
    weights = batch.weights("token")
    assert_same_with_gradient(
        lambda new: weighted_sum(kl_penalty(new, batch.ref, estimator, mask=batch.mask, clip=clip), weights),
        lambda new: (verl.core_algos.kl_penalty(new, batch.ref, estimator) * weights).sum(),
        batch.new,
    )


@pytest.mark.parametrize("clip", [0.2, 100.0])
def test_value_loss(clip: float) -> None:
    batch = Ragged(6, spread=1.0)
    assert_same_with_gradient(
        lambda values: value_loss(values, batch.old, batch.returns, batch.weights("token"), clip)[0],
        lambda values: verl.core_algos.compute_value_loss(values, batch.returns, batch.old, batch.floats, clip)[0],
        batch.new,
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "cfg"),
    [
        ("grpo", "grpo", AlgorithmConfig()),
        ("grpo", "grpo", AlgorithmConfig(normalize_std=False)),
        ("rloo", "rloo", AlgorithmConfig()),
        ("reinforce_plus_plus", "reinforce_plus_plus", AlgorithmConfig(gamma=0.9)),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", AlgorithmConfig()),
    ],
    ids=["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_outcome_estimators(seed: int, ours: str, theirs: str, cfg: AlgorithmConfig) -> None:
    batch = Ragged(seed)
    found = ADVANTAGE_ESTIMATORS[ours](batch.advantage_inputs(), cfg).advantages.view_as(batch.mask)
    arguments: dict[str, Any] = {"index": batch.groups.numpy(), "config": cfg}
    if ours == "grpo":
        arguments["norm_adv_by_std_in_grpo"] = cfg.normalize_std
    estimator = verl.core_algos.get_adv_estimator_fn(theirs)
    expected, _ = estimator(batch.rewards.clone(), batch.floats, **arguments)
    if ours.startswith("reinforce"):
        expected = expected * math.sqrt(NUM_TOKENS / (NUM_TOKENS - 1))
    assert_same(found, expected, batch.mask, rtol=2e-5)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("gap", [False, True], ids=["whole", "with an observation inside"])
def test_gae(gamma: float, lam: float, gap: bool) -> None:
    batch = Ragged(7)
    if gap:
        batch.mask[3, 4:6] = False
        batch.rewards, batch.values = (torch.where(batch.mask, x, 0) for x in (batch.rewards, batch.values))
    cfg = AlgorithmConfig(gamma=gamma, lam=lam, whiten_advantages=True)
    found = ADVANTAGE_ESTIMATORS["gae"](batch.advantage_inputs(), cfg)
    expected, returns = verl.core_algos.compute_gae_advantage_return(
        batch.rewards, batch.values, batch.floats, gamma, lam
    )
    assert found.returns is not None
    assert_same(found.returns.view_as(batch.mask), returns, batch.mask, rtol=1e-5)
    count = int(batch.mask.sum())
    assert_same(found.advantages.view_as(batch.mask), expected * math.sqrt(count / (count - 1)), batch.mask, rtol=2e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
def test_whitening_of_small_values(scale: float) -> None:
    """At scale 1e-6 eps dominates the variance, so N - 1 makes no difference."""
    batch = Ragged(8)
    ours = whiten(batch.advantages.flatten() * scale, batch.mask.flatten(), everything(batch.mask)).view_as(batch.mask)
    theirs = verl.torch_functional.masked_whiten(batch.advantages * scale, batch.floats)
    torch.testing.assert_close(ours[batch.mask], theirs[batch.mask], rtol=0.5 / NUM_TOKENS * 1.05, atol=1e-5)


@pytest.mark.parametrize("mode", ["token", "sequence"])
@pytest.mark.parametrize(("masked", "spread"), [(False, 0.3), (False, 30.0), (True, 0.3), (True, 1.0)])
def test_rollout_correction(mode: str, masked: bool, spread: float) -> None:
    batch = Ragged(9, spread=spread)
    low, high = (0.5, 2.0) if masked else (None, None)
    cfg = RolloutCorrectionConfig(mode=mode, cap=2.0, mask_low=low, mask_high=high)
    rows = everything(batch.mask)
    factors, _ = rollout_correction(batch.old.flatten(), batch.rollout.flatten(), batch.mask.flatten(), rows, cfg)
    expected, _ = verl.rollout_corr_helper.compute_rollout_correction_weights(
        batch.old - batch.rollout, batch.floats, rollout_is=mode, rollout_is_threshold="0.5_2.0" if masked else 2.0
    )
    assert_same(factors.view_as(batch.mask), expected, batch.mask)


@pytest.mark.parametrize("spread", [0.3, 3.0])
@pytest.mark.parametrize("mode", ["token", "sequence"])
def test_effective_sample_size(mode: str, spread: float) -> None:
    """verl counts each token with its response's weight, ours counts responses. Both agree for responses of one length."""
    batch = Ragged(10, spread=spread)
    if mode == "sequence":
        batch.mask[:, :] = True
    cfg = RolloutCorrectionConfig(mode=mode, cap=1.5)
    rows = everything(batch.mask)
    _, found = rollout_correction(batch.old.flatten(), batch.rollout.flatten(), batch.mask.flatten(), rows, cfg)
    _, expected = verl.rollout_corr_helper.compute_rollout_correction_weights(
        batch.old - batch.rollout, batch.floats, rollout_is=mode, rollout_is_threshold=1.5
    )
    assert found["effective_sample_size"] == pytest.approx(expected["rollout_is_eff_sample_size"], rel=1e-6)
    assert found["effective_sample_size"] < 0.97


@pytest.mark.parametrize("aggregation", ["token", "constant"])
@pytest.mark.parametrize(("ours", "theirs"), [("ppo_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")])
@pytest.mark.parametrize(("mode", "rejection"), [("token", "token_k1"), ("sequence", "seq_sum_k1")])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("seed", [11, 13])
def test_the_decoupled_objective(
    seed: int, masked: bool, mode: str, rejection: str, ours: str, theirs: str, aggregation: str
) -> None:
    """Sampled tokens are weighted by proximal / behaviour policy, and the ratio is clipped around the proximal policy.

    verl removes rejected tokens from the counts of ``sequence``, and ours keeps them. GSPO's ratio covers the kept
    tokens in ``sequence`` mode and all tokens in ``token`` mode.
    """
    batch = Ragged(seed, spread=0.4)
    low, high = (0.6, 1 / 0.6) if masked else (None, None)
    correction = RolloutCorrectionConfig(mode=mode, cap=1.2, mask_low=low, mask_high=high)
    cfg = AlgorithmConfig(policy_loss=ours, clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    factors, found = rollout_correction(
        batch.old.flatten(), batch.rollout.flatten(), batch.mask.flatten(), everything(batch.mask), correction
    )
    helper, log_ratio = verl.rollout_corr_helper, batch.old - batch.rollout
    weights, _ = helper.compute_rollout_correction_weights(
        log_ratio, batch.floats, rollout_is=mode, rollout_is_threshold=1.2
    )
    kept = batch.floats
    if masked:
        assert found["masked_fraction"] > 0
        kept, _ = helper.compute_rollout_rejection_mask(log_ratio, kept, rejection, f"{low}_{high}")
    if ours == "gspo" and mode == "token":
        weights, kept = weights * kept, batch.floats
    loss = verl.core_algos.get_policy_loss_fn(theirs)
    assert_same_with_gradient(
        lambda new: find_policy_loss(cfg)(batch.loss_inputs(new, aggregation, factors.view_as(batch.mask)))[0],
        lambda new: loss(
            batch.old,
            new,
            batch.advantages,
            kept,
            loss_agg_mode=AGGREGATIONS[aggregation],
            config=actor_config(cfg),
            rollout_is_weights=weights,
        )[0],
        batch.new,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("scale", [1.0, 50.0])
def test_logprobs_and_entropy(temperature: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = scale * torch.randn(4, 9, 37, generator=generator)
    labels = torch.randint(0, 37, (4, 9), generator=generator)
    alone: Any = ThreadGroup(Meeting(1), 0)
    weights = torch.randn(2, 4, 9, generator=generator)

    def ours(x: Tensor) -> Tensor:
        found = given_logprobs(x, labels, vocab_size=37, temperature=temperature, group=alone)
        return sum((w * value).sum() for w, value in zip(weights, found[:2], strict=True))

    def theirs(x: Tensor) -> Tensor:
        x = x.double() / temperature
        logprobs = verl.torch_functional.logprobs_from_logits_naive(x, labels)
        return (weights[0] * logprobs).sum() + (weights[1] * verl.torch_functional.entropy_from_logits(x)).sum()

    here, there = leaf(logits), leaf(logits)
    value, reference = ours(here), theirs(there)
    assert_same(value.detach(), reference.detach(), rtol=1e-5)
    value.backward()
    reference.backward()
    assert here.grad is not None and there.grad is not None
    assert_same(here.grad, there.grad, rtol=2e-5)
