"""Key table for TRL: keywords of ``GRPOConfig`` and ``GRPOTrainer``, and flags of ``trl grpo`` (1.x)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_mcore.config.choices import TRACKERS
from rlhf_mcore_contrib.migrate.openrlhf import data_files
from rlhf_mcore_contrib.migrate.table import (
    Joint,
    Lost,
    Row,
    Table,
    Values,
    adapted_layers,
    choose,
    divide,
    path,
)

_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")
_GENERATION = (*_BATCH, "generation_batch_size", "steps_per_generation", "num_iterations")
# Keywords of PEFT's LoraConfig -> keys of ``actor.lora``; TRL's flags -> keywords of LoraConfig.
_PEFT_KEYS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
_PEFT_FLAGS = {
    "lora_r": "r",
    **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
    "lora_target_modules": "target_modules",
    "lora_target_parameters": "target_parameters",
    "lora_modules_to_save": "modules_to_save",
    "lora_task_type": "task_type",
}
_LOSSES = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "cispo": "token"}
# TRL's think_format_reward is ^<think>(?!.*<think>)(.*?)</think>.*$. RE2 has no look-ahead, so this pattern spells out a text without
# <think>: after each <, at most the beginning of "think>" follows.
_BEGINNING = "(?:t(?:h(?:i(?:nk?)?)?)?)?"
_NO_THINK = (
    f"(?:[^<]|<(?:{_BEGINNING}<)*(?:[^<t]|t[^<h]|th[^<i]|thi[^<n]|thin[^<k]|think[^<>]))*"
    f"(?:<(?:{_BEGINNING}<)*{_BEGINNING})?"
)
_RULES = {
    "accuracy_reward": {"name": "math"},
    "reasoning_accuracy_reward": {"name": "math"},
    "think_format_reward": {"name": "regex", "pattern": f"^<think>{_NO_THINK}</think>{_NO_THINK}$"},
}


def _responses_per_update(values: Values) -> int:
    return int(values["per_device_train_batch_size"]) * int(values["gradient_accumulation_steps"])


def _responses_per_step(values: Values) -> int:
    if values.get("generation_batch_size") is not None:
        return int(values["generation_batch_size"])
    steps = values.get("steps_per_generation") or values["gradient_accumulation_steps"]
    return int(values["per_device_train_batch_size"]) * int(steps)


def updates_per_step(values: Values) -> int:
    """Return the optimizer updates per generation. TRL counts updates, and we count generations as steps."""
    passes = int(values["num_iterations"])
    return passes * divide(_responses_per_step(values), _responses_per_update(values), "responses of a generation")


def _batches(values: Values) -> dict[str, Any]:
    samples = int(values["num_generations"])
    per_step, per_update = _responses_per_step(values), _responses_per_update(values)
    prompts = "prompts are whole groups here: responses of a batch over num_generations"
    return {
        "trainer.prompts_per_step": divide(per_step, samples, prompts),
        "trainer.minibatch_size": divide(per_update, samples, prompts),
    }


def _microbatch(values: Values) -> dict[str, Any]:
    longest = int(values["max_prompt_length"]) + int(values["max_completion_length"])
    return {"trainer.max_tokens_per_microbatch": int(values["per_device_train_batch_size"]) * longest}


def _num_steps(values: Values) -> dict[str, Any]:
    updates = int(values["max_steps"])
    if updates <= 0:
        return {"trainer.num_epochs": float(values["num_train_epochs"])}
    return {"trainer.num_steps": -(-updates // updates_per_step(values))}


def _every(strategy: str, count: str, ours: str) -> Joint:
    """Convert an interval in updates to an interval in steps."""

    def convert(values: Values) -> dict[str, Any]:
        kind = values[strategy]
        if kind == "no":
            return {ours: 0}
        if kind == "epoch" and ours == "checkpoint.save_steps":
            return {ours: 0, "checkpoint.save_epochs": 1.0}
        choose({"steps": "steps"})(kind)
        every = float(values[count])
        if every < 1:
            raise Lost("a share of the run is not supported; give a number of steps")
        return {ours: max(int(every) // updates_per_step(values), 1)}

    return Joint((strategy, count, *_GENERATION), convert)


def _step_lines(values: Values) -> dict[str, Any]:
    if float(values["logging_steps"]) < 1:
        raise Lost("a share of the run is not supported; set logging.every to a number of steps")
    return {"logging.every": max(int(values["logging_steps"]) // updates_per_step(values), 1)}


def _policy_loss(values: Values) -> dict[str, Any]:
    kind = values["loss_type"]
    if values["importance_sampling_level"] == "sequence" and kind == "grpo":
        return {"algorithm.policy_loss": "gspo", "algorithm.loss_aggregation": "sequence"}
    if values["importance_sampling_level"] != "token":
        raise Lost(
            "sequence ratios need algorithm.policy_loss=gspo here, with the mean over a sequence (loss_type grpo)"
        )
    settings = {"algorithm.loss_aggregation": choose(_LOSSES)(kind)}
    return settings | {"algorithm.policy_loss": "cispo" if kind == "cispo" else "ppo_clip"}


def _clip(values: Values) -> dict[str, Any]:
    low, high = float(values["epsilon"]), values.get("epsilon_high")
    if values["loss_type"] == "cispo":  # cispo bounds the ratio itself, only from above
        bound = low if high is None else float(high)
        if bound <= 1:
            raise Lost(
                "with cispo this key bounds the ratio itself, and the paper uses a bound above 1; set algorithm.clip_high to the "
                "bound minus 1"
            )
        return {"algorithm.clip_low": 1.0, "algorithm.clip_high": bound - 1}
    return {"algorithm.clip_low": low, "algorithm.clip_high": low if high is None else float(high)}


def _scale(value: Any) -> bool:
    choices = {True: True, "group": True, False: False, "none": False}
    if value == "batch":
        raise Lost("advantages are divided by the standard deviation of their group here, or not at all")
    scaled: bool = choose(choices)(value)
    return scaled


def _correction(values: Values) -> dict[str, Any]:
    if not values["use_vllm"] or not values["vllm_importance_sampling_correction"]:
        return {"algorithm.rollout_correction.mode": "off"}
    level, _, constraint = str(values["vllm_importance_sampling_mode"]).partition("_")
    low, high = values["vllm_importance_sampling_clip_min"], values["vllm_importance_sampling_clip_max"]
    settings = {"algorithm.rollout_correction.mode": choose({"token": "token", "sequence": "sequence"})(level)}
    if high is not None:
        settings["algorithm.rollout_correction.cap"] = float(high)
    if constraint == "mask":
        settings["algorithm.rollout_correction.mask_low"] = None if low is None else float(low)
        settings["algorithm.rollout_correction.mask_high"] = None if high is None else float(high)
    elif low is not None:
        raise Lost("weights are bounded only from above here")
    return settings


def _reference(values: Values) -> dict[str, Any]:
    if not values["sync_ref_model"]:
        return {}
    if float(values["ref_model_mixup_alpha"]) != 1:
        raise Lost("the reference is replaced by the actor here (ref_model_mixup_alpha=1); mixing is not supported")
    return {"reference.refresh_steps": max(int(values["ref_model_sync_steps"]) // updates_per_step(values), 1)}


def _reward(values: Values) -> dict[str, Any]:
    """Convert the reward functions that are rules here. The user must move functions of the script to a separate file."""
    named = values["reward_funcs"]
    names = [str(name).rpartition(".")[2] for name in (named if isinstance(named, list) else [named])]
    weights = values.get("reward_weights") or [1.0] * len(names)
    weighted = [(name, {"weight": float(weight)}) for name, weight in zip(names, weights, strict=True)]
    rules = [_RULES[name] | weight for name, weight in weighted if name in _RULES]
    functions = [{"path": f"FILE.py:{name}"} | weight for name, weight in weighted if name not in _RULES]
    if functions:
        raise Lost(
            f"put {' and '.join(name for name in names if name not in _RULES)} into a file without the training script, and replace "
            "FILE.py in reward.functions by its path; TRL's signature is supported (docs/guide/rewards/functions.md)",
            {"reward.rules": rules, "reward.functions": functions},
        )
    return {"reward.rules": rules}


def _trackers(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if names in (["none"], [None]):
        return ["tensorboard"]
    return [
        "tensorboard",
        *(choose({name: name for name in (*TRACKERS, "all")})(name) for name in names if name != "tensorboard"),
    ]


def _peft_config(values: Values) -> dict[str, Any]:
    """Convert the keywords of a ``LoraConfig``."""
    given = values["peft_config"]
    if not given:
        return {}
    if not isinstance(given, dict):
        raise Lost("set actor.lora.rank, alpha, dropout and targets to r, lora_alpha, lora_dropout and target_modules")
    # Only these values of PEFT have a counterpart.
    plain = {
        "bias": ("none",),
        "init_lora_weights": (True, "pissa"),
        "task_type": ("CAUSAL_LM",),
        "inference_mode": (False,),
    }
    known = {*_PEFT_KEYS, *plain}
    for key, value in given.items():
        if value is not None and (key not in known or value not in plain.get(key, (value,))):
            raise Lost(f"{key}={value} of LoraConfig has no counterpart; see the keys of actor.lora")
    settings = {ours: given[key] for key, ours in _PEFT_KEYS.items() if given.get(key) is not None}
    # PEFT's default targets for our dense families
    targets = adapted_layers(given.get("target_modules") or ["q_proj", "v_proj"])
    settings |= {"rank": int(given.get("r", 8)), "alpha": float(given.get("lora_alpha", 8)), "targets": targets}
    if given.get("init_lora_weights") == "pissa":
        settings["init"] = "pissa"
    return {f"actor.lora.{name}": value for name, value in settings.items() if value is not False}


def _peft_flags(values: Values) -> dict[str, Any]:
    """Convert the flags from which TRL builds a ``LoraConfig`` if ``use_peft`` is set."""
    if not values["use_peft"]:
        return {}
    given = {key: values[flag] for flag, key in _PEFT_FLAGS.items() if flag in values}
    numbers = {
        "r": int(given["r"]),
        "lora_alpha": float(given["lora_alpha"]),
        "lora_dropout": float(given["lora_dropout"]),
    }
    return _peft_config({"peft_config": given | numbers})


def _off(reason: str) -> Callable[[Values], dict[str, Any]]:
    """Return a function that returns no settings if the value is off. Otherwise the key is lost for ``reason``."""

    def convert(values: Values) -> dict[str, Any]:
        (value,) = values.values()
        if value not in (None, False, 0, 0.0, {}, []):
            raise Lost(reason)
        return {}

    return convert


def _warmup(values: Values) -> dict[str, Any]:
    """Convert the warmup: a number of updates, or a share of them if it is below 1."""
    value = values["warmup_steps"]
    return {"actor.optimizer.schedule.warmup": float(value) if float(value) < 1 else int(value)}


def _bias_correction(values: Values) -> dict[str, Any]:
    if values["use_bias_correction_kl"] and float(values["beta"]):
        raise Lost("the KL in the loss is not weighted by the importance ratio here")
    return {}


ROWS = (
    Row("model", "model.path", path),
    Row("model_name_or_path", "model.path", path),
    Row("train_dataset", "data.train", data_files),
    Row("dataset_name", "data.train", data_files),
    Row("eval_dataset", "data.eval", lambda names: data_files(names, "data.eval")),
    Row("output_dir", "output_dir", path),
    Row("run_name", "experiment", str),
    Row("seed", "seed", int),
    Row("bf16", "model.dtype", lambda on: "bf16" if on else "auto"),
    Row("fp16", "model.dtype", lambda on: "fp16" if on else "auto"),
    Row("gradient_checkpointing", "actor.recompute.granularity", lambda on: "full" if on else "off"),
    Row("learning_rate", "actor.optimizer.lr", float),
    Row("weight_decay", "actor.optimizer.weight_decay", float),
    Row("adam_beta1", "actor.optimizer.beta1", float),
    Row("adam_beta2", "actor.optimizer.beta2", float),
    Row("adam_epsilon", "actor.optimizer.eps", float),
    Row("max_grad_norm", "actor.optimizer.clip_grad", float),
    Row(
        "lr_scheduler_type",
        "actor.optimizer.schedule.name",
        choose({"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}),
    ),
    Row("warmup_ratio", "actor.optimizer.schedule.warmup", float),
    Row("router_aux_loss_coef", "actor.moe.aux_loss_coef", float),
    Row("num_generations", "rollout.sampling.n", int),
    Row("max_completion_length", "rollout.sampling.max_new_tokens", int),
    Row("max_prompt_length", "data.max_prompt_tokens", int),
    Row("temperature", "rollout.sampling.temperature", float),
    Row("top_p", "rollout.sampling.top_p", float),
    Row("top_k", "rollout.sampling.top_k", lambda count: int(count) or -1),
    Row("shuffle_dataset", "data.shuffle", bool),
    Row("vllm_mode", "rollout.placement", choose({"colocate": "colocated", "server": "disaggregated"})),
    Row("vllm_gpu_memory_utilization", "rollout.gpu_memory_utilization", float),
    Row("vllm_tensor_parallel_size", "rollout.layout.tp", int),
    Row("vllm_max_model_length", "rollout.max_model_len"),
    Row("vllm_enable_sleep_mode", "rollout.sleep_level", lambda on: 2 if on else 0),
    Row("num_iterations", "trainer.ppo_epochs", int),
    Row("mask_truncated_completions", "algorithm.mask_truncated", bool),
    Row("beta", "algorithm.kl.coef", float),
    Row("delta", "algorithm.dual_clip"),
    Row("scale_rewards", "algorithm.normalize_std", _scale),
    Row("entropy_coef", "algorithm.entropy_coef", float),
    Row("save_total_limit", "checkpoint.save_total_limit"),
    Row("resume_from_checkpoint", "checkpoint.resume", lambda value: {True: "auto", False: "never"}.get(value, value)),
    Row("report_to", "logging.trackers", _trackers),
)
JOINTS = (
    Joint((*_GENERATION, "num_generations"), _batches),
    Joint(("per_device_train_batch_size", "max_prompt_length", "max_completion_length"), _microbatch),
    Joint(("max_steps", "num_train_epochs", *_GENERATION), _num_steps),
    Joint(("num_train_epochs", "max_steps", *_GENERATION), _num_steps),
    Joint(("loss_type", "importance_sampling_level"), _policy_loss),
    Joint(("epsilon", "epsilon_high", "loss_type"), _clip),
    Joint(
        (
            "vllm_importance_sampling_correction",
            "use_vllm",
            *(f"vllm_importance_sampling_{name}" for name in ("mode", "clip_min", "clip_max")),
        ),
        _correction,
    ),
    Joint(("sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", *_GENERATION), _reference),
    Joint(("reward_funcs", "reward_weights"), _reward),
    Joint(("warmup_steps",), _warmup),
    Joint(("logging_steps", *_GENERATION), _step_lines),
    _every("save_strategy", "save_steps", "checkpoint.save_steps"),
    _every("eval_strategy", "eval_steps", "evaluate.every"),
    Joint(("use_vllm",), lambda values: {}),  # vLLM always samples here
    Joint(("use_bias_correction_kl", "beta"), _bias_correction),
    Joint(("peft_config",), _peft_config),
    Joint(("use_peft", *_PEFT_FLAGS), _peft_flags),
    Joint(("trust_remote_code",), _off("code of a model directory is never run")),
)
DEFAULTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
    "num_generations": 8,
    "num_iterations": 1,
    "max_prompt_length": 512,
    "max_completion_length": 512,
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "scale_rewards": "group",
    "beta": 0.0,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "seed": 42,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_gpu_memory_utilization": 0.3,
    "ref_model_mixup_alpha": 0.6,
    "ref_model_sync_steps": 512,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "eval_steps": 500,
}
_METRICS = "metrics of every step go to metrics.jsonl here, responses to rollouts/"
_PASSES = "trainer.max_tokens_per_microbatch limits forward passes here"
REASONS = {
    "args": "read as the configuration",
    "chat_template_kwargs": "the tokenizer's own template is used, without further arguments",
    **{
        f"dataloader_{name}": "every row is tokenised before the first step here"
        for name in ("num_workers", "pin_memory", "drop_last", "prefetch_factor", "persistent_workers")
    },
    "dataset_config": "name the files, or make them with `rlhf-mcore prepare-data`",
    "deepspeed": "models are trained by Megatron-core here; choose actor.layout",
    **dict.fromkeys(("fsdp", "fsdp_config"), "models are trained by Megatron-core here; choose actor.layout"),
    "generation_kwargs": "see the keys of rollout.sampling",
    "hub_model_id": "`rlhf-mcore push RUN_DIR ORG/NAME` uploads a run's model",
    "log_completions": _METRICS,
    "log_level": _METRICS,
    "logging_strategy": _METRICS,
    "min_p": "rollout.sampling has top_p and top_k",
    "model_init_kwargs": "see the keys of model",
    "off_policy_mask_threshold": "see algorithm.rollout_correction, which masks by ratio and by staleness",
    "optim": "actor.optimizer.name is adamw, muon or sgd",
    "per_device_eval_batch_size": "the engine chooses its batch sizes here",
    "processing_class": "the tokenizer comes from model.path; see model.tokenizer_path",
    "push_to_hub": "`rlhf-mcore push RUN_DIR ORG/NAME` uploads a run's model",
    "remove_unused_columns": "reward functions receive all columns here",
    "repetition_penalty": "rollout.sampling has top_p and top_k",
    "steps_per_generation": "only generation_batch_size counts if both are set",
    "tf32": "choose model.dtype",
    "top_entropy_quantile": "all sampled tokens are learned from here",
    "torch_compile": "models are trained by Megatron-core here",
    "use_liger_kernel": f"logits are always computed in chunks, see trainer.logit_chunk_tokens; {_PASSES}",
    **{
        f"vllm_{name}": "the run starts its own engines here; see rollout.placement=disaggregated"
        for name in ("server_host", "server_port", "server_base_url", "server_timeout", "group_port")
    },
}
TABLE = Table("TRL (GRPO)", ROWS, JOINTS, DEFAULTS, REASONS)
