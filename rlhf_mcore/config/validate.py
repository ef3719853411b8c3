"""All checks that need more than one field, or a look at the files that the fields name. No process has started yet.

Every problem names the field, its value and the remedy, and all of them are reported at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mcore.config.algorithm_rules import algorithm_problems
from rlhf_mcore.config.checkpoint_rules import checkpoint_problems
from rlhf_mcore.config.data_files import data_problems
from rlhf_mcore.config.derive import balanced_stages, default_world_size, max_new_tokens, resolve
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.model_files import ModelShape, inspect_model, tokenizer_problems
from rlhf_mcore.config.schema import PRESETS, Config, LayoutConfig
from rlhf_mcore.config.tokenizer_files import token_problems, tokenizer_size
from rlhf_mcore.config.user_functions import function_problems

__all__ = ["default_world_size", "resolve", "validate"]

RULES = ("final_number", "boxed", "exact_match", "format")
RULES_WITHOUT_ANSWER = ("format",)

CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("auto", "fp32", "bf16", "fp16"),
    "model.layer_spec": ("auto", "te", "local"),
    "actor.optimizer.schedule.name": ("constant", "linear", "cosine"),
    "actor.recompute.granularity": ("off", "selective", "full"),
    "actor.recompute.method": ("uniform", "block"),
    "rollout.engine": ("vllm", "hf"),
    "bridge.method": ("planned", "gather"),
    "bridge.verify": ("off", "digest", "full"),
    "algorithm.preset": tuple(PRESETS),
    "algorithm.use_critic": ("auto", "true", "false"),
    "algorithm.kl.estimator": ("k1", "k2", "k3"),
    "algorithm.kl.placement": ("loss", "reward"),
    "algorithm.kl.controller.name": ("fixed", "adaptive", "linear"),
    "algorithm.rollout_correction.mode": ("off", "token", "sequence"),
    "algorithm.loss_aggregation": ("token", "sequence", "constant"),
    "data.overlong_prompts": ("error", "drop"),
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

RANGES: dict[str, Range] = {
    "seed": AT_LEAST_0,
    "actor.layout.tp": AT_LEAST_1,
    "actor.layout.pp": AT_LEAST_1,
    "actor.layout.vpp": Range(2),
    "actor.layout.ep": AT_LEAST_1,
    "actor.layout.etp": AT_LEAST_1,
    "actor.optimizer.lr": AT_LEAST_0,
    "actor.optimizer.beta1": BETA,
    "actor.optimizer.beta2": BETA,
    "actor.optimizer.eps": ABOVE_0,
    "actor.optimizer.weight_decay": AT_LEAST_0,
    "actor.optimizer.clip_grad": AT_LEAST_0,
    "actor.optimizer.schedule.warmup_updates": AT_LEAST_0,
    "actor.optimizer.schedule.total_updates": AT_LEAST_1,
    "actor.optimizer.schedule.min_lr": AT_LEAST_0,
    "actor.optimizer.loss_scale.initial": AT_LEAST_1,
    "actor.optimizer.loss_scale.minimum": ABOVE_0,
    "actor.optimizer.loss_scale.growth_interval": AT_LEAST_1,
    "actor.optimizer.loss_scale.hysteresis": AT_LEAST_1,
    "actor.recompute.num_layers": AT_LEAST_1,
    "actor.moe.aux_loss_coef": AT_LEAST_0,
    "rollout.layout.tp": AT_LEAST_1,
    "rollout.sampling.n": AT_LEAST_1,
    "rollout.sampling.temperature": ABOVE_0,  # a greedy rollout has nothing to learn from
    "rollout.sampling.top_p": SHARE,
    "rollout.sampling.max_new_tokens": AT_LEAST_1,
    "rollout.max_model_len": AT_LEAST_1,
    "rollout.max_num_seqs": AT_LEAST_1,
    "rollout.gpu_memory_utilization": SHARE,
    "rollout.kv_cache_gib": ABOVE_0,
    "bridge.bucket_bytes": AT_LEAST_1,
    "algorithm.gamma": Range(0, 1),
    "algorithm.lam": Range(0, 1),
    "algorithm.clip_low": Range(0, 1),
    "algorithm.clip_high": AT_LEAST_0,
    "algorithm.dual_clip": Range(1, open_low=True),
    "algorithm.kl.coef": AT_LEAST_0,
    "algorithm.kl.controller.target": ABOVE_0,
    "algorithm.kl.controller.gain": ABOVE_0,
    "algorithm.kl.controller.final": AT_LEAST_0,
    "algorithm.kl.controller.steps": AT_LEAST_1,
    "algorithm.entropy_coef": AT_LEAST_0,
    "algorithm.constant_length": AT_LEAST_1,
    "algorithm.rollout_correction.cap": ABOVE_0,
    "algorithm.rollout_correction.mask_low": AT_LEAST_0,
    "algorithm.rollout_correction.mask_high": ABOVE_0,
    "algorithm.overlong.max_tokens": AT_LEAST_1,
    "algorithm.overlong.cache_tokens": AT_LEAST_1,
    "algorithm.overlong.penalty": AT_LEAST_0,
    "algorithm.dynamic_sampling.max_batches": AT_LEAST_1,
    "data.max_prompt_tokens": AT_LEAST_1,
    "trainer.num_steps": AT_LEAST_1,
    "trainer.prompts_per_step": AT_LEAST_1,
    "trainer.minibatch_size": AT_LEAST_1,
    "trainer.ppo_epochs": AT_LEAST_1,
    "trainer.max_tokens_per_microbatch": AT_LEAST_1,
    "trainer.world_size": AT_LEAST_1,
    "trainer.threads_per_rank": AT_LEAST_1,
    "checkpoint.save_steps": AT_LEAST_0,
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


def validate(cfg: Config, world_size: int | None = None) -> None:
    """Check a configuration for a world of ``world_size`` processes (None: as many as ``default_world_size`` says).

    Raises:
        ConfigError: with every problem that was found.
    """
    out_of_range = list(_range_problems(cfg))
    problems = [*_choice_problems(cfg), *out_of_range, *_unsupported_problems(cfg)]
    problems += [*_path_problems(cfg), *algorithm_problems(cfg), *_reward_problems(cfg), *_data_problems(cfg)]
    problems += checkpoint_problems(cfg)
    shape, model_problems = inspect_model(cfg.model.path, "model.path")
    problems += [*model_problems, *_tokenizer_problems(cfg), *_reference_problems(cfg, shape)]
    if not out_of_range:  # what follows divides by these numbers
        problems += [*_world_problems(cfg, world_size), *_batch_problems(cfg)]
        if shape is not None:
            problems += [*_cut_problems(cfg, shape), *_position_problems(cfg, shape)]
    if problems:
        raise ConfigError.many(problems)


def _get(cfg: Config, key: str) -> Any:
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _choice_problems(cfg: Config) -> Iterator[str]:
    for key, allowed in CHOICES.items():
        if _get(cfg, key) not in allowed:
            yield f"{key}={_get(cfg, key)!r} is not a choice; choose one of: {', '.join(allowed)}"


def _range_problems(cfg: Config) -> Iterator[str]:
    for key, allowed in RANGES.items():
        value = _get(cfg, key)
        if value is not None and not allowed.holds(value):
            yield f"{key}={value} is out of range; it must be {allowed}"
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
    if cfg.actor.layout.cp != 1:
        yield f"actor.layout.cp={cfg.actor.layout.cp} is not supported yet; set it to 1"
    if cfg.rollout.placement == "disaggregated":
        yield "rollout.placement='disaggregated' is not supported yet; set it to colocated"
    elif cfg.rollout.placement != "colocated":
        yield f"rollout.placement={cfg.rollout.placement!r} is not a choice; choose one of: colocated"
    if cfg.bridge.method == "gather" and cfg.bridge.verify != "off":
        yield f"bridge.verify={cfg.bridge.verify!r} is of bridge.method=planned, found 'gather'; set bridge.verify=off"
    if cfg.rollout.engine == "hf" and cfg.rollout.layout.tp > 1:
        yield f"rollout.layout.tp={cfg.rollout.layout.tp}: rollout.engine=hf is not sharded; set it to 1 or use vllm"


def _path_problems(cfg: Config) -> Iterator[str]:
    for key in ("project", "experiment"):
        value = _get(cfg, key)
        if value in ("", ".", "..") or "/" in value or "\0" in value:
            yield f"{key}={value!r} is the name of a directory of the run; use a name without slashes"
    folder = Path(cfg.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        yield f"output_dir={cfg.output_dir}: {existing} is a file, not a directory; choose another output_dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"output_dir={cfg.output_dir}: {existing} is not writable; choose another output_dir"


def _reward_problems(cfg: Config) -> Iterator[str]:
    if cfg.reward.function is not None:
        yield from function_problems(cfg.reward.function, "reward.function")
        return
    if not cfg.reward.rules:
        yield f"reward.rules is empty and reward.function is null; name one of the rules: {', '.join(RULES)}"
    for index, rule in enumerate(cfg.reward.rules):
        if rule.name not in RULES:
            yield f"reward.rules[{index}].name={rule.name!r} is not a choice; choose one of: {', '.join(RULES)}"
        if not math.isfinite(rule.weight):
            yield f"reward.rules[{index}].weight={rule.weight} is out of range; give a finite number"


def _data_problems(cfg: Config) -> Iterator[str]:
    if not cfg.data.train:
        yield "data.train=[] names no file; give a list of .parquet or .jsonl files"
    if cfg.evaluate.every > 0 and not cfg.data.eval:
        yield f"evaluate.every={cfg.evaluate.every} but data.eval=[]; name files in data.eval or set evaluate.every=0"
    for key in ("data.train", "data.eval"):
        yield from data_problems(cfg.data, _get(cfg, key), key, needs_answer=needs_answer(cfg))


def needs_answer(cfg: Config) -> bool:
    """Whether some grader compares a response with a ground truth from the data."""
    graded_by_rule = cfg.reward.function is None
    return graded_by_rule and any(rule.name not in RULES_WITHOUT_ANSWER for rule in cfg.reward.rules)


def _tokenizer_problems(cfg: Config) -> Iterator[str]:
    path = cfg.model.tokenizer_path
    owner = cfg.model.path if path is None else path
    yield from token_problems(cfg.model.path, tokenizer_size(owner), "model.path", owner)
    if path is None:
        yield from tokenizer_problems(cfg.model.path, "model.path")
    elif not Path(path).is_dir():
        yield f"model.tokenizer_path={path} is not a directory; give the path of a directory with tokenizer files"
    else:
        yield from tokenizer_problems(path, "model.tokenizer_path")


def _reference_problems(cfg: Config, actor: ModelShape | None) -> Iterator[str]:
    path = cfg.reference.path
    if path is None or cfg.algorithm.kl.coef == 0:
        return
    shape, problems = inspect_model(path, "reference.path")
    yield from problems
    if shape is not None and actor is not None:
        if shape.vocab_size != actor.vocab_size:
            yield (
                f"reference.path={path}: its vocab_size={shape.vocab_size} is not model.path's {actor.vocab_size}; "
                "choose a reference with the same vocabulary"
            )
        yield from _actor_cut_problems(cfg, shape, "reference.path")


def _world_problems(cfg: Config, world_size: int | None) -> Iterator[str]:
    layout, tp = cfg.actor.layout, cfg.rollout.layout.tp
    if layout.vpp is not None and layout.pp == 1:
        yield f"actor.layout.vpp={layout.vpp} needs actor.layout.pp of at least 2, found 1; set actor.layout.vpp=null"
    if layout.sequence_parallel and layout.tp == 1:
        yield "actor.layout.sequence_parallel=True needs actor.layout.tp of at least 2, found 1; set it to false"
    world = world_size if world_size is not None else default_world_size(cfg)
    source = "the number of processes" if world_size is not None else "trainer.world_size"
    ranks = layout.tp * layout.pp * layout.cp
    if world % ranks:
        yield (
            f"{source}={world} is not divisible by actor.layout.tp*pp*cp={layout.tp}*{layout.pp}*{layout.cp}={ranks}; "
            f"use a multiple of {ranks} processes or change actor.layout"
        )
    if world % tp:
        yield f"{source}={world} is not divisible by rollout.layout.tp={tp}; use a multiple of {tp} processes"
    yield from _expert_grid_problems(cfg, world, source)


def _expert_grid_problems(cfg: Config, world: int, source: str) -> Iterator[str]:
    layout = cfg.actor.layout
    etp = layout.tp if layout.etp is None else layout.etp
    if layout.ep == 1 and etp != layout.tp:
        yield (
            f"actor.layout.etp={etp} is not actor.layout.tp={layout.tp}, which it has to be with actor.layout.ep=1; "
            "set actor.layout.etp=null or raise actor.layout.ep"
        )
    elif world % (layout.tp * layout.pp * layout.cp) == 0 and world // layout.pp % (etp * layout.ep):
        yield (
            f"actor.layout.ep*etp={layout.ep}*{etp}={layout.ep * etp} does not divide the {world // layout.pp} ranks of "
            f"a pipeline stage ({source}={world} over actor.layout.pp={layout.pp}); change actor.layout.ep or etp"
        )


def _cut_problems(cfg: Config, shape: ModelShape) -> Iterator[str]:
    yield from _actor_cut_problems(cfg, shape, "model.path")
    tp = cfg.rollout.layout.tp
    yield from _tensor_cut_problems(shape, "rollout.layout.tp", tp, "model.path")
    if shape.num_experts and shape.expert_size % tp:
        yield (
            f"rollout.layout.tp={tp} does not divide the intermediate size {shape.expert_size} of an expert of model.path; "
            f"choose a divisor of {shape.expert_size}"
        )
    if shape.num_experts and cfg.rollout.engine == "hf":
        yield "rollout.engine=hf does not take the experts of model.path one by one; set it to vllm"
    if 0 < shape.num_experts < tp:
        yield f"rollout.layout.tp={tp} is more than the {shape.num_experts} experts of model.path; lower it"


def _actor_cut_problems(cfg: Config, shape: ModelShape, model: str) -> Iterator[str]:
    layout = cfg.actor.layout
    yield from _tensor_cut_problems(shape, "actor.layout.tp", layout.tp, model)
    yield from _expert_cut_problems(cfg, shape, model)
    yield from _stage_problems(layout, shape.num_layers, model)


def _stage_problems(layout: LayoutConfig, num_layers: int, model: str) -> Iterator[str]:
    stages, sizes = layout.pp * (layout.vpp or 1), layout.layers_per_stage
    name = "actor.layout.pp" if layout.vpp is None else "actor.layout.pp*vpp"
    example = f"actor.layout.layers_per_stage={balanced_stages(num_layers, stages)}"
    if stages > num_layers:
        yield f"{name}={stages} is more than num_hidden_layers={num_layers} of {model}; lower it"
    elif sizes is None and num_layers % stages:
        yield (
            f"{name}={stages} does not divide num_hidden_layers={num_layers} of {model}; choose a divisor of {num_layers}, "
            f"or say how many layers each stage has: {example}"
        )
    elif sizes is not None and len(sizes) != stages:
        yield (
            f"actor.layout.layers_per_stage={sizes} has {len(sizes)} numbers for {name}={stages} stages; "
            f"give one for each, for example {example}"
        )
    elif sizes is not None and (min(sizes) < 1 or sum(sizes) != num_layers):
        yield (
            f"actor.layout.layers_per_stage={sizes} does not share out num_hidden_layers={num_layers} of {model}; "
            f"give positive numbers with this sum, for example {example}"
        )


def _expert_cut_problems(cfg: Config, shape: ModelShape, model: str) -> Iterator[str]:
    layout = cfg.actor.layout
    if shape.num_experts == 0:
        if layout.ep > 1:
            yield f"actor.layout.ep={layout.ep}, but {model} has no experts; set it to 1"
        if cfg.actor.moe.aux_loss_coef and model == "model.path":
            yield f"actor.moe.aux_loss_coef={cfg.actor.moe.aux_loss_coef:g}, but {model} has no experts; set it to 0"
        return
    if shape.num_experts % layout.ep:
        yield (
            f"actor.layout.ep={layout.ep} does not divide the {shape.num_experts} experts of {model}; "
            f"choose a divisor of {shape.num_experts}"
        )
    etp = layout.tp if layout.etp is None else layout.etp
    if shape.expert_size % etp:
        yield (
            f"actor.layout.etp={etp} does not divide the intermediate size {shape.expert_size} of an expert of {model}; "
            f"choose a divisor of {shape.expert_size}"
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        yield (
            f"actor.layout.sequence_parallel=False with actor.layout.tp={layout.tp}: mixture-of-experts models ({model}) "
            "train under tensor parallelism with sequence parallelism only; set it to true"
        )


def _tensor_cut_problems(shape: ModelShape, field: str, tp: int, model: str) -> Iterator[str]:
    sizes = {"num_attention_heads": shape.num_heads}
    if shape.has_dense_mlp:
        sizes["intermediate_size"] = shape.intermediate_size
    for name, size in sizes.items():
        if size % tp:
            yield f"{field}={tp} does not divide {name}={size} of {model}; choose a divisor of {size}"
    groups = shape.num_kv_heads
    if max(groups, tp) % min(groups, tp):
        yield (
            f"{field}={tp} neither divides nor is a multiple of num_key_value_heads={groups} of {model}; "
            f"choose a divisor or a multiple of {groups}"
        )


def _batch_problems(cfg: Config) -> Iterator[str]:
    trainer, sampling = cfg.trainer, cfg.rollout.sampling
    if trainer.minibatch_size is not None and trainer.prompts_per_step % trainer.minibatch_size:
        yield (
            f"trainer.prompts_per_step={trainer.prompts_per_step} is not divisible by "
            f"trainer.minibatch_size={trainer.minibatch_size}; choose a divisor"
        )
    lr, min_lr = cfg.actor.optimizer.lr, cfg.actor.optimizer.schedule.min_lr
    if min_lr > lr:
        yield f"actor.optimizer.schedule.min_lr={min_lr:g} is above actor.optimizer.lr={lr:g}; lower it"
    longest = cfg.data.max_prompt_tokens + sampling.max_new_tokens
    if trainer.max_tokens_per_microbatch < longest:
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} is less than "
            f"data.max_prompt_tokens + rollout.sampling.max_new_tokens={longest}; raise it to {longest} or more"
        )


def _position_problems(cfg: Config, shape: ModelShape) -> Iterator[str]:
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
