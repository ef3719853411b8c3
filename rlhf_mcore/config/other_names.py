"""Translate the keys of other trainers: their names here, and those that have no counterpart.

It is used if a key is unknown. The plug-in ``migrate`` knows more full names (``actor_rollout_ref.rollout.n``).
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import NamedTuple

from rlhf_mcore.config.keys import DESCRIPTIONS, KEYS, is_group, nearest, type_name
from rlhf_mcore.config.removed import REMOVED
from rlhf_mcore.plugins import find_plugins

# Key of ours: what verl, TRL, OpenRLHF, slime and NeMo-RL call it. A name with dots is looked up before its last part.
_NAMES = {
    "actor.optimizer.lr": "learning_rate lr actor_learning_rate actor_lr policy_lr base_lr peak_lr max_lr",
    "critic.optimizer.lr": "critic_learning_rate critic_lr value_lr",
    "actor.optimizer.name": "optim optimizer optimizer_name optim_type optimizer_type",
    "actor.optimizer.beta1": "adam_beta1 adam_betas betas",
    "actor.optimizer.beta2": "adam_beta2 adam_betas betas",
    "actor.optimizer.eps": "adam_epsilon adam_eps",
    "actor.optimizer.weight_decay": "l2 wd",
    "actor.optimizer.clip_grad": "max_grad_norm grad_clip max_norm gradient_clipping clip_grad_norm gradient_clip_val",
    "actor.optimizer.schedule.name": "lr_scheduler_type lr_scheduler lr_decay_style lr_schedule scheduler",
    "actor.optimizer.schedule.warmup_updates": "warmup_steps lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "actor.optimizer.schedule.warmup_ratio": "lr_warmup_ratio lr_warmup_steps_ratio lr_warmup_fraction",
    "actor.optimizer.schedule.total_updates": "lr_decay_iters lr_decay_steps",
    "actor.optimizer.schedule.min_lr": "lr_min min_learning_rate min_lr_ratio",
    "actor.layout.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size",
    "actor.layout.pp": "pipeline_model_parallel_size pipeline_parallel_size pp_size",
    "actor.layout.vpp": "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank",
    "actor.layout.cp": "context_parallel_size cp_size ring_attn_size ulysses_sequence_parallel_size",
    "actor.layout.ep": "expert_model_parallel_size expert_parallel_size ep_size",
    "actor.layout.etp": "expert_tensor_parallel_size",
    "actor.recompute.granularity": (
        "gradient_checkpointing enable_gradient_checkpointing activation_checkpointing recompute_granularity"
    ),
    "actor.recompute.method": "recompute_method",
    "actor.recompute.num_layers": "recompute_num_layers",
    "actor.moe.aux_loss_coef": "aux_loss_coef moe_aux_loss_coeff router_aux_loss_coef",
    "actor.offload": "param_offload optimizer_offload grad_offload cpu_offload adam_offload offload_optimizer",
    "actor.freeze": "freeze_layers frozen_layers freeze_params",
    "model.path": (
        "model_name_or_path model_name model_path model_id pretrain pretrained_model hf_checkpoint model base_model "
        "actor_model_name_or_path policy_model model.name model.id"
    ),
    "model.tokenizer_path": "tokenizer tokenizer_name tokenizer_name_or_path policy.tokenizer.name processing_class",
    "model.dtype": "bf16 fp16 precision torch_dtype param_dtype mixed_precision",
    "model.attention": "attn_implementation attn_impl use_flash_attn flash_attn flash_attention",
    "reference.path": "ref_model ref_load ref_model_path reference_model ref_model_name_or_path",
    "reference.refresh_steps": "ref_model_sync_steps sync_ref_model reference_update_freq",
    "critic.path": "critic_pretrain critic_model_path value_model critic_model",
    "critic.value_clip": "cliprange_value value_clip_range",
    "critic.warmup_steps": "critic_warmup freezing_actor_steps critic_warmup_steps",
    "trainer.num_epochs": (
        "num_train_epochs total_epochs num_epochs num_epoch max_num_epochs num_episodes epochs n_epochs max_train_epochs "
        "max_epochs"
    ),
    "trainer.num_steps": (
        "max_steps total_training_steps max_num_steps num_rollout train_steps num_training_steps total_steps "
        "max_train_steps num_iters train_iters num_train_steps"
    ),
    "trainer.prompts_per_step": (
        "train_batch_size rollout_batch_size num_prompts_per_step batch_size global_batch_size gen_batch_size "
        "generation_batch_size train_prompt_bsz bsz per_device_batch_size"
    ),
    "trainer.minibatch_size": (
        "ppo_mini_batch_size mini_batch_size train_global_batch_size num_mini_batches batch_size global_batch_size "
        "minibatch minibatch_size"
    ),
    "trainer.ppo_epochs": "num_iterations num_ppo_epochs max_epochs ppo_epochs",
    "trainer.max_tokens_per_microbatch": (
        "max_tokens_per_gpu ppo_max_token_len_per_gpu micro_train_batch_size micro_batch_size train_micro_batch_size "
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu per_device_train_batch_size use_dynamic_bsz "
        "use_dynamic_batch_size train_mb_tokens micro_batch_size_per_gpu per_gpu_batch_size"
    ),
    "trainer.forward_tokens": (
        "micro_rollout_batch_size log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu logprob_batch_size "
        "log_prob_max_token_len_per_gpu local_rollout_forward_batch_size"
    ),
    "trainer.packing": "packing_samples use_remove_padding sequence_packing remove_padding pack_sequences",
    "trainer.world_size": (
        "n_gpus_per_node gpus_per_node num_gpus num_gpus_per_node actor_num_gpus_per_node nproc_per_node num_processes "
        "nnodes num_nodes actor_num_nodes n_gpus"
    ),
    "trainer.max_staleness": (
        "max_trajectory_age_steps max_async_level async_training staleness max_policy_lag async_enable async_level"
    ),
    "actor.fp8": "fp8 use_fp8 fp8_cfg fp8_training megatron_cfg.fp8_cfg fp8_recipe fp8_format enable_fp8 train_fp8",
    "rollout.quantization": "vllm_cfg.precision generation.vllm_cfg.precision rollout_quantization",
    "rollout.engine": "use_vllm rollout.name generation.backend inference_engine rollout_backend inference_backend",
    "rollout.placement": "vllm_mode colocate colocate_all colocate_all_models hybrid_engine colocated.enabled",
    "rollout.num_engines": "vllm_num_engines num_engines",
    "rollout.layout.tp": (
        "vllm_tensor_parallel_size rollout.tensor_model_parallel_size vllm_cfg.tensor_parallel_size rollout.tp "
        "rollout_num_gpus_per_engine vllm.tensor_parallel_size generation.tensor_parallel_size rollout.tensor_parallel_size"
    ),
    "rollout.layout.pp": (
        "rollout.pipeline_model_parallel_size vllm_cfg.pipeline_parallel_size rollout.pp vllm.pipeline_parallel_size "
        "vllm_pipeline_parallel_size"
    ),
    "rollout.layout.dp": (
        "rollout.data_parallel_size vllm_cfg.data_parallel_size rollout.dp vllm.data_parallel_size vllm_data_parallel_size"
    ),
    "rollout.layout.ep": (
        "rollout.expert_parallel_size vllm_cfg.expert_parallel_size rollout.ep vllm.expert_parallel_size enable_expert_parallel"
    ),
    "rollout.sampling.n": (
        "num_generations n_samples_per_prompt num_generations_per_prompt n num_samples_per_prompt group_size "
        "rollouts_per_prompt num_samples num_return_sequences samples_per_prompt n_samples rollouts_per_example "
        "num_rollouts_per_prompt"
    ),
    "rollout.sampling.temperature": "rollout_temperature sampling_temperature",
    "rollout.sampling.top_p": "rollout_top_p",
    "rollout.sampling.top_k": "rollout_top_k",
    "rollout.sampling.max_new_tokens": (
        "max_response_length max_completion_length max_response_tokens response_length generate_max_len "
        "rollout_max_response_len max_completion_tokens max_gen_len max_gen_tokens max_output_tokens max_tokens "
        "sampling.max_tokens generation.max_new_tokens max_response_len max_generation_length completion_length"
    ),
    "rollout.max_model_len": "vllm_max_model_length vllm_max_model_len max_model_length context_length",
    "rollout.gpu_memory_utilization": (
        "vllm_gpu_memory_utilization sglang_mem_fraction_static mem_fraction_static gpu_mem_util"
    ),
    "rollout.sleep": "free_cache_engine enable_sleep vllm_enable_sleep enable_sleep_mode vllm_enable_sleep_mode",
    "rollout.prefix_caching": "enable_prefix_caching",
    "rollout.oversample": "over_sampling_batch_size",
    "algorithm.preset": "algo algorithm_name estimator rl_algorithm algorithm.name algorithm.type",
    "algorithm.advantage": "adv_estimator advantage_estimator use_leave_one_out_baseline",
    "algorithm.policy_loss": "importance_sampling_level loss_mode policy_loss_type loss_fn policy_loss.loss_mode",
    "algorithm.loss_aggregation": "loss_agg_mode loss_type token_level_loss loss_reduction",
    "algorithm.constant_length": "loss_scale_factor",
    "algorithm.normalize_std": "scale_rewards norm_adv_by_std_in_grpo normalize_rewards std_norm no_std_norm",
    "algorithm.whiten_advantages": "whiten_rewards normalize_advantages advantage_normalization whiten_adv",
    "algorithm.gamma": "discount discount_factor",
    "algorithm.lam": "lambd gae_lambda lambda lambda_gae",
    "algorithm.clip_low": (
        "epsilon eps_clip clip_ratio cliprange clip_range clip_ratio_low ratio_clip_min ratio_clip clip_eps ppo_clip "
        "epsilon_low"
    ),
    "algorithm.clip_high": (
        "epsilon eps_clip clip_ratio cliprange clip_range clip_ratio_high ratio_clip_max epsilon_high eps_clip_high "
        "eps_clip_low_high ratio_clip clip_eps ppo_clip"
    ),
    "algorithm.dual_clip": "clip_ratio_c ratio_clip_c eps_clip_c",
    "algorithm.entropy_coef": "entropy_coeff entropy_loss_coef entropy_bonus ent_coef entropy_weight",
    "algorithm.kl.coef": (
        "beta kl_coef kl_coeff init_kl_coef kl_loss_coef use_kl_loss reference_policy_kl_penalty kl_beta kl_penalty_coef "
        "kl_weight kl_ctrl.kl_coef use_kl"
    ),
    "algorithm.dpo.beta": "dpo_beta pref_beta orpo_lambda beta_dpo dpo.beta dpo.reference_policy_kl_penalty",
    "algorithm.dpo.loss": "dpo_loss dpo_loss_type pref_loss preference_loss dpo.loss_type",
    "algorithm.dpo.label_smoothing": "dpo_label_smoothing cdpo_epsilon",
    "algorithm.dpo.gamma": "simpo_gamma",
    "algorithm.dpo.nll_coef": "rpo_alpha nll_loss_coef sft_loss_weight pref_ftx dpo_ftx dpo.sft_loss_weight",
    "algorithm.kl.estimator": "kl_estimator kl_loss_type kl_type kl_penalty",
    "algorithm.kl.placement": "use_kl_in_reward kl_in_reward",
    "algorithm.kl.controller.target": "kl_target target_kl",
    "algorithm.kl.controller.gain": "kl_horizon horizon",
    "algorithm.rollout_correction.mode": (
        "vllm_importance_sampling_correction use_importance_sampling_correction use_tis rollout_is is_correction_enable"
    ),
    "algorithm.rollout_correction.cap": "vllm_importance_sampling_cap tis_imp_ratio_cap rollout_is_threshold tis_clip",
    "algorithm.mask_truncated": "mask_truncated_completions overlong_filtering",
    "algorithm.overlong.enabled": "overlong_buffer.enable",
    "algorithm.overlong.cache_tokens": "overlong_buffer_len overlong_buffer.len soft_punish_cache",
    "algorithm.overlong.penalty": "overlong_penalty_factor",
    "algorithm.dynamic_sampling.enabled": (
        "dynamic_filtering filter_groups use_dynamic_sampling dynamic_sampling_filter_path dynamic_filtering_enable "
        "filter_groups.enable"
    ),
    "algorithm.dynamic_sampling.max_batches": "max_num_gen_batches dynamic_sampling_max_gen_batches",
    "reward.function": (
        "reward_func reward_funcs reward_fn reward_function custom_rm_path custom_reward_function "
        "custom_reward_function.path reward_manager reward_function_path reward.fn reward.func reward.path"
    ),
    "reward.rules": "rm_type reward_type reward_rule grader graders verifier reward.name reward.type reward.rule",
    "reward.model.path": "reward_pretrain reward_model reward_model_path reward_model.path rm_path reward_model.model.path",
    "reward.remote.url": "remote_rm_url reward_url reward_server rm_url remote_rm",
    "reward.remote.batch_size": "reward.batch_size",
    "data.train": (
        "train_files prompt_data dataset train_dataset train_file dataset_name train_data prompt_dataset data_path "
        "train_data_path dataset_path datasets prompt_file"
    ),
    "data.eval": (
        "val_files eval_dataset test_files validation_files val_dataset eval_prompt_data test_data val_data eval_file "
        "eval_data validation_dataset data.val data.test data.validation val_file"
    ),
    "data.image_key": "image_column images_column images_key image_field images",
    "data.image_pixels": "max_pixels min_pixels image_max_pixels image_min_pixels image_resolution",
    "data.prompt_key": "input_key prompt_column question_key input_column prompt_field dataset_text_field",
    "data.answer_key": "label_key answer_column ground_truth_key label_column answer_field label",
    "data.max_prompt_tokens": (
        "max_prompt_length prompt_max_len max_prompt_len rollout_max_prompt_len max_input_seq_length max_input_length "
        "prompt_length max_input_tokens"
    ),
    "data.max_tokens": "max_length max_seq_length max_seq_len max_len max_total_sequence_length sequence_length seq_len",
    "data.overlong_prompts": "filter_overlong_prompts truncation",
    "data.apply_chat_template": "chat_template",
    "data.weights": "prompt_data_probs prompt_probs dataset_probs",
    "checkpoint.save_steps": "save_interval save_freq save_every save_period checkpoint_every",
    "checkpoint.save_total_limit": "max_ckpt_num keep_top_k max_actor_ckpt_to_keep max_ckpt max_num_ckpt keep_last",
    "checkpoint.resume": "resume_mode resume_from_checkpoint resume_from_path load_checkpoint load resume_from load_enable",
    "checkpoint.metric_for_best_model": "metric_name best_metric",
    "checkpoint.greater_is_better": "higher_is_better",
    "evaluate.every": (
        "eval_steps test_freq eval_interval eval_every val_period eval_freq evaluation_steps validation_freq "
        "eval.every evaluate.steps evaluate.interval val_check_interval"
    ),
    "evaluate.samples": "n_samples_per_eval_prompt val_kwargs.n eval_n evaluate.n eval.n",
    "evaluate.temperature": "val_kwargs.temperature eval_temperature",
    "evaluate.prompts_per_batch": "eval_batch_size per_device_eval_batch_size val_batch_size evaluate.batch_size eval.batch_size",
    "evaluate.max_prompts": "max_val_samples val_max_samples eval_samples",
    "logging.every": "logging_steps log_every log_interval logging_interval log_freq",
    "logging.trackers": "report_to logger use_wandb wandb wandb_enabled tensorboard_enabled use_tensorboard tracker loggers",
    "project": "project_name wandb_project wandb.project",
    "experiment": "experiment_name run_name exp_name wandb_name wandb_run_name wandb.name wandb.run_name",
    "output_dir": "save_path default_local_dir ckpt_path save checkpoint_dir log_dir save_dir logging_dir run_dir",
    "seed": "random_seed data_seed",
    "deterministic": "full_determinism full_determinism_enable",
    "environment.max_turns": "max_turns max_assistant_turns max_rollout_turns multi_turn",
    "environment.function": "agent_func_path env_name environment_name agent_loop",
}

_SHARDED = (
    "models are cut by Megatron-core (actor.layout), and optimizer state is always sharded over data-parallel ranks"
)
_LORA = "adapters are trained with actor.lora (rank, alpha, targets, ...)"
_QUANTISED = "quantised weights cannot be trained; choose model.dtype, and for engines rollout.quantization"
_DISTRIBUTION = (
    "responses are drawn by rollout.sampling.temperature, top_p and top_k alone, so that their probabilities are known"
)
_ENDS = "a response ends with the end-of-text tokens of model.path (generation_config.json) or at rollout.sampling.max_new_tokens"
_HUB = "a run uploads nothing; `rlhf-mcore push RUN_DIR ORG/NAME` uploads what it has made"
_BACKENDS = "engines are vLLM or Hugging Face's generate: rollout.engine"
_IMAGES = "models see images and no videos: the processor is the model's own, and data.image_pixels scales images"

# Name, or beginning of a name where it ends with *: why there is no such key.
_ABSENT = {
    "lora* qlora* peft* use_peft use_lora dora* adapter adapters adapter_* lora_rank": _LORA,
    "load_in_4bit load_in_8bit bnb_* quantization quantize quantization_config": _QUANTISED,
    "deepspeed zero_stage zero zero3* ds_config fsdp* fsdp2 use_fsdp strategy dtensor_cfg accelerate*": _SHARDED,
    "min_p repetition_penalty presence_penalty frequency_penalty length_penalty num_beams logit_bias": _DISTRIBUTION,
    "stop stop_strings stop_words stop_token stop_token_ids stop_sequences eos_token_id": _ENDS,
    "push_to_hub hub_model_id hub_* hf_repo": _HUB,
    "sglang* trtllm* tensorrt*": _BACKENDS,
    "vision* video* processor": _IMAGES,
    "trust_remote_code": "code that comes with a model or a data set is never run",
    "gradient_accumulation_steps grad_accum grad_accumulation_steps gradient_accumulation": (
        "it follows from trainer.minibatch_size (prompts of an update) and trainer.max_tokens_per_microbatch"
    ),
    "use_liger_kernel use_liger torch_compile use_torch_compile compile": (
        "the kernels are Megatron-core's and Transformer Engine's (model.layer_spec)"
    ),
    "val_before_train eval_on_start": "held-out prompts are always scored before and after training",
    "save_strategy eval_strategy evaluation_strategy": (
        "how often is in checkpoint.save_steps, save_epochs, save_minutes and in evaluate.every"
    ),
    "ref_model_mixup_alpha ema* ema_decay": "a reference is the actor's weights of reference.refresh_steps ago, not a mean",
    "reward_weights": "a weight stands with its rule: reward.rules=[{name: ..., weight: ...}]",
    "vf_coef value_loss_coef vf_loss_coef": "actor and critic have no layers in common; set critic.optimizer.lr",
    "kl_ctrl.type kl_ctrl": "set algorithm.kl.controller.name and algorithm.kl.coef",
    "gkd* distill*": "algorithm.preset=distillation learns from the model in teacher.path",
    "num_workers dataloader_num_workers num_proc": "data are read once, before training, into memory",
}

_VERL_GROUPS = ("actor_rollout_ref", "custom_reward_function", "ray_kwargs", "ray_init", "global_profiler")
_MIGRATE = "`rlhf-mcore migrate` carries a whole configuration of {} over"


class OtherName(NamedTuple):
    """Name another trainer's key here: ``keys`` of ours, or none with the ``reason``. ``trainer`` is its name if it is known."""

    keys: tuple[str, ...]
    reason: str = ""
    trainer: str = ""


def hint(key: str, *, holds_keys: bool = False) -> str:
    """Say of an unknown key which one was meant, or why there is none, or the keys of its group.

    ``holds_keys``: further keys are inside of it, so that a group may have been meant.
    """
    if was := REMOVED.get(key):
        return f"the key is gone, {was.value} holds; {was.instead}"
    if other := find_other_name(key):
        is_theirs = other.trainer and key.partition(".")[0] not in KEYS
        migrate = f"; {_MIGRATE.format(other.trainer)}" if is_theirs else ""
        return (_meant(other.keys) if other.keys else other.reason) + migrate
    if close := nearest(key, groups=holds_keys):
        return f"did you mean {close}?"
    last = key.rpartition(".")[2]
    if similar := difflib.get_close_matches(last, _single_names(), n=1, cutoff=0.8):
        return _meant(_keys_by_name()[similar[0]])
    group = key.rpartition(".")[0]
    while group and group not in KEYS:
        group = group.rpartition(".")[0]
    if group and not is_group(group):
        return f"{group} has no keys of its own; give it a value: {type_name(KEYS[group])}"
    return f"the keys {f'of {group}' if group else 'at the top'} are: {_inside(group)}"


def is_foreign_group(key: str) -> bool:
    """Tell whether a key is a group of another trainer. Each key in it has a place of its own here."""
    other = find_other_name(key)
    return not (other and other.reason) and nearest(key, groups=True) is None


def find_other_name(key: str) -> OtherName | None:
    """Look up a dotted key, or a command-line flag, of another trainer. The longest ending of it that is known decides."""
    name = key.lstrip("-").replace("-", "_").lower()
    if other := _find_full_name(name, rows=True):
        return other
    parts = name.split(".")
    trainer = "verl" if parts[0] in _VERL_GROUPS else ""
    for ending in (".".join(parts[first:]) for first in range(len(parts))):
        if ours := _keys_by_name().get(ending):
            return OtherName(tuple(_of_role(parts[0], one) for one in ours), trainer=trainer)
        if reason := _absent(ending):
            return OtherName((), reason)
    if reason := next(filter(None, map(_absent, parts)), ""):
        return OtherName((), reason)
    return _find_full_name(name, rows=False)


def _meant(keys: tuple[str, ...]) -> str:
    if len(keys) > 1:
        return f"did you mean {' or '.join(f'{key} ({_plain(key)})' for key in keys)}?"
    group = keys[0].rpartition(".")[0]
    besides = f" The keys of {group} are: {_inside(group)}" if group else ""
    return f"did you mean {keys[0]}?{besides}"


def _plain(key: str) -> str:
    description = DESCRIPTIONS[key]
    return (description.help or str(description.allowed)).replace("`", "")


def _inside(group: str) -> str:
    return ", ".join(key.rpartition(".")[2] for key in KEYS if key.rpartition(".")[0] == group)


@cache
def _keys_by_name() -> dict[str, tuple[str, ...]]:
    keys: dict[str, tuple[str, ...]] = {}
    for key, names in _NAMES.items():
        for name in names.split():
            keys[name] = (*keys.get(name, ()), key)
    return keys


def _single_names() -> list[str]:
    return [name for name in _keys_by_name() if "." not in name and len(name) > 3]


def _of_role(first: str, key: str) -> str:
    """Turn a key of the actor into the critic's where the critic's was meant."""
    own = re.sub(r"^(actor|trainer)\.", f"{first}.", key)
    return own if first == "critic" and own in KEYS else key


def _absent(name: str) -> str:
    for names, reason in _ABSENT.items():
        for pattern in names.split():
            if name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1])):
                return reason
    return ""


def _find_full_name(name: str, *, rows: bool) -> OtherName | None:
    """Ask plug-ins with tables of full names for a key of ours (``rows``), or for the reason why there is none."""
    for point in find_plugins("other_trainers").values():
        if other := point.load()(name, rows=rows):
            return other
    if not rows and name.partition(".")[0] in _VERL_GROUPS:
        return OtherName((), "it is a key of verl's", "verl")
    return None
