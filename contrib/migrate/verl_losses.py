"""Convert the objective of verl: advantage estimators, losses, KL and corrections."""

from __future__ import annotations

from typing import Any

from rlhf_mcore_contrib.migrate.table import Lost, Values, choose

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
COVARIANCE = {
    "kl_cov": {"share": "kl_cov_ratio", "kl_coef": "ppo_kl_coef"},
    "clip_cov": {"share": "clip_cov_ratio", "low": "clip_cov_lb", "high": "clip_cov_ub"},
}
ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
    "gdpo": "gdpo",
    "remax": "remax",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}


def advantage(values: Values) -> dict[str, Any]:
    name = choose(ADVANTAGES)(values["algorithm.adv_estimator"])
    return {
        "algorithm.preset": "ppo" if name == "gae" else name,
        "algorithm.advantage": name,
        "algorithm.whiten_advantages": name == "gae",
        "algorithm.normalize_std": bool(values["algorithm.norm_adv_by_std_in_grpo"]),
        **({"algorithm.reward_weights": _weights(values)} if name == "gdpo" else {}),
    }


def _weights(values: Values) -> dict[str, float]:
    names = values.get("algorithm.gdpo_reward_keys") or []
    weights = values.get("algorithm.gdpo_reward_weights") or [1.0] * len(names)
    if len(names) != len(weights):
        raise Lost(
            f"algorithm.gdpo_reward_keys contains {len(names)} names, but algorithm.gdpo_reward_weights {len(weights)} numbers"
        )
    return {name: float(weight) for name, weight in zip(names, weights, strict=True)}


def samples(values: Values) -> dict[str, Any]:
    """Convert the responses per prompt. With a single response, verl uses the bare score, but ours needs a group."""
    count, estimator = int(values[ROLLOUT + "n"]), values["algorithm.adv_estimator"]
    if count == 1 and estimator in ADVANTAGES and estimator not in ("gae", "reinforce_plus_plus", "remax"):
        raise Lost(
            f"{estimator} compares the responses to one prompt, so the converted run samples 2",
            {"rollout.sampling.n": 2},
        )
    return {"rollout.sampling.n": count}


def clip(values: Values) -> dict[str, Any]:
    both = values.get(ACTOR + "clip_ratio", 0.2)
    low, high = values.get(ACTOR + "clip_ratio_low"), values.get(ACTOR + "clip_ratio_high")
    return {
        "algorithm.clip_low": min(float(both if low is None else low), 1.0),  # values from 1 mean no lower bound
        "algorithm.clip_high": float(both if high is None else high),
    }


def policy_loss(values: Values) -> dict[str, Any]:
    theirs = values[ACTOR + "policy_loss.loss_mode"]
    own_names = ("gspo", "cispo", "sapo", "kl_cov", "clip_cov")
    name = choose({"vanilla": "ppo_clip", "geo_mean": "gmpo", **{same: same for same in own_names}})(theirs)
    dual = float(values[ACTOR + "clip_ratio_c"]) if name == "ppo_clip" else None
    settings = {"algorithm.policy_loss": name, "algorithm.dual_clip": dual}
    for ours, key in COVARIANCE.get(name, {}).items():
        settings[f"algorithm.covariance.{ours}"] = float(values[f"{ACTOR}policy_loss.{key}"])
    return settings


def aggregation(values: Values) -> dict[str, Any]:
    mode, factor = values[ACTOR + "loss_agg_mode"], values.get(ACTOR + "loss_scale_factor")
    if mode == "seq-mean-token-sum":  # a sum over tokens equals a constant length of 1
        return {"algorithm.loss_aggregation": "constant", "algorithm.constant_length": 1}
    modes = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
    settings = {"algorithm.loss_aggregation": choose(modes)(mode)}
    if settings["algorithm.loss_aggregation"] == "constant":
        settings["algorithm.constant_length"] = factor
    return settings


def kl(values: Values) -> dict[str, Any]:
    if values[ACTOR + "use_kl_loss"]:
        if values["algorithm.use_kl_in_reward"]:
            raise Lost("KL is charged either in the loss or in the reward here, not in both")
        estimator = choose(KL)(values[ACTOR + "kl_loss_type"])
        if estimator == "k1":
            raise Lost("k1 in the loss has an expected gradient of zero; use k2 or k3, or charge it in the reward")
        return _kl_settings(values[ACTOR + "kl_loss_coef"], estimator, "loss")
    if not values["algorithm.use_kl_in_reward"]:
        return {"algorithm.kl.coef": 0.0}
    settings = _kl_settings(values["algorithm.kl_ctrl.kl_coef"], choose(KL)(values["algorithm.kl_penalty"]), "reward")
    if values["algorithm.kl_ctrl.type"] == "adaptive":
        settings["algorithm.kl.controller.target"] = float(values["algorithm.kl_ctrl.target_kl"])
    return settings


def _kl_settings(coef: Any, estimator: str, placement: str) -> dict[str, Any]:
    return {
        "algorithm.kl.coef": float(coef),
        "algorithm.kl.estimator": estimator,
        "algorithm.kl.placement": placement,
        "algorithm.kl.clip": 10.0 if estimator == "k3" else None,  # verl clips only k3, at a constant in its code
    }


def correction(values: Values) -> dict[str, Any]:
    mode = values["algorithm.rollout_correction.rollout_is"]
    if mode is None:
        return {}
    return {
        "algorithm.rollout_correction.mode": choose({"token": "token", "sequence": "sequence"})(mode),
        "algorithm.rollout_correction.cap": float(values["algorithm.rollout_correction.rollout_is_threshold"]),
    }
