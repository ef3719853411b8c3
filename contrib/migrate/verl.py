"""Key table for verl, with the keys of its ppo_trainer.yaml and ppo_megatron_trainer.yaml (0.7)."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from rlhf_mcore.config.choices import TRACKERS
from rlhf_mcore.config.engine_kinds import ENGINES
from rlhf_mcore_contrib.migrate.table import (
    Joint,
    Lost,
    Row,
    Table,
    Values,
    adapters,
    choose,
    divide,
    files,
    padded_length,
    pair,
    path,
    positive,
)
from rlhf_mcore_contrib.migrate.verl_losses import (
    ACTOR,
    COVARIANCE,
    ROLLOUT,
    advantage,
    aggregation,
    clip,
    correction,
    kl,
    policy_loss,
    samples,
)

MODEL = "actor_rollout_ref.model."
MEGATRON, OPTIM = ACTOR + "megatron.", ACTOR + "optim."
MEGATRON_OPTIMIZER = "override_optimizer_config."
RECOMPUTE = MEGATRON + "override_transformer_config.recompute_"


def sequence_parallel(theirs: str, ours: str) -> Joint:
    """Convert sequence parallelism. In verl it is on by default; here it needs at least two tensor-parallel ranks."""
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


def recompute(values: Values) -> dict[str, Any]:
    granularity = choose({None: "off", "selective": "selective", "full": "full"})(values[RECOMPUTE + "granularity"])
    method = choose({None: "full", "uniform": "full", "block": "block"})(values.get(RECOMPUTE + "method"))
    return {"actor.recompute.granularity": method if granularity == "full" else granularity}


def warmup(theirs: str, ours: str) -> Joint:
    """Convert a warmup in steps to updates. A step may make several updates."""

    def convert(values: Values) -> dict[str, Any]:
        steps = int(values.get(theirs + "lr_warmup_steps", -1))
        if steps < 0:
            return {ours + "schedule.warmup": float(values.get(theirs + "lr_warmup_steps_ratio") or 0)}
        per_step = int(values[ACTOR + "ppo_epochs"]) * divide(
            values["data.train_batch_size"],
            values[ACTOR + "ppo_mini_batch_size"],
            "data.train_batch_size over ppo_mini_batch_size",
        )
        return {ours + "schedule.warmup": steps * per_step}

    sizes = ("data.train_batch_size", ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_epochs")
    return Joint((theirs + "lr_warmup_steps", theirs + "lr_warmup_steps_ratio", *sizes), convert)


def microbatch(values: Values) -> dict[str, Any]:
    tp, cp = (int(values.get(MEGATRON + f"{kind}_parallel_size", 1)) for kind in ("tensor_model", "context"))
    longest = padded_length(int(values["data.max_prompt_length"]) + int(values["data.max_response_length"]), tp, cp)
    # verl counts the tokens of one context-parallel rank; we count the tokens of all these ranks.
    if values.get(ACTOR + "use_dynamic_bsz"):
        tokens = int(values[ACTOR + "ppo_max_token_len_per_gpu"]) * cp
    elif values.get(ACTOR + "ppo_micro_batch_size_per_gpu"):
        tokens = int(values[ACTOR + "ppo_micro_batch_size_per_gpu"]) * longest
    else:
        tokens = int(values[ACTOR + "ppo_max_token_len_per_gpu"]) * cp
    return {"trainer.max_tokens_per_microbatch": max(tokens, longest)}


def steps(values: Values) -> dict[str, Any]:
    total = values.get("trainer.total_training_steps")
    if total is None:
        return {"trainer.num_epochs": float(values["trainer.total_epochs"])}
    return {"trainer.num_steps": int(total)}


def reward(values: Values) -> dict[str, Any]:
    file = values["custom_reward_function.path"]
    return {} if file is None else {"reward.function": f"{file}:{values['custom_reward_function.name']}"}


def overlong_prompts(values: Values) -> dict[str, Any]:
    if not values["data.filter_overlong_prompts"] and values.get("data.truncation", "error") != "error":
        raise Lost("prompts are never truncated here; longer prompts are dropped", {"data.overlong_prompts": "drop"})
    return {"data.overlong_prompts": "drop" if values["data.filter_overlong_prompts"] else "error"}


def validation(values: Values) -> dict[str, Any]:
    samples, greedy = values.get(ROLLOUT + "val_kwargs.n", 1), not values.get(ROLLOUT + "val_kwargs.do_sample", False)
    temperature = 0.0 if greedy else float(values.get(ROLLOUT + "val_kwargs.temperature", 0))
    return {"evaluate.samples": 1 if temperature == 0 else int(samples), "evaluate.temperature": temperature}


def output(values: Values) -> dict[str, Any]:
    folder = PurePosixPath(str(values["trainer.default_local_dir"]))
    run = (str(values["trainer.project_name"]), str(values["trainer.experiment_name"]))
    if folder.parts[-2:] != run:
        raise Lost("runs are written to <output_dir>/<project>/<experiment>; set these three keys")
    return {"output_dir": str(folder.parent.parent)}


def logger(names: Any) -> list[str]:
    names = [names] if isinstance(names, str) else names
    trackers = [str(name) for name in names if name in TRACKERS]
    if foreign := sorted(set(map(str, names)) - {"console", "file", *TRACKERS}):
        reason = f"{', '.join(foreign)} is not supported; available trackers: {', '.join(TRACKERS)}"
        raise Lost(reason, {"logging.trackers": trackers})
    return trackers


OVERLONG = (
    "reward_model.overlong_buffer.",
    "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "reward.reward_kwargs.overlong_buffer_cfg.",
)


def overlong(prefix: str) -> Joint:
    """Convert DAPO's soft penalty for long responses. verl has moved these keys twice."""
    length = prefix.replace("overlong_buffer_cfg.", "max_resp_len")

    def convert(values: Values) -> dict[str, Any]:
        if not values[prefix + "enable"]:
            return {"algorithm.overlong.enabled": False}
        settings = {
            "algorithm.overlong.enabled": True,
            "algorithm.overlong.cache_tokens": int(values[prefix + "len"]),
            "algorithm.overlong.penalty": float(values.get(prefix + "penalty_factor", 1.0)),
        }
        if values.get(length) is not None:
            settings["algorithm.overlong.max_tokens"] = int(values[length])
        return settings

    names = [prefix + name for name in ("enable", "len", "penalty_factor")]
    return Joint((*names, length) if length != prefix else tuple(names), convert)


def filter_groups(values: Values) -> dict[str, Any]:
    settings: dict[str, Any] = {"algorithm.dynamic_sampling.enabled": bool(values["algorithm.filter_groups.enable"])}
    limit = int(values.get("algorithm.filter_groups.max_num_gen_batches", 0))
    # In verl, values up to 0 mean no limit.
    return {**settings, "algorithm.dynamic_sampling.max_batches": limit} if limit > 0 else settings


def resume(values: Values) -> dict[str, Any]:
    mode = values["trainer.resume_mode"]
    if mode == "resume_path":
        return {"checkpoint.resume": str(values.get("trainer.resume_from_path"))}
    return {"checkpoint.resume": choose({"auto": "auto", "disable": "never"})(mode)}


# --------------------------------------------------------------------------------------------------------------- table
def _layout_rows(theirs: str, ours: str) -> list[Row]:
    return [
        Row(theirs + "tensor_model_parallel_size", ours + "tp", int),
        Row(theirs + "pipeline_model_parallel_size", ours + "pp", int),
        Row(theirs + "virtual_pipeline_model_parallel_size", ours + "vpp"),
        Row(theirs + "context_parallel_size", ours + "cp", int),
        Row(theirs + "expert_model_parallel_size", ours + "ep", int),
        Row(theirs + "expert_tensor_parallel_size", ours + "etp"),
    ]


def _optimizer_rows(theirs: str, ours: str) -> list[Row]:
    styles = {name: name for name in ("constant", "linear", "cosine")}
    return [
        Row(theirs + "lr", ours + "lr", float),
        Row(theirs + "weight_decay", ours + "weight_decay", float),
        Row(theirs + "clip_grad", ours + "clip_grad", float),
        Row(theirs + "lr_decay_style", ours + "schedule.name", choose(styles)),
        Row(theirs + "lr_scheduler_type", ours + "schedule.name", choose(styles)),
        Row(theirs + "min_lr", ours + "schedule.min_lr", float),
        Row(theirs + MEGATRON_OPTIMIZER + "optimizer_offload_fraction", ours + "offload", float),
    ]


ROWS = (
    Row(MODEL + "path", "model.path", path),
    Row(MODEL + "use_remove_padding", "trainer.packing", bool),
    Row(MODEL + "enable_gradient_checkpointing", "actor.recompute.granularity", lambda on: "full" if on else "off"),
    *_layout_rows(MEGATRON, "actor.layout."),
    *_layout_rows("critic.megatron.", "critic.layout."),
    *_layout_rows("reward_model.megatron.", "reward.model.layout."),
    Row(MEGATRON + "dtype", "model.dtype", choose({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})),
    Row(RECOMPUTE + "num_layers", "actor.recompute.num_layers", lambda layers: int(layers or 1)),
    *_optimizer_rows(OPTIM, "actor.optimizer."),
    *_optimizer_rows("critic.optim.", "critic.optimizer."),
    Row(ACTOR + "grad_clip", "actor.optimizer.clip_grad", float),
    Row("critic.grad_clip", "critic.optimizer.clip_grad", float),
    Row("critic.model.path", "critic.path", path),
    Row(
        "critic.model.enable_gradient_checkpointing", "critic.recompute.granularity", lambda on: "full" if on else "off"
    ),
    Row("critic.ppo_mini_batch_size", "critic.minibatch_size", int),
    Row("critic.ppo_epochs", "critic.ppo_epochs", int),
    Row("trainer.critic_warmup", "critic.warmup_steps", int),
    Row(ACTOR + "megatron.param_offload", "actor.offload", lambda value: "always" if bool(value) else "auto"),
    Row(ACTOR + "ppo_mini_batch_size", "trainer.minibatch_size", int),
    Row(ACTOR + "ppo_epochs", "trainer.ppo_epochs", int),
    Row(ACTOR + "entropy_coeff", "algorithm.entropy_coef", float),
    Row(ROLLOUT + "name", "rollout.engine", choose({name: name for name in ENGINES})),
    Row(ROLLOUT + "tensor_model_parallel_size", "rollout.layout.tp", int),
    Row(ROLLOUT + "pipeline_model_parallel_size", "rollout.layout.pp", int),
    Row(ROLLOUT + "data_parallel_size", "rollout.layout.dp", int),
    Row(ROLLOUT + "expert_parallel_size", "rollout.layout.ep", int),
    Row(ROLLOUT + "temperature", "rollout.sampling.temperature", float),
    Row(ROLLOUT + "top_p", "rollout.sampling.top_p", float),
    Row(ROLLOUT + "top_k", "rollout.sampling.top_k", int),
    Row(ROLLOUT + "max_model_len", "rollout.max_model_len"),
    Row(ROLLOUT + "max_num_seqs", "rollout.max_num_seqs", int),
    Row(ROLLOUT + "max_num_batched_tokens", "rollout.max_num_batched_tokens", int),
    Row(ROLLOUT + "gpu_memory_utilization", "rollout.gpu_memory_utilization", float),
    Row(ROLLOUT + "enable_prefix_caching", "rollout.vllm", lambda on: {"enable_prefix_caching": bool(on)}),
    Row(ROLLOUT + "enforce_eager", "rollout.enforce_eager", bool),
    Row(ROLLOUT + "quantization", "rollout.quantization", choose({None: None, "fp8": "fp8"})),
    Row(ROLLOUT + "free_cache_engine", "rollout.sleep_level", lambda on: 2 if on else 0),
    Row(ROLLOUT + "val_kwargs.top_p", "evaluate.top_p", float),
    Row(ROLLOUT + "val_kwargs.top_k", "evaluate.top_k", int),
    Row("algorithm.gamma", "algorithm.gamma", float),
    Row("algorithm.lam", "algorithm.lam", float),
    Row("data.train_files", "data.train", files),
    Row("data.val_files", "data.eval", files),
    Row("data.prompt_key", "data.prompt_key", str),
    Row("data.image_key", "data.image_key", str),
    Row("data.max_prompt_length", "data.max_prompt_tokens", int),
    Row("data.max_response_length", "rollout.sampling.max_new_tokens", int),
    Row("data.train_batch_size", "trainer.prompts_per_step", int),
    Row("data.shuffle", "data.shuffle", bool),
    Row("data.seed", "seed", lambda seed: 0 if seed is None else int(seed)),
    Row("data.val_max_samples", "evaluate.max_prompts", lambda count: None if int(count) < 0 else int(count)),
    Row("trainer.project_name", "project", str),
    Row("trainer.experiment_name", "experiment", str),
    Row("trainer.save_freq", "checkpoint.save_steps", positive),
    Row("trainer.test_freq", "evaluate.every", positive),
    Row("trainer.max_actor_ckpt_to_keep", "checkpoint.save_total_limit"),
    Row("trainer.logger", "logging.trackers", logger),
    Row(ACTOR + "checkpoint.async_save", "checkpoint.async_save", bool),
)
JOINTS = (
    adapters(
        *(MODEL + key for key in ("lora_rank", "lora_alpha", "target_modules", "lora_dropout", "lora_adapter_path"))
    ),
    Joint(
        (
            *("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"),
            *("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights"),
        ),
        advantage,
    ),
    Joint((ROLLOUT + "n", "algorithm.adv_estimator"), samples),
    Joint((ACTOR + "clip_ratio", ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"), clip),
    Joint(
        (
            *(ACTOR + "policy_loss.loss_mode", ACTOR + "clip_ratio_c"),
            *(f"{ACTOR}policy_loss.{key}" for keys in COVARIANCE.values() for key in keys.values()),
        ),
        policy_loss,
    ),
    Joint((RECOMPUTE + "granularity", RECOMPUTE + "method"), recompute),
    Joint((ACTOR + "loss_agg_mode", ACTOR + "loss_scale_factor"), aggregation),
    Joint(
        (
            *(ACTOR + name for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")),
            *("algorithm." + name for name in ("use_kl_in_reward", "kl_penalty", "kl_ctrl.type")),
            *("algorithm.kl_ctrl." + name for name in ("kl_coef", "target_kl")),
        ),
        kl,
    ),
    Joint(
        ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"),
        correction,
    ),
    Joint(("data.filter_overlong_prompts", "data.truncation"), overlong_prompts),
    Joint(
        ("trainer.nnodes", "trainer.n_gpus_per_node"),
        lambda values: {"trainer.world_size": int(values["trainer.nnodes"]) * int(values["trainer.n_gpus_per_node"])},
    ),
    sequence_parallel(MEGATRON, "actor.layout.sequence_parallel"),
    sequence_parallel("critic.megatron.", "critic.layout.sequence_parallel"),
    sequence_parallel("reward_model.megatron.", "reward.model.layout.sequence_parallel"),
    Joint(("critic.cliprange_value", "algorithm.adv_estimator"), value_clip),
    Joint(("reward_model.enable", "reward_model.model.path"), reward_model),
    Joint(("critic.optim.betas",), pair("critic.optimizer.beta1", "critic.optimizer.beta2")),
    Joint((OPTIM + "betas",), pair("actor.optimizer.beta1", "actor.optimizer.beta2")),
    warmup(OPTIM, "actor.optimizer."),
    warmup("critic.optim.", "critic.optimizer."),
    Joint(
        (
            *(
                ACTOR + name
                for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
            ),
            "data.max_prompt_length",
            "data.max_response_length",
            MEGATRON + "tensor_model_parallel_size",
            MEGATRON + "context_parallel_size",
        ),
        microbatch,
    ),
    Joint(("trainer.total_epochs", "trainer.total_training_steps"), steps),
    Joint(("custom_reward_function.path", "custom_reward_function.name"), reward),
    Joint(tuple(ROLLOUT + "val_kwargs." + name for name in ("n", "do_sample", "temperature")), validation),
    Joint(("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"), output),
    *(overlong(prefix) for prefix in OVERLONG),
    Joint(("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"), filter_groups),
    Joint(("trainer.resume_mode", "trainer.resume_from_path"), resume),
)
DEFAULTS = {
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    ACTOR + "clip_ratio": 0.2,
    ACTOR + "use_dynamic_bsz": False,
    ACTOR + "use_kl_loss": False,
    ACTOR + "kl_loss_coef": 0.001,
    ACTOR + "kl_loss_type": "low_var_kl",
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "policy_loss.loss_mode": "vanilla",
    ACTOR + "policy_loss.kl_cov_ratio": 2e-4,
    ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    ACTOR + "policy_loss.clip_cov_ratio": 2e-4,
    ACTOR + "policy_loss.clip_cov_lb": 1.0,
    ACTOR + "policy_loss.clip_cov_ub": 5.0,
    ACTOR + "clip_ratio_c": 3.0,
    ACTOR + "ppo_mini_batch_size": 256,
    ACTOR + "ppo_epochs": 1,
    ACTOR + "ppo_max_token_len_per_gpu": 16384,
    OPTIM + "weight_decay": 0.01,
    OPTIM + "lr_warmup_steps": -1,
    "critic.optim.lr_warmup_steps": -1,
    MEGATRON + "sequence_parallel": True,
    "critic.megatron.sequence_parallel": True,
    "reward_model.megatron.sequence_parallel": True,
    "critic.optim.weight_decay": 0.01,
    "critic.cliprange_value": 0.5,
    "reward_model.enable": False,
    ROLLOUT + "n": 1,
    ROLLOUT + "val_kwargs.n": 1,
    ROLLOUT + "tensor_model_parallel_size": 2,
    "custom_reward_function.path": None,
    "custom_reward_function.name": "compute_score",
    "data.filter_overlong_prompts": False,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.total_epochs": 30,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.project_name": "verl_examples",
    "trainer.experiment_name": "gsm8k",
}
_ALWAYS = "always on here"
_PLACED = "the reference uses the actor's layout here"
_PASSES = "trainer.max_tokens_per_microbatch limits forward passes here"
_LOG_PROB = ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
REASONS = {
    "actor_rollout_ref.ref.megatron": _PLACED,
    "actor_rollout_ref.ref.fsdp_config": _PLACED,
    **{f"actor_rollout_ref.ref.log_prob_{name}": _PASSES for name in _LOG_PROB},
    **{f"{ROLLOUT}log_prob_{name}": _PASSES for name in _LOG_PROB},
    **{f"actor_rollout_ref.{part}.profiler": "see trainer.profile" for part in ("actor", "ref", "rollout")},
    "actor_rollout_ref.hybrid_engine": _ALWAYS,
    **dict.fromkeys((ACTOR + "strategy", ACTOR + "fsdp_config"), "Megatron-core trains here; choose actor.layout"),
    ACTOR + "ulysses_sequence_parallel_size": "actor.layout.sequence_parallel and cp split long sequences here",
    ACTOR + "ppo_micro_batch_size": "the number per GPU is read; this one is deprecated there",
    ROLLOUT + "multi_turn": "see environment; your class, or tools, answer the policy",
    ROLLOUT + "mode": "see rollout.placement",
    ROLLOUT + "load_format": "the bridge sends the weights to the engines here",
    **dict.fromkeys(
        (MODEL + "trust_remote_code", "data.trust_remote_code"), "code of a model directory is never run here"
    ),
    MODEL + "exclude_modules": "list the layers with adapters in actor.lora.targets",
    "algorithm.filter_groups.metric": "prompts whose responses all have the same score are replaced here",
    **{prefix + "log": "reward/overlong is among the metrics" for prefix in OVERLONG},
    "reward_model.reward_manager": "set reward.rules or reward.function",
    "reward_model.launch_reward_fn_async": "rewards are computed in the step here",
    "reward_model.rollout": "a reward model is a Megatron model here; set reward.model.layout",
    **dict.fromkeys(("reward_model", "reward"), "see the keys of reward"),
    "data.gen_batch_size": "every batch contains trainer.prompts_per_step prompts here",
    "data.val_batch_size": "the engine chooses its batch sizes here",
    "global_profiler": "see trainer.profile",
    **dict.fromkeys(("ray_kwargs", "ray_init"), "training does not run on Ray here"),
    ACTOR + "use_torch_compile": "Megatron-core's own kernels are used",
    **{
        theirs + MEGATRON_OPTIMIZER + name: f"see {ours}.optimizer.{key}"
        for theirs, ours in ((OPTIM, "actor"), ("critic.optim.", "critic"))
        for name, key in {
            "optimizer_cpu_offload": "offload",
            "overlap_cpu_optimizer_d2h_h2d": "offload",
            "use_precision_aware_optimizer": "state_dtype",
        }.items()
    },
    **dict.fromkeys((MEGATRON + "optimizer_offload", MEGATRON + "grad_offload"), "see actor.offload"),
    ROLLOUT + "enable_chunked_prefill": "the engine always splits prefills",
    ROLLOUT + "calculate_log_probs": _ALWAYS,
    "algorithm.kl_ctrl.horizon": "see algorithm.kl.controller.gain",
    "algorithm.rollout_correction": "see algorithm.rollout_correction",
    **dict.fromkeys(("critic.strategy", "critic.model.fsdp_config"), "Megatron-core trains here; choose critic.layout"),
    "critic.model.use_remove_padding": "trainer.packing applies to all models",
    **{
        f"critic.ppo_{name}": _PASSES
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
    },
    "critic.use_dynamic_bsz": _PASSES,
    "critic.forward_max_token_len_per_gpu": _PASSES,
    "reward_model.model.input_tokenizer": "a reward model uses the tokenizer of model.path here",
    "reward_model.micro_batch_size_per_gpu": _PASSES,
    "data.reward_fn_key": "the reward receives the column data_source here",
    **dict.fromkeys(("data.return_raw_chat", "trainer.balance_batch", "trainer.val_before_train"), _ALWAYS),
}
TABLE = Table("verl", ROWS, JOINTS, DEFAULTS, REASONS)
