"""Read settings of other trainers: hydra overrides and YAML files with references (verl), command-line flags (OpenRLHF, TRL)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.grammar_parser import parse

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.settings import interpolated_texts, load_yaml
from rlhf_mcore.foreign import shorten
from rlhf_mcore_contrib.migrate.shell import named_unknowns

# ---------------------------------------------------------------------------------------------------------------- verl
ROOTS = (
    "actor_rollout_ref",
    "critic",
    "reward_model",
    "reward",
    "custom_reward_function",
    "algorithm",
    "data",
    "trainer",
    "global_profiler",
    "ray_kwargs",
    "ray_init",
    "transfer_queue",
)
_OVERRIDE = re.compile(rf"^\+{{0,2}}((?:{'|'.join(ROOTS)})(?:\.[\w-]+)+)=(.*)$", re.DOTALL)


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Read the overrides ``a.b=c`` among the words of a command line. Returns key -> value."""
    overrides = {}
    for word in words:
        match = _OVERRIDE.match(word)
        if match:
            overrides[match[1]] = replace_unknowns(_parse(match[2]))
    return overrides


def _parse(text: str) -> Any:
    try:
        value = load_yaml(text, "override")
    except ConfigError:
        return text
    return _number(value)


def replace_unknowns(value: Any) -> Any:
    """Replace unknown values (:func:`shell.named_unknowns`) in a value, including nested lists and dictionaries."""
    if isinstance(value, list):
        return [replace_unknowns(item) for item in value]
    if isinstance(value, dict):
        return {str(key): replace_unknowns(item) for key, item in value.items()}
    return named_unknowns(value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    """Convert a text such as 1e-6 to a number, because YAML 1.1 reads it as text."""
    try:
        return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value) else value
    except ValueError:
        return value


def read_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Read keys and values of a YAML file, and resolve references if possible.

    Raises:
        ConfigError: OmegaConf does not support a key or a value.
    """
    ours = {key: value for key, value in tree.items() if key in ROOTS}
    leaves = dict(_leaves(ours, ""))
    try:
        cfg = OmegaConf.create(ours)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = (str(error) or "nested too deep").splitlines()[0]
        raise ConfigError(f"verl itself cannot read the file ({shorten(reason, 200)}); correct it") from error
    resolvable = _resolvable(leaves)
    values = {key: _number(_resolve(cfg, key, value) if key in resolvable else value) for key, value in leaves.items()}
    return {key: value for key, value in values.items() if value not in (None, [], {})}


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", value


class _Interpolated(NamedTuple):
    """The resolvers and keys in a value as written in the file, including nested ones."""

    resolvers: set[str]
    references: list[str]


def _examine(value: Any) -> _Interpolated:
    """List the resolvers and keys in a value.

    Raises:
        ValueError: the value cannot be parsed, or the name of a key contains a reference.
    """
    interpolated = _Interpolated(set(), [])
    for text in interpolated_texts(value):
        try:
            pending: list[Any] = [parse(text)]
        except OmegaConfBaseException as error:
            raise ValueError(str(error)) from error
        while pending:
            node = pending.pop()
            if hasattr(node, "resolverName"):
                interpolated.resolvers.add(node.resolverName().getText())
            elif type(node).__name__ == "InterpolationNodeContext":
                key = node.getText()[2:-1].strip()
                if "${" in key:
                    raise ValueError(f"the key in ${{{key}}} must be written out")
                interpolated.references.append(key)
            pending.extend(getattr(node, "children", None) or [])
    return interpolated


def _resolvable(leaves: Mapping[str, Any]) -> set[str]:
    """Select the keys whose references do not lead to a resolver. These may be resolved.

    ``${oc.env:NAME}`` stays as written, because it belongs to the user's environment.
    """
    references: dict[str, list[str]] = {}
    calling: set[str] = set()
    for key, value in leaves.items():
        with suppress(ValueError, OmegaConfBaseException):
            if any(interpolated_texts(value)):
                interpolation = _examine(value)
                references[key] = interpolation.references
                calling |= {key} if interpolation.resolvers else set()
    while more := {
        key
        for key in references.keys() - calling
        if any(
            name.startswith(reference.lstrip(".")) or name.endswith(reference)
            for reference in references[key]
            for name in calling
        )
    }:
        calling |= more
    return references.keys() - calling


def _resolve(cfg: Any, key: str, value: Any) -> Any:
    if "${" not in str(value):
        return value
    try:
        resolved = OmegaConf.select(cfg, key)
    except (OmegaConfBaseException, RecursionError):
        return value
    return OmegaConf.to_container(resolved) if OmegaConf.is_config(resolved) else resolved


# ------------------------------------------------------------------------------------------------------------ OpenRLHF
# Plain flags (up to 0.9) -> current flags.
OLD_NAMES = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "save_path": "ckpt.output_dir",
    "ckpt_path": "ckpt.path",
    "save_steps": "ckpt.save_steps",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "eval_steps": "eval.steps",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "logging_steps": "logger.logging_steps",
    "use_tensorboard": "logger.tensorboard_dir",
    "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    **{
        f"{role}_num_{unit}": f"{role}.num_{unit}"
        for role in ("actor", "critic", "ref", "reward")
        for unit in ("nodes", "gpus_per_node")
    },
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "zero_stage": "ds.zero_stage",
    "adam_offload": "ds.adam_offload",
    "flash_attn": "ds.attn_implementation",
    "packing_samples": "ds.packing_samples",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "async_train": "train.async_enable",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "num_episodes": "train.num_episodes",
    "max_epochs": "train.max_epochs",
    "train_batch_size": "train.batch_size",
    "micro_train_batch_size": "train.micro_batch_size",
    "rollout_batch_size": "rollout.batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "prompt_max_len": "data.prompt_max_len",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "top_p": "rollout.top_p",
    "temperature": "rollout.temperature",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "max_norm": "actor.max_norm",
    "l2": "actor.adam.weight_decay",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps",
    "aux_loss_coef": "actor.aux_loss_coef",
    "entropy_loss_coef": "actor.entropy_coef",
    "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "use_kl_loss": "algo.kl.use_loss",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "kl_estimator": "algo.kl.estimator",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    # sft, rm
    "dataset": "data.dataset",
    "dataset_probs": "data.dataset_probs",
    "dataset_split": "data.dataset_split",
    "output_key": "data.output_key",
    "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key",
    "multiturn": "data.multiturn",
    "learning_rate": "adam.lr",
}
_PROGRAM = re.compile(r"openrlhf[./]cli[./](\w+)")


def command_of(words: Sequence[str]) -> str | None:
    """Return the OpenRLHF program that a command starts, for example "train_ppo_ray" for ``openrlhf.cli.train_ppo_ray``."""
    named = [word for word in words if _PROGRAM.search(word)]
    return _PROGRAM.findall(named[-1])[-1] if named else None


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """Read flags under their current names. A flag without a value is True."""
    starts = [place for place, word in enumerate(words) if _PROGRAM.search(word)]
    flags = _flags(words[starts[-1] + 1 if starts else 0 :])
    return {OLD_NAMES.get(name, name): value for name, value in flags.items()}


def _flags(words: Sequence[str]) -> dict[str, Any]:
    """Read ``--name value ...`` and ``--name=value``. A value is a single value, a list, or True if there is none."""
    given: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = [value] if equals else []
        elif name is not None:
            given[name].append(word)
    values = {name: [_flag_number(word) for word in texts] for name, texts in given.items()}
    return {name: replace_unknowns(texts[0] if len(texts) == 1 else texts or True) for name, texts in values.items()}


def _flag_number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


# ----------------------------------------------------------------------------------------------------------------- TRL
def starts_trl(words: Sequence[str]) -> bool:
    """Return whether a command is ``trl grpo`` or runs TRL's script of that name."""
    programs = [PurePosixPath(word).name for word in words]
    return ("trl", "grpo") in pairwise(programs) or "trl/scripts/grpo.py" in " ".join(words)


def read_trl_flags(words: Sequence[str]) -> dict[str, Any]:
    """Read the flags after the program. The texts true and false become booleans."""
    last = max(place for place, word in enumerate(words) if word == "grpo" or word.endswith("grpo.py"))
    booleans = {"true": True, "false": False}
    flags = _flags(words[last + 1 :])
    return {name: booleans.get(str(value).lower(), value) for name, value in flags.items()}
