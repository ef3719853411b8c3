"""The key tables of the documentation: every key that ``migrate`` converts, with our counterpart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_mcore_contrib.migrate import openrlhf, trl, verl
from rlhf_mcore_contrib.migrate.sources import OLD_NAMES
from rlhf_mcore_contrib.migrate.table import Table
from rlhf_mcore_contrib.migrate.verl_losses import ACTOR, ROLLOUT

_LORA = "`actor.lora`: `rank`, `alpha`, `targets`, `dropout`, `path`"
_BETAS = "`actor.optimizer.beta1`, `beta2`"
# First key of a joint -> our keys. "": the key needs none here.
_VERL = {
    verl.MODEL + "lora_rank": _LORA,
    ROLLOUT + "n": "`rollout.sampling.n`; 2 instead of 1 if responses to one prompt are compared",
    ACTOR + "clip_ratio": "`algorithm.clip_low`, `clip_high`",
    ACTOR
    + "policy_loss.loss_mode": "`algorithm.policy_loss`, `algorithm.covariance`. Tokens are chosen once per minibatch by the "
    "logprobs before the update; verl chooses per microbatch by current logprobs",
    verl.RECOMPUTE + "granularity": "`actor.recompute.granularity`: `full` for uniform, `block` for block",
    ACTOR
    + "loss_agg_mode": "`algorithm.loss_aggregation`: `token`, `sequence`, `constant`; `algorithm.constant_length`",
    ACTOR
    + "use_kl_loss": "`algorithm.kl`: `coef`, `estimator`, `placement`, `controller.target`. `kl`, `mse`, `low_var_kl` are `k1`, "
    "`k2`, `k3`. For verl's fixed bound of 10 on `k3` set `algorithm.kl.clip`",
    "algorithm.adv_estimator": "`algorithm.advantage`, `normalize_std`, `reward_weights`. With `gdpo` the last standard deviation is "
    "over responses, as in the paper; verl's is over tokens",
    "algorithm.rollout_correction.rollout_is": "`algorithm.rollout_correction.mode`, `cap`",
    "data.filter_overlong_prompts": "`data.overlong_prompts`: `drop`, `error`; prompts are never truncated",
    "trainer.nnodes": "`trainer.world_size`, or your own torchrun or SLURM",
    verl.MEGATRON + "sequence_parallel": "`actor.layout.sequence_parallel`, with `tp` of 2 or more",
    "critic.megatron.sequence_parallel": "`critic.layout.sequence_parallel`, with `tp` of 2 or more",
    "reward_model.megatron.sequence_parallel": "`reward.model.layout.sequence_parallel`, with `tp` of 2 or more",
    "critic.cliprange_value": "`critic.value_clip`",
    "reward_model.enable": "`reward.model.path`",
    "critic.optim.betas": "`critic.optimizer.beta1`, `beta2`",
    verl.OPTIM + "betas": _BETAS,
    verl.OPTIM + "lr_warmup_steps": "`actor.optimizer.schedule.warmup`: verl counts steps, we count updates",
    "critic.optim.lr_warmup_steps": "`critic.optimizer.schedule.warmup`: verl counts steps, we count updates",
    ACTOR + "use_dynamic_bsz": "`trainer.max_tokens_per_microbatch`: always in tokens",
    "trainer.total_epochs": "`trainer.num_steps`, `num_epochs`",
    "custom_reward_function.path": "`reward.function`: `path:name`",
    ROLLOUT + "val_kwargs.n": "`evaluate.samples`, `evaluate.temperature`",
    "trainer.default_local_dir": "`output_dir`, without the project and the experiment",
    **dict.fromkeys(
        (prefix + "enable" for prefix in verl.OVERLONG),
        "`algorithm.overlong`: `enabled`, `cache_tokens`, `penalty`, `max_tokens`",
    ),
    "algorithm.filter_groups.enable": "`algorithm.dynamic_sampling`: `enabled`, `max_batches`",
    "trainer.resume_mode": "`checkpoint.resume`",
}
_OPENRLHF = {
    "ds.lora.rank": _LORA,
    "algo.advantage.estimator": "`algorithm.advantage`; for `gae` also `critic.optimizer.lr` and `critic.value_clip`; `normalize_std`",
    "data.max_len": "`rollout.sampling.max_new_tokens`, `data.max_prompt_tokens`; `data.max_len` alone is halved",
    "train.batch_size": "`trainer.minibatch_size`: theirs counts responses, ours prompts",
    "actor.eps_clip": "`algorithm.clip_low`, `clip_high`",
    "actor.policy_loss_type": "`algorithm.policy_loss`: `ppo` is `ppo_clip` with `loss_aggregation: token`, `gspo` has `sequence`",
    "algo.kl.init_coef": "`algorithm.kl`: `coef`, `estimator`, `placement` (`reward` without `use_loss`), `controller.target`",
    "algo.advantage.is_correction_enable": "`algorithm.rollout_correction`: `mode`, `cap`, `mask_low`, `mask_high`",
    "actor.lr_scheduler": "`actor.optimizer.schedule.name`, `min_lr`",
    "actor.adam.betas": _BETAS,
    "reward.overlong_buffer_len": "`algorithm.overlong`",
    "eval.dataset": "`data.eval`, `evaluate.temperature`, `evaluate.samples`",
    "actor.num_nodes": "`trainer.world_size`, or your own torchrun or SLURM: all models and engines share the processes",
    "logger.wandb.key": "`logging.trackers`: `[tensorboard, wandb]`. The key is left out; use `wandb login`",
    "train.dynamic_batch_enable": "`trainer.max_tokens_per_microbatch`: always in tokens",
    "actor.optim": "",
    "reward.model_name_or_path": "`reward.model.path`",
}
_TRL = {
    "per_device_train_batch_size": "`trainer.prompts_per_step`, `minibatch_size` (prompts), `max_tokens_per_microbatch`",
    "max_steps": "`trainer.num_steps`: ours counts generations, theirs optimizer updates",
    "num_train_epochs": "`trainer.num_epochs`",
    "loss_type": "`algorithm.loss_aggregation`: `sequence`, `constant`, `token` for `grpo`, `dr_grpo`, `dapo`; `policy_loss`: "
    "`cispo`, or `gspo` for `importance_sampling_level: sequence`",
    "epsilon": "`algorithm.clip_low`, `clip_high`; with `cispo`, TRL's values bound the ratio itself",
    "vllm_importance_sampling_correction": "`algorithm.rollout_correction.mode`, `cap`, `mask_low`, `mask_high`",
    "sync_ref_model": "`reference.refresh_steps`, only with `ref_model_mixup_alpha=1`",
    "reward_funcs": "`reward.rules` for `accuracy_reward` (`math`) and `think_format_reward` (`regex`)",
    "warmup_steps": "`actor.optimizer.schedule.warmup`: below 1 a share, else updates",
    "logging_steps": "`logging.every`; `metrics.jsonl` contains every step",
    "save_strategy": "`checkpoint.save_steps`, `save_epochs`",
    "eval_strategy": "`evaluate.every`",
    "use_vllm": "",
    "use_bias_correction_kl": "",
    "peft_config": "`actor.lora`: `rank`, `alpha`, `dropout`, `targets`, `use_rslora`, `use_dora`, `init`",
    "use_peft": "`actor.lora`; without targets PEFT's `q_proj` and `v_proj`",
    "trust_remote_code": "",
}
# page -> table, our keys of its joints, prefix of a key on the page, other names of a key
PAGES: dict[str, tuple[Table, Mapping[str, str], str, Mapping[str, str]]] = {
    "verl": (verl.TABLE, _VERL, "", {}),
    "openrlhf": (openrlhf.TABLE, _OPENRLHF, "--", {new: old for old, new in OLD_NAMES.items()}),
    "trl": (trl.TABLE, _TRL, "", {}),
}


def key_rows(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a page: keys of the other trainer, its default, and our keys. Defaults equal to ours are not shown."""
    table, joints, prefix, others = PAGES[page]

    def name(key: str) -> str:
        older = f" [`{prefix}{others[key]}`]" if key in others else ""
        return f"`{prefix}{key}`{older}"

    def default(keys: tuple[str, ...]) -> str:
        return ", ".join(_value(table.defaults[key]) for key in keys if key in table.defaults)

    for row in table.rows:
        yield name(row.theirs), default((row.theirs,)), f"`{row.ours}`"
    for joint in table.joints:
        yield ", ".join(map(name, joint.theirs)), default(joint.theirs[:1]), joints[joint.theirs[0]] or "not needed"


def _value(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
