"""Find the key that an unknown key means: a name of another trainer, a misspelt name, or a key in the wrong group."""

from __future__ import annotations

from functools import cache

from rlhf_mcore.config.former import BY_KEY
from rlhf_mcore.config.keys import DESCRIPTIONS, KEYS, is_group, nearest, type_name

# Our keys with their names in TRL, verl, OpenRLHF, slime and NeMo-RL. A name with dots wins over its last part.
SYNONYMS = {
    "actor.optimizer.lr": "learning_rate lr actor_learning_rate actor_lr",
    "critic.optimizer.lr": "critic_learning_rate critic_lr",
    "actor.optimizer.name": "optim optimizer",
    "actor.optimizer.clip_grad": "max_grad_norm grad_clip max_norm",
    "actor.optimizer.offload": "optimizer_cpu_offload optimizer_offload_fraction",
    "actor.optimizer.schedule.name": "lr_scheduler_type lr_scheduler lr_decay_style",
    "actor.optimizer.schedule.warmup": "warmup_steps lr_warmup_steps lr_warmup_iters lr_warmup_ratio lr_warmup_steps_ratio",
    "actor.layout.tp": "tensor_model_parallel_size tensor_parallel_size tp_size",
    "actor.layout.pp": "pipeline_model_parallel_size pp_size",
    "actor.layout.cp": "context_parallel_size cp_size ring_attn_size ulysses_sequence_parallel_size",
    "actor.layout.ep": "expert_model_parallel_size ep_size",
    "actor.recompute.granularity": "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing",
    "actor.offload": "param_offload optimizer_offload adam_offload cpu_offload",
    "model.path": "model_name_or_path model_name model.name pretrain hf_checkpoint actor_model_name_or_path model",
    "model.tokenizer_path": "tokenizer tokenizer_name_or_path policy.tokenizer.name processing_class",
    "model.dtype": "bf16 fp16 precision torch_dtype",
    "model.attention": "attn_implementation flash_attn",
    "reference.path": "ref_model ref_load ref_model_path",
    "trainer.num_epochs": "num_train_epochs total_epochs num_epochs max_num_epochs num_episodes epochs max_epochs",
    "trainer.num_steps": "max_steps total_training_steps max_num_steps num_rollout total_steps",
    "trainer.prompts_per_step": (
        "train_batch_size rollout_batch_size num_prompts_per_step gen_batch_size rollout.batch_size batch_size global_batch_size"
    ),
    "trainer.minibatch_size": "ppo_mini_batch_size mini_batch_size train_global_batch_size batch_size global_batch_size",
    "trainer.ppo_epochs": "num_iterations num_ppo_epochs",
    "trainer.max_tokens_per_microbatch": (
        "max_tokens_per_gpu ppo_max_token_len_per_gpu micro_train_batch_size micro_batch_size train_micro_batch_size "
        "ppo_micro_batch_size_per_gpu per_device_train_batch_size use_dynamic_bsz train_mb_tokens"
    ),
    "trainer.packing": "packing_samples use_remove_padding sequence_packing",
    "trainer.world_size": "n_gpus_per_node gpus_per_node num_gpus num_gpus_per_node nproc_per_node nnodes num_nodes",
    "trainer.max_staleness": "max_trajectory_age_steps async_training async_level",
    "rollout.engine": "use_vllm rollout.name generation.backend",
    "rollout.placement": "vllm_mode colocate colocate_all_models hybrid_engine colocated.enabled",
    "rollout.layout.tp": (
        "vllm_tensor_parallel_size vllm_cfg.tensor_parallel_size rollout.tensor_model_parallel_size rollout.tp "
        "rollout_num_gpus_per_engine"
    ),
    "rollout.sampling.n": "num_generations n_samples_per_prompt num_generations_per_prompt n group_size",
    "rollout.sampling.max_new_tokens": (
        "max_response_length max_completion_length generate_max_len rollout_max_response_len max_tokens response_length"
    ),
    "rollout.max_model_len": "vllm_max_model_length max_model_length",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization sglang_mem_fraction_static",
    "algorithm.advantage": "adv_estimator advantage_estimator",
    "algorithm.policy_loss": "importance_sampling_level loss_mode policy_loss_type",
    "algorithm.loss_aggregation": "loss_agg_mode loss_type token_level_loss",
    "algorithm.normalize_std": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards",
    "algorithm.lam": "gae_lambda lambd lambda",
    "algorithm.clip_low": "epsilon eps_clip clip_ratio clip_ratio_low ratio_clip_min cliprange",
    "algorithm.clip_high": "epsilon eps_clip clip_ratio clip_ratio_high ratio_clip_max cliprange epsilon_high eps_clip_high",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef",
    "algorithm.kl.coef": "beta kl_coef init_kl_coef kl_loss_coef use_kl_loss reference_policy_kl_penalty",
    "algorithm.dpo.beta": "dpo_beta dpo.beta dpo.reference_policy_kl_penalty",
    "algorithm.rollout_correction.mode": "vllm_importance_sampling_correction use_tis rollout_is",
    "algorithm.dynamic_sampling.enabled": "dynamic_filtering filter_groups use_dynamic_sampling filter_groups.enable",
    "reward.function": "reward_funcs reward_func reward_fn custom_rm_path custom_reward_function custom_reward_function.path",
    "reward.rules": "rm_type reward_type grader verifier",
    "reward.model.path": "reward_pretrain reward_model reward_model_path reward_model.path",
    "reward.remote.url": "remote_rm_url rm_url",
    "data.train": "train_files prompt_data dataset train_dataset dataset_name train_data_path data_path",
    "data.eval": "val_files eval_dataset validation_files eval_prompt_data val_data",
    "data.prompt_key": "input_key dataset_text_field",
    "data.answer_key": "label_key ground_truth_key",
    "data.max_prompt_tokens": "max_prompt_length prompt_max_len rollout_max_prompt_len max_input_seq_length",
    "data.max_tokens": "max_length max_seq_length max_len max_total_sequence_length",
    "checkpoint.save_steps": "save_interval save_freq save_period",
    "checkpoint.save_total_limit": "max_ckpt_num keep_top_k max_actor_ckpt_to_keep",
    "checkpoint.resume": "resume_mode resume_from_checkpoint resume_from_path load_checkpoint",
    "evaluate.every": "eval_steps test_freq eval_interval val_period",
    "evaluate.samples": "n_samples_per_eval_prompt val_kwargs.n",
    "logging.trackers": "report_to logger use_wandb wandb_enabled tensorboard_enabled",
    "project": "project_name wandb_project",
    "experiment": "experiment_name run_name wandb_run_name",
    "output_dir": "save_path default_local_dir ckpt_path checkpoint_dir log_dir",
}
# Keys of other trainers without a counterpart, by name or prefix (*), with advice.
ABSENT = {
    "lora* qlora* peft* use_peft use_lora adapter*": "adapters are trained with actor.lora (rank, alpha, targets, ...)",
    "load_in_4bit load_in_8bit bnb_*": "quantised weights cannot be trained; for engines set rollout.quantization",
    "deepspeed zero_stage ds_config fsdp* strategy": "set actor.layout; optimizer state is always sharded over data-parallel ranks",
    "min_p repetition_penalty presence_penalty frequency_penalty": "set temperature, top_p and top_k of rollout.sampling instead",
    "stop stop_strings stop_words stop_token_ids": "a response ends at the end-of-text tokens of model.path's generation_config.json",
    "push_to_hub hub_*": "`rlhf-mcore push RUN_DIR ORG/NAME` uploads a trained model",
    "sglang* trtllm*": "set rollout.engine to vllm or hf",
    "trust_remote_code": "code of a model or a data set is never run",
    "gradient_accumulation_steps": "it follows from trainer.minibatch_size and trainer.max_tokens_per_microbatch",
    "val_before_train eval_on_start": "held-out prompts are always scored before and after training",
}
VERL_GROUPS = ("actor_rollout_ref", "custom_reward_function", "ray_kwargs")


def hint(key: str, *, holds_keys: bool = False) -> str:
    """Return advice for an unknown key: the key that it means, a reason, or the keys of its group.

    ``holds_keys``: it contains keys, so it may mean a group.
    """
    if former := BY_KEY.get(key):
        return f"the key is gone: {former.instead}"
    if reason := absence(key):
        return reason
    if keys := synonyms(key):
        more = "; `rlhf-mcore migrate` converts a whole configuration of verl" if key.startswith(VERL_GROUPS) else ""
        return f"did you mean {' or '.join(map(_with_meaning, keys) if len(keys) > 1 else keys)}?{more}"
    if close := nearest(key, groups=holds_keys):
        return f"did you mean {close}?"
    group = key.rpartition(".")[0]
    while group and group not in KEYS:
        group = group.rpartition(".")[0]
    if group and not is_group(group):
        return f"{group} contains no keys; give it a value: {type_name(KEYS[group])}"
    inside = ", ".join(name.rpartition(".")[2] for name in KEYS if name.rpartition(".")[0] == group)
    return f"the keys {f'of {group}' if group else 'at the top'} are: {inside}"


def is_foreign_group(key: str) -> bool:
    """Return whether a group belongs to another trainer, so that each of its keys needs separate advice."""
    return key.startswith(VERL_GROUPS) or (not absence(key) and nearest(key, groups=True) is None)


def absence(key: str) -> str:
    """Return advice for a key without a counterpart, or "" if the key is not known."""
    parts = _plain(key).split(".")
    while len(parts) > 1 and parts[0] in KEYS:  # skip our groups around it
        parts = [".".join(parts[:2]), *parts[2:]] if ".".join(parts[:2]) in KEYS else parts[1:]
    for names, reason in ABSENT.items():
        for name in names.split():
            if any(part == name or (name.endswith("*") and part.startswith(name[:-1])) for part in parts):
                return reason
    return ""


def synonyms(key: str) -> tuple[str, ...]:
    """Return our keys for another trainer's key or command-line flag, by the longest known suffix of its name."""
    parts = _plain(key).split(".")
    for first in range(len(parts)):
        if keys := _by_name().get(".".join(parts[first:])):
            return tuple(map(_critics, keys)) if parts[0] == "critic" else keys
    return ()


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_").lower()


def _critics(key: str) -> str:
    """Return the critic's key for a key of the actor, if it has one."""
    own = f"critic.{key.partition('.')[2]}"
    return own if own in KEYS and key.startswith(("actor.", "trainer.")) else key


def _with_meaning(key: str) -> str:
    return f"{key} ({DESCRIPTIONS[key].help.replace('`', '')})"


@cache
def _by_name() -> dict[str, tuple[str, ...]]:
    keys: dict[str, tuple[str, ...]] = {}
    for key, names in SYNONYMS.items():
        for name in names.split():
            keys[name] = (*keys.get(name, ()), key)
    return keys
