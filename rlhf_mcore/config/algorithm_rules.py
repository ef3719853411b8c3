"""What has to hold among the keys of ``algorithm``."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.derive import needs_critic
from rlhf_mcore.config.schema import AlgorithmConfig, Config
from rlhf_mcore.config.user_functions import function_problems, is_file_spec

# The tables of rlhf_mcore.algorithms.interfaces, which cannot be imported here: they need torch.
ADVANTAGES = ("gae", "grpo", "rloo", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
POLICY_LOSSES = ("ppo_clip", "gspo", "cispo")
GROUP_RELATIVE = ("grpo", "rloo", "reinforce_plus_plus_baseline")
WITH_WHITENING = ("gae", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def algorithm_problems(cfg: Config) -> Iterator[str]:
    """Problems with ``cfg.algorithm`` that a look at one key does not show."""
    algorithm = cfg.algorithm
    yield from _name_problems("algorithm.advantage", algorithm.advantage, ADVANTAGES)
    yield from _name_problems("algorithm.policy_loss", algorithm.policy_loss, POLICY_LOSSES)
    yield from _group_problems(cfg)
    yield from _critic_problems(cfg)
    yield from _loss_problems(algorithm)
    yield from _kl_problems(algorithm)
    yield from _correction_problems(algorithm)
    yield from _overlong_problems(cfg)


def _name_problems(key: str, name: str, known: tuple[str, ...]) -> Iterator[str]:
    if is_file_spec(name):
        yield from function_problems(name, key)
    elif name not in known:
        yield f"{key}={name!r} is not a choice; choose one of: {', '.join(known)}, or path/to/file.py:name"


def _group_problems(cfg: Config) -> Iterator[str]:
    n, algorithm = cfg.rollout.sampling.n, cfg.algorithm
    if n >= 2:
        return
    if algorithm.advantage in GROUP_RELATIVE:
        yield (
            f"rollout.sampling.n={n}: algorithm.advantage={algorithm.advantage} compares the responses to "
            "one prompt with each other; set rollout.sampling.n to 2 or more"
        )
    if algorithm.dynamic_sampling.enabled:
        yield (
            f"rollout.sampling.n={n}: algorithm.dynamic_sampling.enabled=True keeps prompts whose responses differ in "
            "score; set rollout.sampling.n to 2 or more, or switch it off"
        )


def _critic_problems(cfg: Config) -> Iterator[str]:
    algorithm = cfg.algorithm
    wanted = algorithm.advantage == "gae"
    if algorithm.advantage in ADVANTAGES and needs_critic(cfg) != wanted:
        verb = "needs a critic" if wanted else "has no use for a critic"
        yield (
            f"algorithm.use_critic={algorithm.use_critic}: algorithm.advantage={algorithm.advantage} {verb}; "
            "set it to auto"
        )


def _loss_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    if algorithm.whiten_advantages and algorithm.advantage in set(ADVANTAGES) - set(WITH_WHITENING):
        yield (
            f"algorithm.whiten_advantages=True has no effect with algorithm.advantage={algorithm.advantage}; "
            "set it to false, or use normalize_std"
        )
    if algorithm.bootstrap_truncated and algorithm.advantage in set(ADVANTAGES) - {"gae"}:
        yield (
            f"algorithm.bootstrap_truncated=True has no effect with algorithm.advantage={algorithm.advantage}, which has no "
            "critic; set it to false"
        )
    ignores_dual_clip = algorithm.policy_loss in set(POLICY_LOSSES) - {"ppo_clip"}
    if algorithm.dual_clip is not None and ignores_dual_clip:
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip:g} has no effect with algorithm.policy_loss="
            f"{algorithm.policy_loss}; set it to null"
        )


def _kl_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    kl, controller = algorithm.kl, algorithm.kl.controller
    if kl.coef > 0 and kl.estimator == "k1" and kl.placement == "loss":
        yield (
            "algorithm.kl.estimator=k1 has an expected gradient of zero in the loss; "
            "use k2 or k3, or algorithm.kl.placement=reward"
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


def _correction_problems(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.rollout_correction
    low, high = correction.mask_low, correction.mask_high
    prefix = "algorithm.rollout_correction."
    if correction.mode == "off" and (low is not None or high is not None):
        key, value = ("mask_low", low) if low is not None else ("mask_high", high)
        yield f"{prefix}{key}={value:g} has no effect with {prefix}mode=off; choose token or sequence"
    if low is not None and high is not None and low >= high:
        yield f"{prefix}mask_low={low:g} is not below {prefix}mask_high={high:g}; lower it"


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
