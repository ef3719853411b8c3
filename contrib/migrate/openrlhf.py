"""Key table for OpenRLHF: command lines of its training programs, with dotted flags (2026) or the older plain flags."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from rlhf_mcore_contrib.migrate.table import (
    Joint,
    Lost,
    Row,
    Table,
    Values,
    adapters,
    choose,
    divide,
    padded_length,
    pair,
    path,
    positive,
)

ESTIMATORS = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",  # OpenRLHF whitens over the batch, as REINFORCE++ does
    "reinforce_baseline": "reinforce_plus_plus_baseline",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}
PRESETS = {"gae": "ppo"}


def _advantage(values: Values) -> dict[str, Any]:
    theirs = values["algo.advantage.estimator"]
    name = choose(ESTIMATORS)(theirs)
    return {
        "algorithm.preset": PRESETS.get(name, name),
        "algorithm.advantage": name,
        "algorithm.whiten_advantages": name == "gae" and not values.get("algo.advantage.no_std_norm"),
        "algorithm.normalize_std": theirs != "dr_grpo" and not values.get("algo.advantage.no_std_norm"),
    }


def _lengths(values: Values) -> dict[str, Any]:
    new, prompt = values.get("rollout.max_new_tokens"), values.get("data.prompt_max_len")
    total = int(values.get("data.max_len", 2048))
    if new is None and prompt is None:
        raise Lost(
            "this limit of prompt plus response was halved; set data.max_prompt_tokens and rollout.sampling.max_new_tokens for "
            "your prompts",
            {"data.max_prompt_tokens": total // 2, "rollout.sampling.max_new_tokens": total - total // 2},
        )
    longest = int(new) if new is not None else total - int(prompt or 0)
    return {
        "rollout.sampling.max_new_tokens": longest,
        "data.max_prompt_tokens": int(prompt) if prompt is not None else total - longest,
    }


def _minibatch(values: Values) -> dict[str, Any]:
    what = "train.batch_size counts responses, trainer.minibatch_size prompts"
    return {"trainer.minibatch_size": divide(values["train.batch_size"], values["rollout.n_samples_per_prompt"], what)}


def _clip(values: Values) -> dict[str, Any]:
    both = values["actor.eps_clip"]
    low, high = values.get("actor.eps_clip_low_high") or (both, both)
    return {"algorithm.clip_low": float(low), "algorithm.clip_high": float(high)}


def _policy_loss(values: Values) -> dict[str, Any]:
    name = choose({"ppo": "ppo_clip", "gspo": "gspo"})(values["actor.policy_loss_type"])
    return {"algorithm.policy_loss": name, "algorithm.loss_aggregation": "sequence" if name == "gspo" else "token"}


def _kl(values: Values) -> dict[str, Any]:
    coef, estimator = float(values["algo.kl.init_coef"]), values["algo.kl.estimator"]
    placement = "loss" if values.get("algo.kl.use_loss") else "reward"
    if placement == "loss" and estimator == "k1" and coef:
        raise Lost("k1 in the loss has an expected gradient of zero; use k2 or k3, or charge it in the reward")
    settings = {
        "algorithm.kl.coef": coef,
        "algorithm.kl.estimator": choose({k: k for k in ("k1", "k2", "k3")})(estimator),
        "algorithm.kl.placement": placement,
    }
    if values.get("algo.kl.target") is not None and coef:
        settings["algorithm.kl.controller.target"] = float(values["algo.kl.target"])
    return settings


def _correction(values: Values) -> dict[str, Any]:
    if not values.get("algo.advantage.is_correction_enable"):
        return {}
    low, high = values["algo.advantage.is_correction_threshold"]
    kind = choose({"tis": "cap", "icepop": "mask"})(values["algo.advantage.is_correction_type"])
    settings = {"algorithm.rollout_correction.mode": "token", "algorithm.rollout_correction.cap": float(high)}
    if kind == "mask":
        settings["algorithm.rollout_correction.mask_low"] = float(low)
        settings["algorithm.rollout_correction.mask_high"] = float(high)
    return settings


def schedule(model: str) -> Joint:
    """Convert the learning-rate schedule. ``model``: prefix of the keys, "actor." in programs with several models."""
    names = (f"{model}lr_scheduler", f"{model}min_lr_ratio", f"{model}adam.lr")

    def convert(values: Values) -> dict[str, Any]:
        theirs, ratio, lr = (values[name] for name in names)
        kinds = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear"}
        name = choose({**kinds, "constant": "constant", "constant_with_warmup": "constant"})(theirs)
        floor = float(ratio) * float(lr) if theirs == "cosine_with_min_lr" else 0.0
        return {"actor.optimizer.schedule.name": name, "actor.optimizer.schedule.min_lr": floor}

    return Joint(names, convert)


def _warmup(share: Any) -> float:
    if not 0 <= float(share) < 1:
        raise Lost("not a share of the updates; set actor.optimizer.schedule.warmup")
    return float(share)


def _overlong(values: Values) -> dict[str, Any]:
    if values.get("reward.overlong_buffer_len") is None:
        return {}
    return {
        "algorithm.overlong.enabled": True,
        "algorithm.overlong.cache_tokens": int(values["reward.overlong_buffer_len"]),
        "algorithm.overlong.penalty": float(values["reward.overlong_penalty_factor"]),
    }


def _evaluation(values: Values) -> dict[str, Any]:
    if values.get("eval.dataset") is None:
        return {}
    temperature = float(values["eval.temperature"])
    return {
        "data.eval": data_files(values["eval.dataset"], "data.eval"),
        "evaluate.temperature": temperature,
        "evaluate.samples": int(values["eval.n_samples_per_prompt"]) if temperature else 1,
    }


def data_files(names: Any, field: str = "data.train") -> list[str]:
    """Split a comma-separated list of files. Data-set ids are lost; the files that prepare-data writes replace them.

    Raises:
        Lost: a name is not a .parquet or .jsonl file.
    """
    paths = [path(name.strip()) for name in str(names).split(",") if name.strip()]
    files = [
        name if name.endswith((".parquet", ".jsonl")) else f"data/{PurePosixPath(name).name}/train.parquet"
        for name in paths
    ]
    if files == paths:
        return files
    commands = [
        f"rlhf-mcore prepare-data {name} --out data/{PurePosixPath(name).name}" for name in paths if name not in files
    ]
    raise Lost(
        f"not .parquet or .jsonl files; write the files in {field} with {' and '.join(commands)}", {field: files}
    )


def _world(values: Values) -> dict[str, Any]:
    return {"trainer.world_size": int(values["actor.num_nodes"]) * int(values["actor.num_gpus_per_node"])}


def _critic(values: Values) -> dict[str, Any]:
    if values["algo.advantage.estimator"] != "gae":
        return {}
    return {
        "critic.optimizer.lr": float(values["critic.adam.lr"]),
        "critic.value_clip": float(values["critic.value_clip"]),
    }


def _wandb(values: Values) -> dict[str, Any]:
    if not values["logger.wandb.key"]:
        return {}
    trackers = {"logging.trackers": ["tensorboard", "wandb"]}
    raise Lost("keys are never written to a configuration; run `wandb login` or set WANDB_API_KEY", trackers)


def _tokens(values: Values) -> dict[str, Any]:
    new, prompt = values.get("rollout.max_new_tokens"), values.get("data.prompt_max_len")
    longest = int(values["data.max_len"] if new is None or prompt is None else new + prompt)
    cp = int(values.get("ds.ring_attn_size", 1))
    rounded = padded_length(longest, values.get("ds.tensor_parallel_size", 1), cp)
    if values["train.dynamic_batch_enable"]:
        tokens = int(values["train.max_tokens_per_gpu"]) * cp
        return {"trainer.max_tokens_per_microbatch": max(tokens, rounded)}
    return {"trainer.max_tokens_per_microbatch": int(values["train.micro_batch_size"]) * rounded}


def _reward_model(values: Values) -> dict[str, Any]:
    return {"reward.model.path": path(values["reward.model_name_or_path"]), "reward.rules": []}


MUON = "set actor.optimizer.name=muon by hand, with a learning rate as for AdamW, because updates are scaled differently here"


def adam(values: Values) -> dict[str, Any]:
    """Return no settings if the value is "adam". Other optimizers are lost."""
    if list(values.values()) != ["adam"]:
        raise Lost(MUON)
    return {}


# Keys of the trained model, in every program of OpenRLHF.
MODEL_ROWS = (
    Row("actor.model_name_or_path", "model.path", path),
    Row("ds.param_dtype", "model.dtype", choose({"bf16": "bf16", "fp16": "fp16"})),
    Row("bf16", "model.dtype", lambda on: "bf16" if on else "auto"),
    Row("ds.tensor_parallel_size", "actor.layout.tp", int),
    Row("ds.packing_samples", "trainer.packing", bool),
    Row("actor.gradient_checkpointing_enable", "actor.recompute.granularity", lambda on: "full" if on else "off"),
    Row("actor.adam.lr", "actor.optimizer.lr", float),
    Row("actor.adam.eps", "actor.optimizer.eps", float),
    Row("actor.adam.weight_decay", "actor.optimizer.weight_decay", float),
    Row("actor.max_norm", "actor.optimizer.clip_grad", float),
    Row("actor.lr_warmup_ratio", "actor.optimizer.schedule.warmup", _warmup),
    Row("actor.aux_loss_coef", "actor.moe.aux_loss_coef", float),
    Row("train.seed", "seed", int),
    Row("train.full_determinism_enable", "deterministic", bool),
    Row("data.apply_chat_template", "data.apply_chat_template", lambda on: "true" if on else "false"),
    Row("ckpt.output_dir", "output_dir", str),
    Row("ckpt.save_steps", "checkpoint.save_steps", positive),
    Row("ckpt.max_num", "checkpoint.save_total_limit", int),
    Row("ckpt.load_enable", "checkpoint.resume", lambda on: "auto" if on else "never"),
    Row("logger.wandb.project", "project", str),
    Row("logger.wandb.run_name", "experiment", str),
    Row("logger.tensorboard_dir", "logging.trackers", lambda directory: ["tensorboard"] if directory else []),
)
ROWS = (
    *MODEL_ROWS,
    Row("ds.ring_attn_size", "actor.layout.cp", int),
    Row("critic.model_name_or_path", "critic.path", path),
    Row("critic.freezing_steps", "critic.warmup_steps", positive),
    Row("actor.dual_clip", "algorithm.dual_clip", float),
    Row("actor.entropy_coef", "algorithm.entropy_coef", float),
    Row("algo.advantage.gamma", "algorithm.gamma", float),
    Row("algo.advantage.lambd", "algorithm.lam", float),
    Row("algo.dynamic_filtering_enable", "algorithm.dynamic_sampling.enabled", bool),
    Row("vllm.tensor_parallel_size", "rollout.layout.tp", int),
    Row("vllm.gpu_memory_utilization", "rollout.gpu_memory_utilization", float),
    Row("vllm.enforce_eager", "rollout.enforce_eager", bool),
    Row("vllm.enable_prefix_caching", "rollout.vllm", lambda on: {"enable_prefix_caching": bool(on)}),
    Row("vllm.enable_sleep", "rollout.sleep_level", lambda on: 2 if on else 0),
    Row("ds.enable_sleep", "actor.offload", lambda on: "always" if on else "auto"),
    Row("rollout.batch_size", "trainer.prompts_per_step", int),
    Row("rollout.n_samples_per_prompt", "rollout.sampling.n", int),
    Row("rollout.temperature", "rollout.sampling.temperature", float),
    Row("rollout.top_p", "rollout.sampling.top_p", float),
    Row("train.max_epochs", "trainer.ppo_epochs", int),
    Row("train.num_episodes", "trainer.num_epochs", float),
    Row("data.prompt_dataset", "data.train", data_files),
    Row("data.input_key", "data.prompt_key", str),
    Row("data.label_key", "data.answer_key", str),
    Row("eval.steps", "evaluate.every", positive),
)
ADAPTERS = adapters("ds.lora.rank", "ds.lora.alpha", "ds.lora.target_modules", "ds.lora.dropout")
JOINTS = (
    ADAPTERS,
    Joint(("algo.advantage.estimator", "algo.advantage.no_std_norm"), _advantage),
    Joint(("data.max_len", "rollout.max_new_tokens", "data.prompt_max_len"), _lengths),
    Joint(("train.batch_size", "rollout.n_samples_per_prompt"), _minibatch),
    Joint(("actor.eps_clip", "actor.eps_clip_low_high"), _clip),
    Joint(("actor.policy_loss_type",), _policy_loss),
    Joint(("algo.kl.init_coef", "algo.kl.estimator", "algo.kl.use_loss", "algo.kl.target"), _kl),
    Joint(tuple(f"algo.advantage.is_correction_{name}" for name in ("enable", "threshold", "type")), _correction),
    schedule("actor."),
    Joint(("actor.adam.betas",), pair("actor.optimizer.beta1", "actor.optimizer.beta2")),
    Joint(("reward.overlong_buffer_len", "reward.overlong_penalty_factor"), _overlong),
    Joint(("eval.dataset", "eval.temperature", "eval.n_samples_per_prompt"), _evaluation),
    Joint(("algo.advantage.estimator", "critic.adam.lr", "critic.value_clip"), _critic),
    Joint(("actor.num_nodes", "actor.num_gpus_per_node"), _world),
    Joint(("logger.wandb.key",), _wandb),
    Joint(
        (
            "train.dynamic_batch_enable",
            "train.max_tokens_per_gpu",
            "train.micro_batch_size",
            "rollout.max_new_tokens",
            "data.prompt_max_len",
            "data.max_len",
            "ds.ring_attn_size",
            "ds.tensor_parallel_size",
        ),
        _tokens,
    ),
    Joint(("actor.optim",), adam),
    Joint(("reward.model_name_or_path",), _reward_model),
)
DEFAULTS = {
    "actor.policy_loss_type": "ppo",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.adam.lr": 1e-6,
    "actor.adam.betas": (0.9, 0.95),
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.eps_clip": 0.2,
    "algo.advantage.estimator": "gae",
    "algo.advantage.lambd": 1.0,
    "algo.advantage.is_correction_threshold": (0.5, 5.0),
    "algo.advantage.is_correction_type": "tis",
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "critic.adam.lr": 9e-6,
    "critic.value_clip": 0.5,
    "ckpt.load_enable": False,
    "ckpt.max_num": 3,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "reward.overlong_penalty_factor": 1.0,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.dynamic_batch_enable": False,
    "train.micro_batch_size": 1,
    "train.max_tokens_per_gpu": 16192,
    "train.seed": 42,
    "data.input_key": "input",
    "data.apply_chat_template": False,
    "data.max_len": 2048,
    "vllm.gpu_memory_utilization": 0.95,
    "vllm.enable_sleep": False,
}
_SAME_PROCESSES = "all models and engines share the processes here"
REASONS = {
    "actor.muon": MUON,
    "algo.dynamic_filtering_range": "prompts whose responses all have the same score are replaced here",
    "algo.kl.horizon": "see algorithm.kl.controller.gain",
    "critic": "see the keys of critic",
    "data.input_template": "write the template into the prompts, or use messages",
    "data.max_samples": "all rows are used here; cut the file",
    "data.prompt_probs": "rows are sampled uniformly here; repeat rows to weight a file",
    "data.prompt_split": "name the file of the split",
    "ckpt.path": "checkpoints and models go to one run directory here",
    "ckpt.save_hf": "every checkpoint is a Hugging Face directory here",
    "ckpt.disable_ds": "every checkpoint can be resumed from here",
    "ds": "models are trained by Megatron-core here; choose actor.layout",
    "eval.split": "name the file of the split",
    "logger": "metrics go to metrics.jsonl and to logging.trackers here",
    "ref": _SAME_PROCESSES,
    "reward.num_nodes": _SAME_PROCESSES,
    "reward.num_gpus_per_node": _SAME_PROCESSES,
    "reward": "set the reward group: rules, or a function f(data_source, solution_str, ground_truth, extra_info)",
    "rollout.max_tokens_per_gpu": "forward passes are cut by trainer.max_tokens_per_microbatch here",
    "rollout.micro_batch_size": "the engine batches by itself; see rollout.max_num_seqs",
    "rollout.vllm_generate_batch_size": "the engine batches by itself; see rollout.max_num_seqs",
    "train.agent_func_path": "see environment; your class, or tools, answer the policy",
    "train.async_enable": "see rollout.placement and trainer.max_staleness",
    "train.colocate_actor_ref": _SAME_PROCESSES,
    "train.colocate_all": _SAME_PROCESSES,
    "train.colocate_critic_reward": _SAME_PROCESSES,
    "vllm.num_engines": "world size / rollout.layout.tp here; with rollout.placement=disaggregated see rollout.num_engines",
    **dict.fromkeys(("vllm.sync_backend", "vllm.sync_with_ray"), "the bridge sends the weights to the engines here"),
}
TABLE = Table("OpenRLHF", ROWS, JOINTS, DEFAULTS, REASONS)
