"""Check the keys of ``algorithm``, including preference losses."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.choices import ADVANTAGES, KL_ESTIMATORS, KL_IN_LOSS, PREFERENCE_LOSSES, Estimator
from rlhf_mcore.config.questions import draws_greedy, needs_critic, needs_reference
from rlhf_mcore.config.resolve import correction_mode, part_weights
from rlhf_mcore.config.schema import AlgorithmConfig, Config
from rlhf_mcore.readers.user_functions import function_problems, is_file_spec


def algorithm_problems(cfg: Config) -> Iterator[str]:
    """List problems between the keys of ``algorithm``. They are not compared with a user's function, which may read every key."""
    algorithm, n = cfg.algorithm, cfg.rollout.sampling.n
    for name, value in {"advantage": algorithm.advantage, "policy_loss": algorithm.policy_loss}.items():
        if is_file_spec(value):
            yield from function_problems(value, f"algorithm.{name}")
    estimator = ADVANTAGES.get(algorithm.advantage)
    if n < 2 and estimator is not None and estimator.compares_group:
        yield f"rollout.sampling.n={n}: algorithm.advantage={algorithm.advantage} compares a prompt's responses; set n to 2 or more"
    elif n < 2 and algorithm.dynamic_sampling.enabled and not draws_greedy(cfg):
        yield (
            f"rollout.sampling.n={n}: algorithm.dynamic_sampling.enabled=True keeps prompts whose responses differ in score; "
            "set n to 2 or more, or set it to false"
        )
    if algorithm.covariance.low >= algorithm.covariance.high:
        low, high = algorithm.covariance.low, algorithm.covariance.high
        yield f"algorithm.covariance.low={low:g} is not below algorithm.covariance.high={high:g}; lower it"
    if estimator is not None:
        yield from _estimator_problems(cfg, estimator)
    yield from _kl_problems(algorithm)
    yield from _correction_problems(cfg)
    overlong, limit = algorithm.overlong, cfg.rollout.sampling.max_new_tokens
    if overlong.enabled and (overlong.cache_tokens or 0) > (limit := overlong.max_tokens or limit):
        yield f"algorithm.overlong.cache_tokens={overlong.cache_tokens} is more than the longest response, {limit} tokens; lower it"


def _estimator_problems(cfg: Config, estimator: Estimator) -> Iterator[str]:
    """List problems with a built-in estimator. Nothing else may be added to scores if it compares their parts."""
    algorithm, owner = cfg.algorithm, f"algorithm.advantage={cfg.algorithm.advantage}"
    if needs_critic(cfg) != estimator.needs_values:
        verb = "needs a critic" if estimator.needs_values else "uses no critic"
        yield f"algorithm.use_critic={algorithm.use_critic}: {owner} {verb}; set it to auto"
    if algorithm.turn_credit and algorithm.gamma != 1 and estimator.discounts:
        yield (
            f"algorithm.gamma={algorithm.gamma:g} discounts per token, but with algorithm.turn_credit=True turns are the steps; "
            "set it to 1, and use algorithm.turn_gamma instead"
        )
    if draws_greedy(cfg) and (function := cfg.environment.function) is not None:
        yield f"environment.function={function}: {owner} needs a greedy response, which environments lack; choose grpo or rloo"
    if algorithm.overlong.enabled and (estimator.compares_parts or estimator.needs_greedy):
        yield (
            f"algorithm.overlong.enabled=True is not supported with {owner}, which does not read the changed scores; set it to "
            "false, and add the rule length to reward.rules"
        )
    if not estimator.compares_parts:
        return
    if not (weights := part_weights(cfg)):
        yield f"algorithm.reward_weights={algorithm.reward_weights}: {owner} compares parts of scores; name them, as in {{boxed: 1}}"
    for name, weight in (weights or {}).items():
        if weight == 0:
            yield f"algorithm.reward_weights.{name}=0 is not a weight; give a number other than 0, or remove it"
    if algorithm.turn_gamma != 1:
        yield f"algorithm.turn_gamma={algorithm.turn_gamma:g} has no effect with {owner}; set it to 1"
    if algorithm.kl.coef > 0 and algorithm.kl.placement == "reward":
        yield f"algorithm.kl.placement=reward is not supported with {owner}, which compares parts of scores; set it to loss"


def _kl_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl, controller = algorithm.kl, algorithm.kl.controller
    if kl.coef > 0 and kl.placement == "loss" and kl.estimator in set(KL_ESTIMATORS) - set(KL_IN_LOSS):
        yield (
            f"algorithm.kl.estimator={kl.estimator} has an expected gradient of zero in the loss; use {' or '.join(KL_IN_LOSS)}, "
            "or algorithm.kl.placement=reward"
        )
    if controller.target is not None and controller.final is not None:
        both = f"target={controller.target:g} and final={controller.final:g}"
        yield f"algorithm.kl.controller.{both}: only one controller is possible; set one to null"


def _correction_problems(cfg: Config) -> Iterator[str]:
    correction, mode, prefix = cfg.algorithm.rollout_correction, correction_mode(cfg), "algorithm.rollout_correction."
    low, high = correction.mask_low, correction.mask_high
    masks = {"mask_low": low, "mask_high": high, "veto": correction.veto}
    given = [f"{prefix}{key}={value:g}" for key, value in masks.items() if value is not None]
    if mode == "off" and given:
        yield f"{given[0]} has no effect with {prefix}mode=off; choose token, sequence or geometric"
    if mode != "token" and (limit := correction.max_binary_kl) is not None:
        yield f"{prefix}max_binary_kl={limit:g} masks tokens, which {prefix}mode={mode} does not support; choose token"
    if mode == "geometric" and not given:
        yield f"{prefix}mode=geometric has no effect without a mask; set {prefix}mask_low, mask_high or veto"
    if low is not None and high is not None and low >= high:
        yield f"{prefix}mask_low={low:g} is not below {prefix}mask_high={high:g}; lower it"


def preference_problems(cfg: Config) -> Iterator[str]:
    """List problems with a preference loss and its reference."""
    reference, loss = cfg.reference, PREFERENCE_LOSSES.get(cfg.algorithm.dpo.loss)
    kind, chosen = f"algorithm.kind={cfg.algorithm.kind}", f"algorithm.dpo.loss={cfg.algorithm.dpo.loss}"
    if loss is not None and loss.needs_mismatched and cfg.trainer.prompts_per_step < 2:
        count = cfg.trainer.prompts_per_step
        yield f"trainer.prompts_per_step={count}: {chosen} compares a step's prompts with each other; raise it to 2 or more"
    if coef := cfg.algorithm.kl.coef:
        yield f"algorithm.kl.coef={coef} has no effect with {kind}: algorithm.dpo.beta limits the distance; remove it"
    if not needs_reference(cfg):
        for name, value in reference:
            if value and value not in ("auto", "never"):
                yield f"reference.{name}={value} has no effect with {chosen}, which uses no reference; remove it"
        return
    if reference.precompute and loss is not None and loss.needs_mismatched:
        yield f"reference.precompute=True is not supported with {chosen}, which compares other pairs in every step; set it to false"
    if reference.refresh_steps and cfg.actor.lora.rank is None:  # ``lora_problems`` reports the other case
        steps = reference.refresh_steps
        yield f"reference.refresh_steps={steps} is not supported with {kind}: all pairs need the same reference; set it to 0"
