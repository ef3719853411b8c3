"""Check the keys of ``algorithm``, including preference losses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf_mcore.config.choices import ADVANTAGES, KL_ESTIMATORS, KL_IN_LOSS, POLICY_LOSSES, PREFERENCE_LOSSES
from rlhf_mcore.config.problems import show_value
from rlhf_mcore.config.questions import draws_greedy, needs_critic, needs_reference
from rlhf_mcore.config.resolve import correction_mode, part_weights
from rlhf_mcore.config.rules.layouts import model_problems
from rlhf_mcore.config.schema import AlgorithmConfig, Config
from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.geometry import ModelGeometry


def algorithm_problems(cfg: Config) -> Iterator[str]:
    """List problems between the keys of ``algorithm``. They are not compared with a user's function, which may read every key."""
    algorithm, n = cfg.algorithm, cfg.rollout.sampling.n
    estimator = ADVANTAGES.get(algorithm.advantage)
    if n < 2 and estimator is not None and estimator.compares_group:
        yield (
            f"rollout.sampling.n={n}: algorithm.advantage={algorithm.advantage} compares the responses to "
            "one prompt with each other; set rollout.sampling.n to 2 or more"
        )
    if n < 2 and algorithm.dynamic_sampling.enabled and not draws_greedy(cfg):
        yield (
            f"rollout.sampling.n={n}: algorithm.dynamic_sampling.enabled=True keeps prompts whose responses differ in "
            "score; set rollout.sampling.n to 2 or more, or set it to false"
        )
    if estimator is not None and needs_critic(cfg) != estimator.needs_values:
        verb = "needs a critic" if estimator.needs_values else "uses no critic"
        yield (
            f"algorithm.use_critic={algorithm.use_critic}: algorithm.advantage={algorithm.advantage} {verb}; "
            "set it to auto"
        )
    if algorithm.turn_credit and algorithm.gamma != 1 and estimator is not None and estimator.discounts:
        yield (
            f"algorithm.gamma={algorithm.gamma:g} discounts per token, but with algorithm.turn_credit=True turns are the steps; "
            "set it to 1, and use algorithm.turn_gamma instead"
        )
    covariance = algorithm.covariance
    if covariance.low >= covariance.high:
        yield f"algorithm.covariance.low={covariance.low:g} is not below algorithm.covariance.high={covariance.high:g}; lower it"
    if draws_greedy(cfg) and cfg.environment.function is not None:
        yield (
            f"environment.function={cfg.environment.function}: algorithm.advantage={algorithm.advantage} needs a greedy "
            "response, which environments do not support; choose grpo or rloo"
        )
    yield from _unread_problems(cfg)
    yield from _part_problems(cfg)
    yield from _kl_problems(algorithm)
    yield from _correction_problems(cfg)
    yield from _overlong_problems(cfg)


def _unread_problems(cfg: Config) -> Iterator[str]:
    """List keys that are set but that the estimator or the loss does not read."""
    algorithm = cfg.algorithm
    if (estimator := ADVANTAGES.get(algorithm.advantage)) is not None:
        owner, parts = f"algorithm.advantage={algorithm.advantage}", estimator.compares_parts
        yield from _unread(cfg, "whiten_advantages", owner, estimator.whitens, "set it to false, or use normalize_std")
        yield from _unread(cfg, "bootstrap_truncated", owner, estimator.needs_values, "set it to false")
        yield from _unread(
            cfg, "turn_credit", owner, estimator.credits_turns, "set it to false, or choose grpo or rloo"
        )
        yield from _unread(cfg, "critic_lam", owner, estimator.needs_values, "set it to null")
        yield from _unread(cfg, "lam_alpha", owner, estimator.needs_values, "set it to null")
        yield from _unread(cfg, "reward_weights", owner, parts, "remove it, or set that to gdpo")
        yield from _unread(cfg, "turn_gamma", owner, not parts, "set it to 1")
    if (loss := POLICY_LOSSES.get(algorithm.policy_loss)) is not None:
        owner = f"algorithm.policy_loss={algorithm.policy_loss}"
        yield from _unread(cfg, "sapo", owner, loss.reads_sapo, "remove it, or set that to sapo")
        yield from _unread(
            cfg, "covariance", owner, loss.reads_covariance, "remove it, or set that to kl_cov or clip_cov"
        )
        yield from _unread(cfg, "dual_clip", owner, loss.reads_dual_clip, "set it to null")


def _unread(cfg: Config, key: str, owner: str, is_read: bool, remedy: str) -> Iterator[str]:
    value = getattr(cfg.algorithm, key)
    if not is_read and value != getattr(AlgorithmConfig(), key):
        shown = f"algorithm.{key}" if isinstance(value, Group | dict) else f"algorithm.{key}={show_value(value)}"
        yield f"{shown} has no effect with {owner}; {remedy}"


def _part_problems(cfg: Config) -> Iterator[str]:
    """List problems with an estimator that compares parts of scores. Nothing else may be added to its scores."""
    algorithm, weights = cfg.algorithm, part_weights(cfg)
    estimator = ADVANTAGES.get(algorithm.advantage)
    if estimator is None or not estimator.compares_parts:
        return
    chosen = f"algorithm.advantage={algorithm.advantage}"
    if not weights:
        yield (
            f"algorithm.reward_weights={algorithm.reward_weights}: {chosen} compares parts of scores; name the parts, as in "
            "{boxed: 1, format: 0.5}"
        )
    for name, weight in (weights or {}).items():
        if not math.isfinite(weight) or weight == 0:
            yield f"algorithm.reward_weights.{name}={weight:g} is not a weight; give a finite number other than 0, or remove it"
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "reward":
        yield f"algorithm.kl.placement=reward is not supported with {chosen}, which compares parts of scores; set it to loss"


def _kl_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl, controller = algorithm.kl, algorithm.kl.controller
    if kl.coef > 0 and kl.placement == "loss" and kl.estimator in KL_ESTIMATORS and kl.estimator not in KL_IN_LOSS:
        yield (
            f"algorithm.kl.estimator={kl.estimator} has an expected gradient of zero in the loss; "
            f"use {' or '.join(KL_IN_LOSS)}, or algorithm.kl.placement=reward"
        )
    target, final = controller.target, controller.final
    if target is not None and final is not None:
        yield f"algorithm.kl.controller.target={target:g} and final={final:g}: only one controller is possible; set one to null"
    elif kl.coef == 0 and controller.name != "fixed":
        key, value = ("target", target) if target is not None else ("final", final)
        yield (
            f"algorithm.kl.coef=0 with algorithm.kl.controller.{key}={value:g}: the KL is off; "
            "set algorithm.kl.coef to the initial weight"
        )


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
        yield f"{prefix}max_binary_kl={limit:g} masks tokens, which {prefix}mode={mode} does not support; choose token"
    if mode == "geometric" and not bounds:
        yield f"{prefix}mode=geometric has no effect without a mask; set {prefix}mask_low, mask_high or veto"
    if low is not None and high is not None and low >= high:
        yield f"{prefix}mask_low={low:g} is not below {prefix}mask_high={high:g}; lower it"
    for key in ("max_token_staleness", "max_response_staleness"):
        if (limit := getattr(correction, key)) is not None and limit >= bound:
            yield f"{prefix}{key}={limit} has no effect, because no token is staler than trainer.max_staleness={bound}; set it to null"


def _overlong_problems(cfg: Config) -> Iterator[str]:
    overlong, estimator = cfg.algorithm.overlong, ADVANTAGES.get(cfg.algorithm.advantage)
    if not overlong.enabled:
        return
    if estimator is not None and (estimator.compares_parts or estimator.needs_greedy):
        yield (
            f"algorithm.overlong.enabled=True is not supported with algorithm.advantage={cfg.algorithm.advantage}, which does not "
            "read the changed scores; set it to false, and add the rule length to reward.rules"
        )
    limit = cfg.rollout.sampling.max_new_tokens if overlong.max_tokens is None else overlong.max_tokens
    if overlong.cache_tokens is not None and overlong.cache_tokens > limit:
        yield (
            f"algorithm.overlong.cache_tokens={overlong.cache_tokens} is more than the longest response, {limit} tokens; "
            "lower it"
        )


def preference_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """List problems with a preference loss and its reference. ``geometry``: the actor's, or None if it is not known."""
    reference, loss = cfg.reference, PREFERENCE_LOSSES.get(cfg.algorithm.dpo.loss)
    if loss is not None and loss.needs_mismatched and cfg.trainer.prompts_per_step < 2:
        yield (
            f"trainer.prompts_per_step={cfg.trainer.prompts_per_step}: algorithm.dpo.loss={cfg.algorithm.dpo.loss} estimates a "
            "divergence from responses to other prompts of a step; raise it to 2 or more"
        )
    if cfg.algorithm.kl.coef:
        yield (
            f"algorithm.kl.coef={cfg.algorithm.kl.coef} has no effect with algorithm.kind={cfg.algorithm.kind}: algorithm.dpo.beta "
            "limits the distance from the reference; remove it"
        )
    if not needs_reference(cfg):
        for name, value in reference:
            if value and value not in ("auto", "never"):
                yield (
                    f"reference.{name}={value} has no effect with algorithm.dpo.loss={cfg.algorithm.dpo.loss}, which uses no "
                    "reference; remove it"
                )
        return
    if reference.precompute and loss is not None and loss.needs_mismatched:
        yield (
            f"reference.precompute=True is not supported with algorithm.dpo.loss={cfg.algorithm.dpo.loss}, which compares other pairs "
            "of prompt and response in every step; set it to false"
        )
    if reference.refresh_steps and cfg.actor.lora.rank is None:  # ``lora_problems`` reports the other case
        yield (
            f"reference.refresh_steps={reference.refresh_steps} is not supported with algorithm.kind={cfg.algorithm.kind}: all pairs "
            "need the same reference; set it to 0"
        )
    if reference.path is not None:
        yield from model_problems("reference.path", reference.path, ("lm",), "actor", cfg.actor.layout, geometry)
