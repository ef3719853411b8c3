"""Check the keys of ``algorithm``, those of preference losses among them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf_mcore.config.choices import ADVANTAGES, KL_ESTIMATORS, KL_IN_LOSS, POLICY_LOSSES, PREFERENCE_LOSSES
from rlhf_mcore.config.questions import draws_greedy, needs_critic, needs_reference
from rlhf_mcore.config.resolve import correction_mode, part_weights
from rlhf_mcore.config.rules.layouts import model_problems
from rlhf_mcore.config.schema import AlgorithmConfig, Config, CovarianceConfig, SapoConfig
from rlhf_mcore.geometry import ModelGeometry


def algorithm_problems(cfg: Config) -> Iterator[str]:
    """List problems with ``cfg.algorithm`` that a look at one key does not show. A function of a user's own file may use every key."""
    algorithm, n = cfg.algorithm, cfg.rollout.sampling.n
    estimator, loss = ADVANTAGES.get(algorithm.advantage), POLICY_LOSSES.get(algorithm.policy_loss)
    if n < 2 and estimator is not None and estimator.compares_group:
        yield (
            f"rollout.sampling.n={n}: algorithm.advantage={algorithm.advantage} compares the responses to "
            "one prompt with each other; set rollout.sampling.n to 2 or more"
        )
    if n < 2 and algorithm.dynamic_sampling.enabled and not draws_greedy(cfg):
        yield (
            f"rollout.sampling.n={n}: algorithm.dynamic_sampling.enabled=True keeps prompts whose responses differ in "
            "score; set rollout.sampling.n to 2 or more, or switch it off"
        )
    if estimator is not None and needs_critic(cfg) != estimator.needs_values:
        verb = "needs a critic" if estimator.needs_values else "has no use for a critic"
        yield (
            f"algorithm.use_critic={algorithm.use_critic}: algorithm.advantage={algorithm.advantage} {verb}; "
            "set it to auto"
        )
    if algorithm.whiten_advantages and estimator is not None and not estimator.whitens:
        yield (
            f"algorithm.whiten_advantages=True has no effect with algorithm.advantage={algorithm.advantage}; "
            "set it to false, or use normalize_std"
        )
    if algorithm.bootstrap_truncated and estimator is not None and not estimator.needs_values:
        yield (
            f"algorithm.bootstrap_truncated=True has no effect with algorithm.advantage={algorithm.advantage}, which has no "
            "critic; set it to false"
        )
    if algorithm.turn_credit and algorithm.gamma != 1 and estimator is not None and estimator.discounts:
        yield (
            f"algorithm.gamma={algorithm.gamma:g} discounts by tokens, but with algorithm.turn_credit=True turns are the steps; "
            "set it to 1, and algorithm.turn_gamma instead"
        )
    if algorithm.turn_credit and estimator is not None and not estimator.credits_turns:
        yield (
            f"algorithm.turn_credit=True has no effect with algorithm.advantage={algorithm.advantage}, which compares whole "
            "responses; set it to false, or choose grpo or rloo"
        )
    for key in ("critic_lam", "lam_alpha"):
        if (value := getattr(algorithm, key)) is not None and estimator is not None and not estimator.needs_values:
            yield f"algorithm.{key}={value:g} has no effect with algorithm.advantage={algorithm.advantage}; set it to null"
    if algorithm.sapo != SapoConfig() and loss is not None and not loss.reads_sapo:
        yield f"algorithm.sapo has no effect with algorithm.policy_loss={algorithm.policy_loss}; remove it, or set that to sapo"
    covariance = algorithm.covariance
    if covariance != CovarianceConfig() and loss is not None and not loss.reads_covariance:
        yield (
            f"algorithm.covariance has no effect with algorithm.policy_loss={algorithm.policy_loss}; remove it, or set that to kl_cov "
            "or clip_cov"
        )
    if covariance.low >= covariance.high:
        yield f"algorithm.covariance.low={covariance.low:g} is not below algorithm.covariance.high={covariance.high:g}; lower it"
    if algorithm.dual_clip is not None and loss is not None and not loss.reads_dual_clip:
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip:g} has no effect with algorithm.policy_loss="
            f"{algorithm.policy_loss}; set it to null"
        )
    if draws_greedy(cfg):
        yield from _greedy_problems(cfg)
    yield from _part_problems(cfg)
    yield from _kl_problems(algorithm)
    yield from _correction_problems(cfg)
    yield from _overlong_problems(cfg)


def _greedy_problems(cfg: Config) -> Iterator[str]:
    chosen = f"algorithm.advantage={cfg.algorithm.advantage}"
    if cfg.environment.function is not None:
        yield (
            f"environment.function={cfg.environment.function}: {chosen} compares with a greedy response, and plays no greedy "
            "episode; choose grpo or rloo"
        )
    if cfg.algorithm.overlong.enabled:
        yield (
            f"algorithm.overlong.enabled=True takes nothing off the greedy response that {chosen} compares with; set it to false, "
            "and add rule length to reward.rules"
        )


def _part_problems(cfg: Config) -> Iterator[str]:
    algorithm, weights = cfg.algorithm, part_weights(cfg)
    estimator = ADVANTAGES.get(algorithm.advantage)
    chosen = f"algorithm.advantage={algorithm.advantage}"
    if estimator is None:
        return
    if not estimator.compares_parts:
        if weights is not None:
            yield f"algorithm.reward_weights has no effect with {chosen}; remove it, or set that to gdpo"
        return
    if not weights:
        yield (
            f"algorithm.reward_weights={algorithm.reward_weights}: {chosen} compares parts of scores; name them, as "
            "{boxed: 1, format: 0.5}"
        )
    for name, weight in (weights or {}).items():
        if not math.isfinite(weight) or weight == 0:
            yield f"algorithm.reward_weights.{name}={weight:g} is no weight; give it a finite number that is not 0, or remove it"
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "reward":
        yield f"algorithm.kl.placement=reward is in no part of a score, which {chosen} compares; set it to loss"
    if algorithm.overlong.enabled:
        yield (
            f"algorithm.overlong.enabled=True is in no part of a score, which {chosen} compares; set it to false, "
            "and give rule length a weight in algorithm.reward_weights"
        )
    if algorithm.turn_gamma != 1:
        yield f"algorithm.turn_gamma={algorithm.turn_gamma:g} has no effect with {chosen}, which compares whole responses; set it to 1"


def _kl_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl, controller = algorithm.kl, algorithm.kl.controller
    if kl.coef > 0 and kl.placement == "loss" and kl.estimator in KL_ESTIMATORS and kl.estimator not in KL_IN_LOSS:
        yield (
            f"algorithm.kl.estimator={kl.estimator} has an expected gradient of zero in the loss; "
            f"use {' or '.join(KL_IN_LOSS)}, or algorithm.kl.placement=reward"
        )
    needed = {"adaptive": "target", "linear": "final"}.get(controller.name)
    if needed is None:
        return
    if kl.coef == 0:
        yield (
            f"algorithm.kl.coef=0 with algorithm.kl.controller.name={controller.name}: the KL is off; "
            "set algorithm.kl.coef to the weight to start from"
        )
    if getattr(controller, needed) is None:
        yield f"algorithm.kl.controller.{needed}=null: the {controller.name} controller needs one; give it a number"


def _correction_problems(cfg: Config) -> Iterator[str]:
    correction, bound = cfg.algorithm.rollout_correction, cfg.trainer.max_staleness
    low, high = correction.mask_low, correction.mask_high
    prefix = "algorithm.rollout_correction."
    mode = correction_mode(cfg)
    masks = {"mask_low": low, "mask_high": high, "veto": correction.veto}
    bounds = {key: value for key, value in masks.items() if value is not None}
    if mode == "off" and bounds:
        key, value = next(iter(bounds.items()))
        yield f"{prefix}{key}={value:g} has no effect with {prefix}mode=off; choose token, sequence or geometric"
    if mode != "token" and (limit := correction.max_binary_kl) is not None:
        yield f"{prefix}max_binary_kl={limit:g} leaves out tokens, which {prefix}mode={mode} does not weigh; choose token"
    if mode == "geometric" and not bounds:
        yield f"{prefix}mode=geometric leaves out nothing; set {prefix}mask_low, mask_high or veto"
    if low is not None and high is not None and low >= high:
        yield f"{prefix}mask_low={low:g} is not below {prefix}mask_high={high:g}; lower it"
    for key in ("max_token_staleness", "max_response_staleness"):
        if (limit := getattr(correction, key)) is not None and limit >= bound:
            yield f"{prefix}{key}={limit} has no effect: no token is older than trainer.max_staleness={bound}; set it to null"


def _overlong_problems(cfg: Config) -> Iterator[str]:
    overlong = cfg.algorithm.overlong
    if not overlong.enabled or overlong.cache_tokens is None:
        return
    limit = cfg.rollout.sampling.max_new_tokens if overlong.max_tokens is None else overlong.max_tokens
    if overlong.cache_tokens > limit:
        yield (
            f"algorithm.overlong.cache_tokens={overlong.cache_tokens} is more than the longest response, {limit} tokens; "
            "lower it"
        )


def preference_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """List problems with the reference that pairs are compared by. ``geometry``: of the actor, if it is known."""
    reference, loss = cfg.reference, PREFERENCE_LOSSES.get(cfg.algorithm.dpo.loss)
    if loss is not None and loss.needs_mismatched and cfg.trainer.prompts_per_step < 2:
        yield (
            f"trainer.prompts_per_step={cfg.trainer.prompts_per_step}: algorithm.dpo.loss={cfg.algorithm.dpo.loss} estimates a "
            "divergence from responses to other prompts of a step; raise it to 2 or more"
        )
    if cfg.algorithm.kl.coef:
        yield (
            f"algorithm.kl.coef={cfg.algorithm.kl.coef} has no effect with algorithm.kind={cfg.algorithm.kind}: algorithm.dpo.beta "
            "sets how far the policy goes from the reference; remove it"
        )
    if not needs_reference(cfg):
        for name, value in reference:
            if value:  # offload=False is what null has been resolved to
                yield (
                    f"reference.{name}={value} has no effect with algorithm.dpo.loss={cfg.algorithm.dpo.loss}, which reads no "
                    "reference; remove it"
                )
        return
    if reference.precompute and loss is not None and loss.needs_mismatched:
        yield (
            f"reference.precompute=True is not supported with algorithm.dpo.loss={cfg.algorithm.dpo.loss}, which compares other pairs "
            "of prompt and response in every step; set it to false"
        )
    if reference.precompute and reference.offload:
        yield (
            "reference.offload=True has no effect with reference.precompute=True, which lets the reference go before training; "
            "remove it"
        )
    if reference.refresh_steps and cfg.actor.lora.rank is None:  # which is another problem
        yield (
            f"reference.refresh_steps={reference.refresh_steps} is not supported with algorithm.kind={cfg.algorithm.kind}: pairs are "
            "compared by one reference; set it to 0"
        )
    if reference.path is not None:
        yield from model_problems("reference.path", reference.path, ("lm",), "actor", cfg.actor.layout, geometry)
