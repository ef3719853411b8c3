"""What verl's keys mean where a row of the table in ``verl`` is not enough: several of theirs, or a choice of theirs, to ours."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from rlhf_mcore.config.migration.table import Joint, Lost, Values, choose, divided, path

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
MEGATRON, OPTIM = ACTOR + "megatron.", ACTOR + "optim."
RECOMPUTE = MEGATRON + "override_transformer_config.recompute_"
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
ADVANTAGES = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "reinforce_plus_plus": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline",
}
PRESETS = {"gae": "ppo"}


# ---------------------------------------------------------------------------------------------------------- conversions
def advantage(values: Values) -> dict[str, Any]:
    name = choose(ADVANTAGES)(values["algorithm.adv_estimator"])
    return {
        "algorithm.preset": PRESETS.get(name, name),
        "algorithm.advantage": name,
        "algorithm.whiten_advantages": name == "gae",
        "algorithm.normalize_std": bool(values["algorithm.norm_adv_by_std_in_grpo"]),
    }


def samples(values: Values) -> dict[str, Any]:
    """Responses per prompt. With a single one theirs falls back to the bare score, ours compares."""
    count, estimator = int(values[ROLLOUT + "n"]), values["algorithm.adv_estimator"]
    if count == 1 and estimator in ADVANTAGES and estimator not in ("gae", "reinforce_plus_plus"):
        raise Lost(
            f"{estimator} compares the responses to one prompt with each other: 2 are drawn", {"rollout.sampling.n": 2}
        )
    return {"rollout.sampling.n": count}


def clip(values: Values) -> dict[str, Any]:
    both = values.get(ACTOR + "clip_ratio", 0.2)
    low, high = values.get(ACTOR + "clip_ratio_low"), values.get(ACTOR + "clip_ratio_high")
    return {
        "algorithm.clip_low": min(float(both if low is None else low), 1.0),  # 1 and more: no lower bound
        "algorithm.clip_high": float(both if high is None else high),
    }


def policy_loss(values: Values) -> dict[str, Any]:
    name = choose({"vanilla": "ppo_clip", "gspo": "gspo", "cispo": "cispo"})(values[ACTOR + "policy_loss.loss_mode"])
    dual = float(values[ACTOR + "clip_ratio_c"]) if name == "ppo_clip" else None
    return {"algorithm.policy_loss": name, "algorithm.dual_clip": dual}


def aggregation(values: Values) -> dict[str, Any]:
    mode, factor = values[ACTOR + "loss_agg_mode"], values.get(ACTOR + "loss_scale_factor")
    if mode == "seq-mean-token-sum":  # a sum over tokens is a constant length of one
        return {"algorithm.loss_aggregation": "constant", "algorithm.constant_length": 1}
    modes = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}
    found = {"algorithm.loss_aggregation": choose(modes)(mode)}
    if found["algorithm.loss_aggregation"] == "constant":
        found["algorithm.constant_length"] = factor
    return found


def kl(values: Values) -> dict[str, Any]:
    if values[ACTOR + "use_kl_loss"]:
        if values["algorithm.use_kl_in_reward"]:
            raise Lost("KL is charged in the loss or in the reward here, not in both")
        estimator = choose(KL)(values[ACTOR + "kl_loss_type"])
        if estimator == "k1":
            raise Lost("k1 in the loss has an expected gradient of zero; use k2 or k3, or charge it in the reward")
        return _kl_settings(values[ACTOR + "kl_loss_coef"], estimator, "loss")
    if not values["algorithm.use_kl_in_reward"]:
        return {"algorithm.kl.coef": 0.0}
    found = _kl_settings(values["algorithm.kl_ctrl.kl_coef"], choose(KL)(values["algorithm.kl_penalty"]), "reward")
    if values["algorithm.kl_ctrl.type"] == "adaptive":
        found["algorithm.kl.controller.name"] = "adaptive"
        found["algorithm.kl.controller.target"] = float(values["algorithm.kl_ctrl.target_kl"])
    return found


def _kl_settings(coef: Any, estimator: str, placement: str) -> dict[str, Any]:
    return {
        "algorithm.kl.coef": float(coef),
        "algorithm.kl.estimator": estimator,
        "algorithm.kl.placement": placement,
        "algorithm.kl.clip": 10.0 if estimator == "k3" else None,  # a constant in its code, of k3 only
    }


def correction(values: Values) -> dict[str, Any]:
    mode = values["algorithm.rollout_correction.rollout_is"]
    if mode is None:
        return {}
    return {
        "algorithm.rollout_correction.mode": choose({"token": "token", "sequence": "sequence"})(mode),
        "algorithm.rollout_correction.cap": float(values["algorithm.rollout_correction.rollout_is_threshold"]),
    }


def world(values: Values) -> dict[str, Any]:
    return {"trainer.world_size": int(values["trainer.nnodes"]) * int(values["trainer.n_gpus_per_node"])}


def sequence_parallel(theirs: str, ours: str) -> Joint:
    """On by default there; it shares something out among two ranks or more only."""
    names = (theirs + "sequence_parallel", theirs + "tensor_model_parallel_size")

    def convert(values: Values) -> dict[str, Any]:
        return {ours: bool(values[names[0]]) and int(values.get(names[1], 1)) > 1}

    return Joint(names, convert)


def value_clip(values: Values) -> dict[str, Any]:
    has_critic = values["algorithm.adv_estimator"] == "gae"
    return {"critic.value_clip": float(values["critic.cliprange_value"])} if has_critic else {}


def reward_model(values: Values) -> dict[str, Any]:
    if not values["reward_model.enable"]:
        return {}
    return {"reward.model.path": path(values["reward_model.model.path"]), "reward.rules": []}


def warmup(theirs: str, ours: str) -> Joint:
    """Theirs is counted in steps, ours in updates, of which a step may make several."""

    def convert(values: Values) -> dict[str, Any]:
        steps = int(values.get(theirs + "lr_warmup_steps", -1))
        if steps < 0:
            return {ours + "schedule.warmup_ratio": float(values.get(theirs + "lr_warmup_steps_ratio") or 0)}
        per_step = int(values[ACTOR + "ppo_epochs"]) * divided(
            values["data.train_batch_size"],
            values[ACTOR + "ppo_mini_batch_size"],
            "data.train_batch_size over ppo_mini_batch_size",
        )
        return {ours + "schedule.warmup_updates": steps * per_step}

    sizes = ("data.train_batch_size", ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_epochs")
    return Joint((theirs + "lr_warmup_steps", theirs + "lr_warmup_steps_ratio", *sizes), convert)


def microbatch(values: Values) -> dict[str, Any]:
    longest = int(values["data.max_prompt_length"]) + int(values["data.max_response_length"])
    if values.get(ACTOR + "use_dynamic_bsz"):
        tokens = int(values[ACTOR + "ppo_max_token_len_per_gpu"])
    elif values.get(ACTOR + "ppo_micro_batch_size_per_gpu"):
        tokens = int(values[ACTOR + "ppo_micro_batch_size_per_gpu"]) * longest
    else:
        tokens = int(values[ACTOR + "ppo_max_token_len_per_gpu"])
    return {"trainer.max_tokens_per_microbatch": max(tokens, longest)}


def steps(values: Values) -> dict[str, Any]:
    total = values.get("trainer.total_training_steps")
    if total is None:
        raise Lost("depends on the number of rows: set trainer.num_steps to epochs x rows / data.train_batch_size")
    return {"trainer.num_steps": int(total)}


def reward(values: Values) -> dict[str, Any]:
    file = values["custom_reward_function.path"]
    return {} if file is None else {"reward.function": f"{file}:{values['custom_reward_function.name']}"}


def overlong_prompts(values: Values) -> dict[str, Any]:
    if not values["data.filter_overlong_prompts"] and values.get("data.truncation", "error") != "error":
        raise Lost("prompts are never cut here, longer ones are left out", {"data.overlong_prompts": "drop"})
    return {"data.overlong_prompts": "drop" if values["data.filter_overlong_prompts"] else "error"}


def validation(values: Values) -> dict[str, Any]:
    samples, greedy = values.get(ROLLOUT + "val_kwargs.n", 1), not values.get(ROLLOUT + "val_kwargs.do_sample", False)
    temperature = 0.0 if greedy else float(values.get(ROLLOUT + "val_kwargs.temperature", 0))
    return {"evaluate.samples": 1 if temperature == 0 else int(samples), "evaluate.temperature": temperature}


def output(values: Values) -> dict[str, Any]:
    folder = PurePosixPath(str(values["trainer.default_local_dir"]))
    run = (str(values["trainer.project_name"]), str(values["trainer.experiment_name"]))
    if folder.parts[-2:] != run:
        raise Lost("runs go to <output_dir>/<project>/<experiment>: set these three")
    return {"output_dir": str(folder.parent.parent)}


def logger(names: Any) -> bool:
    names = [names] if isinstance(names, str) else list(names)
    if foreign := sorted(set(map(str, names)) - {"console", "tensorboard", "file"}):
        reason = f"{', '.join(foreign)} cannot be written to; metrics go to metrics.jsonl and TensorBoard"
        raise Lost(reason, {"logging.tensorboard": True})
    return "tensorboard" in names


OVERLONG = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)


def overlong(prefix: str) -> Joint:
    """DAPO's soft punishment of long responses; its place in their configuration has moved twice."""
    length = prefix.replace("overlong_buffer_cfg.", "max_resp_len")

    def convert(values: Values) -> dict[str, Any]:
        if not values[prefix + "enable"]:
            return {"algorithm.overlong.enabled": False}
        found = {
            "algorithm.overlong.enabled": True,
            "algorithm.overlong.cache_tokens": int(values[prefix + "len"]),
            "algorithm.overlong.penalty": float(values.get(prefix + "penalty_factor", 1.0)),
        }
        if values.get(length) is not None:
            found["algorithm.overlong.max_tokens"] = int(values[length])
        return found

    names = [prefix + name for name in ("enable", "len", "penalty_factor")]
    return Joint((*names, length) if length != prefix else tuple(names), convert)


def filter_groups(values: Values) -> dict[str, Any]:
    found: dict[str, Any] = {"algorithm.dynamic_sampling.enabled": bool(values["algorithm.filter_groups.enable"])}
    limit = int(values.get("algorithm.filter_groups.max_num_gen_batches", 0))
    if limit > 0:  # 0 and less: no limit there
        found["algorithm.dynamic_sampling.max_batches"] = limit
    return found


def resume(values: Values) -> dict[str, Any]:
    mode = values["trainer.resume_mode"]
    if mode == "resume_path":
        return {"checkpoint.resume": str(values.get("trainer.resume_from_path"))}
    return {"checkpoint.resume": choose({"auto": "auto", "disable": "never"})(mode)}
