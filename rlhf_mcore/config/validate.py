"""All checks that need more than one field, or a look at the files that the fields name. No process has started yet.

Every problem names the field, its value and the remedy, and all of them are reported at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from rlhf_mcore.config.algorithm_rules import algorithm_problems
from rlhf_mcore.config.checkpoint_rules import checkpoint_problems
from rlhf_mcore.config.data_files import data_problems, transform_problems
from rlhf_mcore.config.derive import (
    default_world_size,
    max_new_tokens,
    needs_critic,
    resolve,
    role_layouts,
)
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.layouts import MAX_WORLD, balance_problems, cut_problems, layout_problems, tensor_cut_problems
from rlhf_mcore.config.model_files import inspect_model
from rlhf_mcore.config.presets import PRESETS
from rlhf_mcore.config.reward_rules import any_needs_truth, rule_problems
from rlhf_mcore.config.run_kinds import RUN_KINDS, run_kind
from rlhf_mcore.config.schema import Config, LayoutConfig
from rlhf_mcore.config.supervised import example_problems, length_problems, step_problems
from rlhf_mcore.config.tokenizer_files import own_tokenizer_problems
from rlhf_mcore.config.user_functions import function_problems
from rlhf_mcore.types import ModelGeometry

__all__ = ["default_world_size", "resolve", "validate"]

TRAINED = ("actor", "critic")  # groups with an optimizer
WITH_LAYOUT = ("actor", "critic", "reward.model")
DTYPES = ("auto", "fp32", "bf16", "fp16")

CHOICES: dict[str, tuple[str | None, ...]] = {
    "model.dtype": DTYPES,
    "model.layer_spec": ("auto", "te", "local"),
    **{
        f"{role}.{key}": allowed
        for role in TRAINED
        for key, allowed in {
            "optimizer.schedule.name": ("constant", "linear", "cosine"),
            "recompute.granularity": ("off", "selective", "full"),
            "recompute.method": ("uniform", "block"),
        }.items()
    },
    "critic.dtype": (None, *DTYPES),
    "reward.model.dtype": (None, *DTYPES),
    "rollout.engine": ("vllm", "hf"),
    "bridge.method": ("planned", "gather"),
    "bridge.verify": ("off", "digest", "full"),
    "algorithm.preset": tuple(PRESETS),
    "algorithm.kind": tuple(RUN_KINDS),
    "algorithm.use_critic": ("auto", "true", "false"),
    "algorithm.kl.estimator": ("k1", "k2", "k3"),
    "algorithm.kl.placement": ("loss", "reward"),
    "algorithm.kl.controller.name": ("fixed", "adaptive", "linear"),
    "algorithm.rollout_correction.mode": ("off", "token", "sequence"),
    "algorithm.loss_aggregation": ("token", "sequence", "constant"),
    "reward.on_error": ("fail", "zero"),
    "data.overlong_prompts": ("error", "drop"),
    "data.apply_chat_template": ("auto", "true", "false"),
    "model.attention": ("auto", "eager", "sdpa", "flash_attention_2"),
    "checkpoint.changed_inputs": ("refuse", "warn"),
    "checkpoint.on_damaged": ("fallback", "error"),
    "checkpoint.on_failed_save": ("stop", "continue"),
    "logging.console": ("auto", "rich", "plain", "off"),
}


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers: from ``low`` to ``high``; an open end excludes the bound itself."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return math.isfinite(value) and above and below

    def __str__(self) -> str:
        words = f"greater than {self.low:g}" if self.open_low else f"at least {self.low:g}"
        if self.high < math.inf:
            words += f" and {'below' if self.open_high else 'at most'} {self.high:g}"
        return words


AT_LEAST_0 = Range(0)
AT_LEAST_1 = Range(1)
ABOVE_0 = Range(0, open_low=True)
BETA = Range(0, 1, open_high=True)
SHARE = Range(0, 1, open_low=True)
PARTS = Range(1, 4096)  # of a model: layers, heads and experts are fewer

RANGES: dict[str, Range] = {
    "seed": AT_LEAST_0,
    **{
        f"{role}.layout.{key}": allowed
        for role in WITH_LAYOUT
        for key, allowed in {
            "tp": PARTS,
            "pp": PARTS,
            "vpp": Range(2, 1024),
            "ep": PARTS,
            "etp": PARTS,
        }.items()
    },
    **{
        f"{role}.{key}": allowed
        for role in TRAINED
        for key, allowed in {
            "optimizer.lr": AT_LEAST_0,
            "optimizer.beta1": BETA,
            "optimizer.beta2": BETA,
            "optimizer.eps": ABOVE_0,
            "optimizer.weight_decay": AT_LEAST_0,
            "optimizer.clip_grad": AT_LEAST_0,
            "optimizer.schedule.warmup_updates": AT_LEAST_0,
            "optimizer.schedule.warmup_ratio": Range(0, 1),
            "optimizer.schedule.total_updates": AT_LEAST_1,
            "optimizer.schedule.min_lr": AT_LEAST_0,
            "optimizer.loss_scale.initial": AT_LEAST_1,
            "optimizer.loss_scale.minimum": ABOVE_0,
            "optimizer.loss_scale.growth_interval": AT_LEAST_1,
            "optimizer.loss_scale.hysteresis": AT_LEAST_1,
            "recompute.num_layers": AT_LEAST_1,
            "moe.aux_loss_coef": AT_LEAST_0,
        }.items()
    },
    "critic.value_clip": ABOVE_0,
    "critic.warmup_steps": AT_LEAST_0,
    "critic.minibatch_size": AT_LEAST_1,
    "critic.ppo_epochs": AT_LEAST_1,
    "reference.refresh_steps": AT_LEAST_0,
    "rollout.layout.tp": PARTS,
    "rollout.sampling.n": AT_LEAST_1,
    "rollout.sampling.temperature": ABOVE_0,  # a greedy rollout has nothing to learn from
    "rollout.sampling.top_p": SHARE,
    "rollout.sampling.max_new_tokens": AT_LEAST_1,
    "rollout.max_model_len": AT_LEAST_1,
    "rollout.max_num_seqs": AT_LEAST_1,
    "rollout.max_num_batched_tokens": AT_LEAST_1,
    "rollout.gpu_memory_utilization": SHARE,
    "rollout.kv_cache_gib": ABOVE_0,
    "bridge.bucket_bytes": AT_LEAST_1,
    "algorithm.gamma": Range(0, 1),
    "algorithm.lam": Range(0, 1),
    "algorithm.clip_low": Range(0, 1),
    "algorithm.clip_high": AT_LEAST_0,
    "algorithm.dual_clip": Range(1, open_low=True),
    "algorithm.kl.coef": AT_LEAST_0,
    "algorithm.kl.clip": ABOVE_0,
    "algorithm.kl.controller.target": ABOVE_0,
    "algorithm.kl.controller.gain": ABOVE_0,
    "algorithm.kl.controller.final": AT_LEAST_0,
    "algorithm.kl.controller.steps": AT_LEAST_1,
    "algorithm.entropy_coef": AT_LEAST_0,
    "algorithm.centering": AT_LEAST_0,
    "algorithm.constant_length": AT_LEAST_1,
    "algorithm.rollout_correction.cap": ABOVE_0,
    "algorithm.rollout_correction.mask_low": AT_LEAST_0,
    "algorithm.rollout_correction.mask_high": ABOVE_0,
    "algorithm.overlong.max_tokens": AT_LEAST_1,
    "algorithm.overlong.cache_tokens": AT_LEAST_1,
    "algorithm.overlong.penalty": AT_LEAST_0,
    "algorithm.dynamic_sampling.max_batches": AT_LEAST_1,
    "reward.workers": AT_LEAST_1,
    "reward.timeout_s": ABOVE_0,
    "reward.memory_gib": ABOVE_0,
    "data.max_prompt_tokens": AT_LEAST_1,
    "data.max_tokens": Range(2),  # a prompt and a response
    "data.max_row_bytes": AT_LEAST_1,
    "data.max_rows": AT_LEAST_1,
    "data.max_bytes": AT_LEAST_1,
    "trainer.num_steps": AT_LEAST_1,
    "trainer.prompts_per_step": AT_LEAST_1,
    "trainer.minibatch_size": AT_LEAST_1,
    "trainer.ppo_epochs": AT_LEAST_1,
    "trainer.max_tokens_per_microbatch": AT_LEAST_1,
    "trainer.world_size": Range(1, MAX_WORLD),
    "trainer.threads_per_rank": AT_LEAST_1,
    "trainer.max_restarts": AT_LEAST_0,
    "trainer.max_bad_updates": AT_LEAST_1,
    "trainer.collective_timeout_s": AT_LEAST_1,
    "trainer.watchdog_s": AT_LEAST_0,
    "checkpoint.save_steps": AT_LEAST_0,
    "checkpoint.save_epochs": AT_LEAST_0,
    "checkpoint.save_minutes": AT_LEAST_0,
    "checkpoint.save_total_limit": AT_LEAST_1,
    "checkpoint.keep_every": AT_LEAST_1,
    "checkpoint.full_every": AT_LEAST_1,
    "evaluate.every": AT_LEAST_0,
    "evaluate.max_prompts": AT_LEAST_1,
    "evaluate.samples": AT_LEAST_1,
    "evaluate.temperature": AT_LEAST_0,
    "evaluate.top_p": SHARE,
    "evaluate.prompts_per_batch": AT_LEAST_1,
    "evaluate.max_new_tokens": AT_LEAST_1,
    "logging.rollouts_every": AT_LEAST_0,
}


def validate(cfg: Config, world_size: int | None = None, *, check_files: bool = True) -> None:
    """Check a configuration for a world of ``world_size`` processes (None: ``default_world_size``).

    Without ``check_files``, for planning, a model is its ``config.json``: weights, tokenizer, prompts and functions may be absent.

    Raises:
        ConfigError: with every problem that was found.
    """
    out_of_range = list(_range_problems(cfg))
    problems = [*_choice_problems(cfg), *out_of_range, *_unsupported_problems(cfg)]
    problems += map(FileProblem, _path_problems(cfg))
    kind = run_kind(cfg)
    if kind.generates:
        problems += [*algorithm_problems(cfg), *_reward_problems(cfg), *_data_problems(cfg)]
    else:
        problems += example_problems(cfg)
    problems += checkpoint_problems(cfg)
    shape, model_problems = inspect_model(cfg.model.path, "model.path", kind.starting_heads)
    problems += [*model_problems, *map(FileProblem, own_tokenizer_problems(cfg.model))]
    # Layouts are checked only where they are in range: the checks divide by their numbers.
    problems += _role_problems(cfg, None if out_of_range else shape)
    if not out_of_range:
        problems += [*_world_problems(cfg, world_size), *_batch_problems(cfg), *_schedule_problems(cfg)]
        if shape is not None:
            problems += [*_cut_problems(cfg, shape), *_position_problems(cfg, shape)]
    if not check_files:
        problems = [problem for problem in problems if not isinstance(problem, FileProblem)]
    if problems:
        raise ConfigError.many(problems)


def _get(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _choice_problems(cfg: Config) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if run_kind(cfg).reads(key) and _get(cfg, key) not in allowed:
            yield f"{key}={_get(cfg, key)!r} is not a choice; choose one of: {', '.join(filter(None, allowed))}"


def _range_problems(cfg: Config) -> Iterator[str]:
    for key, allowed in RANGES.items():
        value = _get(cfg, key)
        if run_kind(cfg).reads(key) and value is not None and not allowed.holds(value):
            yield f"{key}={value} is out of range; it must be {allowed}"
    if not run_kind(cfg).generates:
        return
    for key in ("rollout.sampling.top_k", "evaluate.top_k"):
        top_k = _get(cfg, key)
        if top_k != -1 and top_k < 1:
            yield f"{key}={top_k} is out of range; it must be at least 1, or -1 for off"
    if cfg.evaluate.samples > 1 and cfg.evaluate.temperature == 0:
        yield (
            f"evaluate.samples={cfg.evaluate.samples} with evaluate.temperature=0.0 draws the same greedy response again and "
            "again; raise evaluate.temperature or set evaluate.samples=1"
        )


def _unsupported_problems(cfg: Config) -> Iterator[str]:
    for role in role_layouts(cfg):
        if role.layout.cp != 1:
            yield f"{role.name}.layout.cp={role.layout.cp} is not supported yet; set it to 1"
    if not run_kind(cfg).generates:
        return
    if cfg.rollout.placement == "disaggregated":
        yield "rollout.placement='disaggregated' is not supported yet; set it to colocated"
    elif cfg.rollout.placement != "colocated":
        yield f"rollout.placement={cfg.rollout.placement!r} is not a choice; choose one of: colocated"
    if cfg.bridge.method == "gather" and cfg.bridge.verify != "off":
        yield f"bridge.verify={cfg.bridge.verify!r} is of bridge.method=planned, found 'gather'; set bridge.verify=off"
    if cfg.model.attention in ("eager", "sdpa", "flash_attention_2") and cfg.rollout.engine != "hf":
        yield f"model.attention={cfg.model.attention} is of rollout.engine=hf, found {cfg.rollout.engine!r}; set it to auto"
    if cfg.model.attention == "flash_attention_2" and cfg.model.dtype == "fp32":
        yield "model.attention=flash_attention_2 has no fp32, found model.dtype=fp32; set model.dtype=bf16"
    if cfg.rollout.engine == "hf" and cfg.rollout.layout.tp > 1:
        yield f"rollout.layout.tp={cfg.rollout.layout.tp}: rollout.engine=hf is not sharded; set it to 1 or use vllm"


def _path_problems(cfg: Config) -> Iterator[str]:
    for key in ("project", "experiment"):
        value = _get(cfg, key)
        if value in ("", ".", "..") or "/" in value or "\0" in value:
            yield f"{key}={value!r} is the name of a directory of the run; use a name without slashes"
    folder = Path(cfg.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if exists(parent))
    if not isdir(existing):
        yield f"output_dir={cfg.output_dir}: {existing} is a file, not a directory; choose another output_dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"output_dir={cfg.output_dir}: {existing} is not writable; choose another output_dir"


def _reward_problems(cfg: Config) -> Iterator[str]:
    if not math.isfinite(cfg.reward.model.weight):
        yield f"reward.model.weight={cfg.reward.model.weight} is out of range; give a finite number"
    if cfg.reward.function is not None:
        yield from map(FileProblem, function_problems(cfg.reward.function, "reward.function"))
        return
    yield from rule_problems(cfg.reward)


def _data_problems(cfg: Config) -> Iterator[str]:
    if not cfg.data.train:
        yield "data.train=[] names no file; give a list of .parquet or .jsonl files"
    yield from _weight_problems(cfg)
    if cfg.evaluate.every > 0 and not cfg.data.eval:
        yield f"evaluate.every={cfg.evaluate.every} but data.eval=[]; name files in data.eval or set evaluate.every=0"
    yield from map(FileProblem, transform_problems(cfg.data))
    for key in ("data.train", "data.eval"):
        yield from map(FileProblem, data_problems(cfg.data, _get(cfg, key), key, needs_answer=needs_answer(cfg)))


def _weight_problems(cfg: Config) -> Iterator[str]:
    weights = cfg.data.weights
    if weights is None:
        return
    if len(weights) != len(cfg.data.train):
        yield (
            f"data.weights={weights} has {len(weights)} numbers for the {len(cfg.data.train)} files of data.train; "
            "give one for each, or null"
        )
    if any(not math.isfinite(weight) or weight <= 0 for weight in weights):
        yield f"data.weights={weights}: a share has to be a positive number; leave a file out of data.train instead"


def needs_answer(cfg: Config) -> bool:
    """Whether some grader compares a response with a ground truth from the data."""
    return cfg.reward.function is None and any_needs_truth(cfg.reward)


def _role_problems(cfg: Config, actor: ModelGeometry | None) -> Iterator[str]:
    """The models beside the actor, each against its layout."""
    if not run_kind(cfg).generates:
        return
    if cfg.reference.path is not None and cfg.algorithm.kl.coef:
        yield from _model_problems("reference.path", cfg.reference.path, ("lm",), "actor", cfg.actor.layout, actor)
    if needs_critic(cfg):
        key = "model.path" if cfg.critic.path is None else "critic.path"
        path = cfg.critic.path or cfg.model.path
        yield from _model_problems(key, path, ("lm", "token"), "critic", cfg.critic.layout, actor)
        shape, _ = inspect_model(path, key, ("lm", "token"))
        if shape is not None:
            yield from balance_problems("critic", cfg.critic.moe.aux_loss_coef, shape, key)
    if cfg.reward.model.path is not None:
        path, layout = cfg.reward.model.path, cfg.reward.model.layout
        yield from _model_problems("reward.model.path", path, ("sequence",), "reward.model", layout, actor)


def _model_problems(
    key: str, path: str, heads: tuple[str, ...], role: str, layout: LayoutConfig, actor: ModelGeometry | None
) -> Iterator[str]:
    shape, problems = inspect_model(path, key, heads)
    if key != "model.path":
        yield from problems
    if shape is None or actor is None:
        return
    if shape.vocab_size != actor.vocab_size:
        yield (
            f"{key}={path}: its vocab_size={shape.vocab_size} is not model.path's {actor.vocab_size}; "
            "choose a model with the same vocabulary"
        )
    yield from cut_problems(role, layout, shape, key)


def _world_problems(cfg: Config, world_size: int | None) -> Iterator[str]:
    world = world_size if world_size is not None else default_world_size(cfg)
    source = "the number of processes" if world_size is not None else "trainer.world_size"
    for role in role_layouts(cfg):
        yield from layout_problems(role, world, f"{source}={world}")
    if not run_kind(cfg).generates:
        return
    if cfg.actor.ranks is not None and (cfg.bridge.method == "gather" or cfg.bridge.verify == "full"):
        yield (
            f"actor.ranks={cfg.actor.ranks}: full tensors are gathered by all ranks (bridge.method={cfg.bridge.method}, "
            f"bridge.verify={cfg.bridge.verify}); use bridge.method=planned with verify off or digest, or set actor.ranks=null"
        )
    tp = cfg.rollout.layout.tp
    if world % tp:
        yield f"{source}={world} is not divisible by rollout.layout.tp={tp}; use a multiple of {tp} processes"


def _cut_problems(cfg: Config, shape: ModelGeometry) -> Iterator[str]:
    yield from cut_problems("actor", cfg.actor.layout, shape, "model.path")
    yield from balance_problems("actor", cfg.actor.moe.aux_loss_coef, shape, "model.path")
    if not run_kind(cfg).generates:
        return
    tp = cfg.rollout.layout.tp
    yield from tensor_cut_problems(shape, "rollout.layout.tp", tp, "model.path")
    if shape.num_experts and shape.expert_ffn_size % tp:
        yield (
            f"rollout.layout.tp={tp} does not divide the intermediate size {shape.expert_ffn_size} of an expert of model.path; "
            f"choose a divisor of {shape.expert_ffn_size}"
        )
    if shape.num_experts and cfg.rollout.engine == "hf":
        yield "rollout.engine=hf does not take the experts of model.path one by one; set it to vllm"
    if 0 < shape.num_experts < tp:
        yield f"rollout.layout.tp={tp} is more than the {shape.num_experts} experts of model.path; lower it"


def _schedule_problems(cfg: Config) -> Iterator[str]:
    for role in TRAINED:
        optimizer = _get(cfg, f"{role}.optimizer")
        lr, min_lr = optimizer.lr, optimizer.schedule.min_lr
        if run_kind(cfg).reads(f"{role}.optimizer") and min_lr > lr:
            yield f"{role}.optimizer.schedule.min_lr={min_lr:g} is above {role}.optimizer.lr={lr:g}; lower it"


def _batch_problems(cfg: Config) -> Iterator[str]:
    if not run_kind(cfg).generates:
        yield from step_problems(cfg)
        return
    trainer = cfg.trainer
    for key, size in {"trainer": trainer.minibatch_size, "critic": cfg.critic.minibatch_size}.items():
        if size is not None and trainer.prompts_per_step % size:
            yield (
                f"trainer.prompts_per_step={trainer.prompts_per_step} is not divisible by "
                f"{key}.minibatch_size={size}; choose a divisor"
            )
    yield from microbatch_problems(cfg)


def microbatch_problems(cfg: Config) -> Iterator[str]:
    """A sequence is never cut, so the longest one has to fit: of training, and of evaluation where a reward model reads it."""
    longest, what = cfg.data.max_prompt_tokens + cfg.rollout.sampling.max_new_tokens, "rollout.sampling"
    if cfg.reward.model.path is not None and max_new_tokens(cfg) > cfg.rollout.sampling.max_new_tokens:
        longest, what = cfg.data.max_prompt_tokens + max_new_tokens(cfg), "evaluate"
    if cfg.trainer.max_tokens_per_microbatch < longest:
        yield (
            f"trainer.max_tokens_per_microbatch={cfg.trainer.max_tokens_per_microbatch} is less than "
            f"data.max_prompt_tokens + {what}.max_new_tokens={longest}; raise it to {longest} or more"
        )


def _position_problems(cfg: Config, shape: ModelGeometry) -> Iterator[str]:
    if not run_kind(cfg).generates:
        yield from length_problems(cfg, shape)
        return
    longest = cfg.data.max_prompt_tokens + max_new_tokens(cfg)
    if longest > shape.max_positions:
        yield (
            f"{_sum(cfg)}={longest} exceeds max_position_embeddings={shape.max_positions} of model.path; "
            "lower data.max_prompt_tokens or the response length"
        )
    max_model_len = cfg.rollout.max_model_len
    if max_model_len is not None and max_model_len < longest:
        yield f"rollout.max_model_len={max_model_len} is less than {_sum(cfg)}={longest}; raise it or set it to null"
    if max_model_len is not None and max_model_len > shape.max_positions:
        yield (
            f"rollout.max_model_len={max_model_len} exceeds max_position_embeddings={shape.max_positions} of "
            "model.path; lower it or set it to null"
        )


def _sum(cfg: Config) -> str:
    evaluated = cfg.evaluate.max_new_tokens or 0
    new = "evaluate" if evaluated > cfg.rollout.sampling.max_new_tokens else "rollout.sampling"
    return f"data.max_prompt_tokens + {new}.max_new_tokens"
