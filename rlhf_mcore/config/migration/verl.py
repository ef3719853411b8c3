"""verl. Keys as in its ppo_trainer.yaml and ppo_megatron_trainer.yaml (0.7)."""

from __future__ import annotations

from rlhf_mcore.config.migration import verl_conversions as convert
from rlhf_mcore.config.migration.table import (
    Joint,
    Row,
    Table,
    choose,
    context_parallel,
    files,
    pair,
    path,
    positive,
)
from rlhf_mcore.config.migration.verl_conversions import ACTOR, MEGATRON, MODEL, OPTIM, OVERLONG, RECOMPUTE, ROLLOUT


def _layout_rows(theirs: str, ours: str) -> list[Row]:
    return [
        Row(theirs + "tensor_model_parallel_size", ours + "tp", int),
        Row(theirs + "pipeline_model_parallel_size", ours + "pp", int),
        Row(theirs + "virtual_pipeline_model_parallel_size", ours + "vpp"),
        Row(theirs + "context_parallel_size", ours + "cp", context_parallel),
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
    ]


ROWS = (
    Row(MODEL + "path", "model.path", path),
    Row(MODEL + "use_remove_padding", "trainer.packing", bool),
    Row(MODEL + "enable_gradient_checkpointing", "actor.recompute.granularity", lambda on: "full" if on else "off"),
    *_layout_rows(MEGATRON, "actor.layout."),
    *_layout_rows("critic.megatron.", "critic.layout."),
    *_layout_rows("reward_model.megatron.", "reward.model.layout."),
    Row(MEGATRON + "dtype", "model.dtype", choose({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})),
    Row(
        RECOMPUTE + "granularity",
        "actor.recompute.granularity",
        choose({None: "off", "selective": "selective", "full": "full"}),
    ),
    Row(
        RECOMPUTE + "method",
        "actor.recompute.method",
        choose({None: "uniform", "uniform": "uniform", "block": "block"}),
    ),
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
    Row(ACTOR + "ppo_mini_batch_size", "trainer.minibatch_size", int),
    Row(ACTOR + "ppo_epochs", "trainer.ppo_epochs", int),
    Row(ACTOR + "entropy_coeff", "algorithm.entropy_coef", float),
    Row(ROLLOUT + "name", "rollout.engine", choose({"vllm": "vllm", "hf": "hf"})),
    Row(ROLLOUT + "tensor_model_parallel_size", "rollout.layout.tp", int),
    Row(ROLLOUT + "temperature", "rollout.sampling.temperature", float),
    Row(ROLLOUT + "top_p", "rollout.sampling.top_p", float),
    Row(ROLLOUT + "top_k", "rollout.sampling.top_k", int),
    Row(ROLLOUT + "max_model_len", "rollout.max_model_len"),
    Row(ROLLOUT + "max_num_seqs", "rollout.max_num_seqs", int),
    Row(ROLLOUT + "max_num_batched_tokens", "rollout.max_num_batched_tokens", int),
    Row(ROLLOUT + "gpu_memory_utilization", "rollout.gpu_memory_utilization", float),
    Row(ROLLOUT + "enable_prefix_caching", "rollout.prefix_caching", bool),
    Row(ROLLOUT + "enforce_eager", "rollout.enforce_eager", bool),
    Row(ROLLOUT + "free_cache_engine", "rollout.sleep", bool),
    Row(ROLLOUT + "val_kwargs.top_p", "evaluate.top_p", float),
    Row(ROLLOUT + "val_kwargs.top_k", "evaluate.top_k", int),
    Row("algorithm.gamma", "algorithm.gamma", float),
    Row("algorithm.lam", "algorithm.lam", float),
    Row("data.train_files", "data.train", files),
    Row("data.val_files", "data.eval", files),
    Row("data.prompt_key", "data.prompt_key", str),
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
    Row("trainer.logger", "logging.tensorboard", convert.logger),
    Row(ACTOR + "checkpoint.async_save", "checkpoint.async_save", bool),
)
JOINTS = (
    Joint(("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"), convert.advantage),
    Joint((ROLLOUT + "n", "algorithm.adv_estimator"), convert.samples),
    Joint((ACTOR + "clip_ratio", ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"), convert.clip),
    Joint((ACTOR + "policy_loss.loss_mode", ACTOR + "clip_ratio_c"), convert.policy_loss),
    Joint((ACTOR + "loss_agg_mode", ACTOR + "loss_scale_factor"), convert.aggregation),
    Joint(
        (
            *(ACTOR + name for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")),
            *("algorithm." + name for name in ("use_kl_in_reward", "kl_penalty", "kl_ctrl.type")),
            *("algorithm.kl_ctrl." + name for name in ("kl_coef", "target_kl")),
        ),
        convert.kl,
    ),
    Joint(
        ("algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_is_threshold"),
        convert.correction,
    ),
    Joint(("data.filter_overlong_prompts", "data.truncation"), convert.overlong_prompts),
    Joint(("trainer.nnodes", "trainer.n_gpus_per_node"), convert.world),
    convert.sequence_parallel(MEGATRON, "actor.layout.sequence_parallel"),
    convert.sequence_parallel("critic.megatron.", "critic.layout.sequence_parallel"),
    convert.sequence_parallel("reward_model.megatron.", "reward.model.layout.sequence_parallel"),
    Joint(("critic.cliprange_value", "algorithm.adv_estimator"), convert.value_clip),
    Joint(("reward_model.enable", "reward_model.model.path"), convert.reward_model),
    Joint(("critic.optim.betas",), pair("critic.optimizer.beta1", "critic.optimizer.beta2")),
    Joint((OPTIM + "betas",), pair("actor.optimizer.beta1", "actor.optimizer.beta2")),
    convert.warmup(OPTIM, "actor.optimizer."),
    convert.warmup("critic.optim.", "critic.optimizer."),
    Joint(
        (
            *(
                ACTOR + name
                for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")
            ),
            "data.max_prompt_length",
            "data.max_response_length",
        ),
        convert.microbatch,
    ),
    Joint(("trainer.total_epochs", "trainer.total_training_steps"), convert.steps),
    Joint(("custom_reward_function.path", "custom_reward_function.name"), convert.reward),
    Joint(tuple(ROLLOUT + "val_kwargs." + name for name in ("n", "do_sample", "temperature")), convert.validation),
    Joint(("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name"), convert.output),
    *(convert.overlong(prefix) for prefix in OVERLONG),
    Joint(("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"), convert.filter_groups),
    Joint(("trainer.resume_mode", "trainer.resume_from_path"), convert.resume),
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
_ALWAYS = "always so here"
_PLACED = "the reference has the actor's layout here"
_PASSES = "forward passes are cut by trainer.max_tokens_per_microbatch here"
_LOG_PROB = ("micro_batch_size", "micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
REASONS = {
    "actor_rollout_ref.ref.megatron": _PLACED,
    "actor_rollout_ref.ref.fsdp_config": _PLACED,
    **{f"actor_rollout_ref.ref.log_prob_{name}": _PASSES for name in _LOG_PROB},
    **{f"{ROLLOUT}log_prob_{name}": _PASSES for name in _LOG_PROB},
    **{
        f"actor_rollout_ref.{part}.profiler": "profiling is not configured here" for part in ("actor", "ref", "rollout")
    },
    "actor_rollout_ref.hybrid_engine": _ALWAYS,
    ACTOR + "strategy": "models are trained by Megatron-core here; choose actor.layout",
    ACTOR + "fsdp_config": "models are trained by Megatron-core here; choose actor.layout",
    ACTOR + "ulysses_sequence_parallel_size": "long sequences are shared by actor.layout.sequence_parallel and cp here",
    ACTOR + "ppo_micro_batch_size": "the number per GPU is read; this one is deprecated there",
    ROLLOUT + "multi_turn": "conversations with tools are not supported",
    ROLLOUT + "mode": "the engine lives in the trainer's processes here",
    ROLLOUT + "load_format": "the bridge hands the weights over here",
    MODEL + "trust_remote_code": "code that comes with a model is never run here",
    MODEL + "lora_rank": "LoRA is not supported",
    "algorithm.filter_groups.metric": "prompts whose responses all have the same score are replaced here",
    **{prefix + "log": "reward/overlong is among the metrics" for prefix in OVERLONG},
    "reward_model.reward_manager": "set reward.rules or reward.function",
    "reward_model.launch_reward_fn_async": "rewards are computed in the step here",
    "reward_model.rollout": "a reward model is a Megatron model here; set reward.model.layout",
    "reward_model": "see the keys of reward",
    "reward": "see the keys of reward",
    "data.gen_batch_size": "every batch of prompts has trainer.prompts_per_step here",
    "data.val_batch_size": "see evaluate.prompts_per_batch",
    "data.image_key": "text models only",
    "data.trust_remote_code": "code that comes with a model is never run here",
    "global_profiler": "profiling is not configured here",
    "ray_kwargs": "training does not run on Ray here",
    "ray_init": "training does not run on Ray here",
    ACTOR + "use_torch_compile": "Megatron-core's own kernels are used",
    ACTOR
    + "megatron.param_offload": "parameters stay on the device here; the optimizer is sharded over data-parallel ranks",
    ACTOR + "megatron.optimizer_offload": "the optimizer is sharded over data-parallel ranks here",
    ACTOR + "megatron.grad_offload": "gradients stay on the device here",
    ROLLOUT + "enable_chunked_prefill": "the engine always cuts prefills",
    ROLLOUT + "calculate_log_probs": _ALWAYS,
    "algorithm.kl_ctrl.horizon": "see algorithm.kl.controller.gain",
    "algorithm.rollout_correction": "see algorithm.rollout_correction",
    "critic.strategy": "models are trained by Megatron-core here; choose critic.layout",
    "critic.model.fsdp_config": "models are trained by Megatron-core here; choose critic.layout",
    "critic.model.use_remove_padding": "trainer.packing is for all models",
    **{
        f"critic.ppo_{name}": _PASSES
        for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu")
    },
    "critic.use_dynamic_bsz": _PASSES,
    "critic.forward_max_token_len_per_gpu": _PASSES,
    "reward_model.model.input_tokenizer": "a reward model has the tokenizer of model.path here",
    "reward_model.micro_batch_size_per_gpu": _PASSES,
    "data.reward_fn_key": "the column data_source goes to the reward here",
    "data.return_raw_chat": _ALWAYS,
    "trainer.balance_batch": _ALWAYS,
    "trainer.val_before_train": _ALWAYS,
}
TABLE = Table("verl", ROWS, JOINTS, DEFAULTS, REASONS)
