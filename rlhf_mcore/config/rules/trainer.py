"""Rules for ``trainer``, learning-rate schedules and lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.errors import join_first
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.questions import (
    in_fp8,
    longest_example,
    longest_response,
    max_new_tokens,
    padded_to,
    role_layouts,
)
from rlhf_mcore.config.resolve import num_steps
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ModelGeometry


def schedule_problems(cfg: Config) -> Iterator[str]:
    """List problems with learning rates and profiled steps."""
    for role in ("actor", "critic"):
        optimizer = value_of(cfg, f"{role}.optimizer")
        lr, min_lr = optimizer.lr, optimizer.schedule.min_lr
        if run_kind(cfg).reads(f"{role}.optimizer") and min_lr > lr:
            yield f"{role}.optimizer.schedule.min_lr={min_lr:g} is above {role}.optimizer.lr={lr:g}; lower it"
        if run_kind(cfg).reads(f"{role}.optimizer") and optimizer.state_dtype == "bf16":
            yield from _state_problems(cfg, role)
    last = num_steps(cfg)
    if beyond := [step for step in cfg.trainer.profile.steps if not 1 <= step <= last]:
        steps = join_first(beyond, separator=", ")
        yield f"trainer.profile.steps: {steps} is not a step of the run; choose steps from 1 to trainer.num_steps={last}"


def _state_problems(cfg: Config, role: str) -> Iterator[str]:
    """List settings that bf16 optimizer state does not support."""
    shown, offload = f"{role}.optimizer.state_dtype=bf16", value_of(cfg, f"{role}.optimizer.offload")
    dtype = (cfg.critic.dtype if role == "critic" else None) or cfg.model.dtype
    if dtype not in ("auto", "bf16"):
        yield f"{shown} needs weights in bf16, but their dtype is {dtype}; set it to fp32"
    if offload:
        yield f"{shown} is not supported with {role}.optimizer.offload={offload:g}, which keeps fp32 state; set one to its default"


def batch_problems(cfg: Config) -> Iterator[str]:
    """Check that a step can be divided into minibatches and microbatches."""
    trainer = cfg.trainer
    if (trainer.forward_tokens or math.inf) < (most := trainer.max_tokens_per_microbatch):
        less = f"trainer.forward_tokens={trainer.forward_tokens} is less than trainer.max_tokens_per_microbatch={most}"
        yield f"{less}, but a pass without gradients needs less memory; raise it or set it to null"
    for key, size in {"trainer": trainer.minibatch_size, "critic": cfg.critic.minibatch_size}.items():
        if size is not None and trainer.prompts_per_step % size:
            prompts = f"trainer.prompts_per_step={trainer.prompts_per_step}"
            yield f"{prompts} is not divisible by {key}.minibatch_size={size}; choose a divisor"
    yield from microbatch_problems(cfg)


def microbatch_problems(cfg: Config) -> Iterator[str]:
    """Check that the longest sequence fits into a microbatch, including evaluation if a reward model scores it."""
    longest, what = cfg.data.max_prompt_tokens + longest_response(cfg), _response_key(cfg)
    if cfg.reward.model.path is not None and max_new_tokens(cfg) > longest_response(cfg):
        longest, what = cfg.data.max_prompt_tokens + max_new_tokens(cfg), "evaluate.max_new_tokens"
    reasons = {}
    for role in role_layouts(cfg):
        group, size = value_of(cfg, role.name), padded_to(role.layout, in_fp8(value_of(cfg, role.name)))
        if role.layout.cp > 1:
            reasons[size] = "context parallelism"
        elif (group.megatron or {}).get("tp_comm_overlap") is True:
            reasons[size] = f"{role.name}.megatron.tp_comm_overlap"
        elif in_fp8(group):
            reasons[size] = f"FP8 products of {role.name}"
    needed, why = max([(-(-longest // size) * size, why) for size, why in reasons.items()], default=(longest, ""))
    if (most := cfg.trainer.max_tokens_per_microbatch) < needed:
        padded = "" if needed == longest else f", padded for {why} to {needed}"
        sum_ = f"data.max_prompt_tokens + {what}={longest}{padded}"
        yield f"trainer.max_tokens_per_microbatch={most} is less than {sum_}; raise it to {needed} or more"


def position_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that the model supports the length of the longest prompt and response."""
    if geometry is None:
        return
    longest, most = cfg.data.max_prompt_tokens + max_new_tokens(cfg), geometry.max_positions
    limit = f"max_position_embeddings={most} of model.path"
    evaluated = (cfg.evaluate.max_new_tokens or 0) > longest_response(cfg)
    keys = ("data.max_prompt_tokens", "evaluate.max_new_tokens" if evaluated else _response_key(cfg))
    if longest > most:
        yield f"{' + '.join(keys)}={longest} exceeds {limit}; lower {' or '.join(keys)}"
    if (own := cfg.rollout.max_model_len) is not None and own < longest:
        yield f"rollout.max_model_len={own} is less than {' + '.join(keys)}={longest}; raise it or set it to null"
    if own is not None and own > most:
        yield f"rollout.max_model_len={own} exceeds {limit}; lower it or set it to null"


def _response_key(cfg: Config) -> str:
    """Return the key that limits the tokens of a training row after its prompt."""
    has_own = cfg.environment.function is not None and cfg.environment.max_tokens is not None
    return "environment.max_tokens" if has_own else "rollout.sampling.max_new_tokens"


def example_batch_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that a step is one update, and that an example fits into a microbatch and the model's positions."""
    trainer, rows, named = cfg.trainer, run_kind(cfg).rows_per_example, f"algorithm.kind={cfg.algorithm.kind}"
    if trainer.minibatch_size not in (None, trainer.prompts_per_step):
        update = f"a step is one update of trainer.prompts_per_step={trainer.prompts_per_step} examples"
        yield f"trainer.minibatch_size={trainer.minibatch_size}: with {named} {update}; set it to null"
    if trainer.ppo_epochs != 1:
        yield f"trainer.ppo_epochs={trainer.ppo_epochs}: with {named} examples are not repeated; set it to 1"
    multiple = padded_to(cfg.actor.layout, in_fp8(cfg.actor))
    needed = max(-(-longest_example(cfg) // multiple) * multiple * rows, 2)
    if (most := trainer.max_tokens_per_microbatch) < needed:
        small = f"trainer.max_tokens_per_microbatch={most} is too small for {rows} rows"
        yield f"{small} of data.max_tokens={longest_example(cfg)}; raise it to {needed} or more"
    longest = cfg.data.max_tokens  # with null, long rows are found when the data are read
    if geometry is not None and longest is not None and longest > geometry.max_positions:
        most = geometry.max_positions
        yield f"data.max_tokens={longest} exceeds max_position_embeddings={most} of model.path; lower it"
