"""Rules for ``trainer``, learning-rate schedules and lengths."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.errors import shortened
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
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, OptimizerConfig
from rlhf_mcore.geometry import ModelGeometry


def schedule_problems(cfg: Config) -> Iterator[str]:
    """List problems with learning rates, options that the optimizer does not read, and profiled steps."""
    for role in ("actor", "critic"):
        optimizer = value_of(cfg, f"{role}.optimizer")
        lr, min_lr = optimizer.lr, optimizer.schedule.min_lr
        if run_kind(cfg).reads(f"{role}.optimizer") and min_lr > lr:
            yield f"{role}.optimizer.schedule.min_lr={min_lr:g} is above {role}.optimizer.lr={lr:g}; lower it"
        unused = {"adamw": ("momentum",), "sgd": ("beta1", "beta2", "eps")}.get(optimizer.name, ())
        for name in unused if run_kind(cfg).reads(f"{role}.optimizer") else ():
            if (value := getattr(optimizer, name)) != getattr(OptimizerConfig(), name):
                shown = f"{role}.optimizer.{name}={value:g}"
                yield f"{shown} has no effect with {role}.optimizer.name={optimizer.name}; remove it, or change that"
    last = num_steps(cfg)
    if beyond := [step for step in cfg.trainer.profile.steps if not 1 <= step <= last]:
        yield (
            f"trainer.profile.steps: {shortened(beyond, separator=', ')} is not a step of the run; "
            f"choose steps from 1 to trainer.num_steps={last}"
        )


def batch_problems(cfg: Config) -> Iterator[str]:
    """Check that a step can be divided into minibatches and microbatches."""
    trainer = cfg.trainer
    if trainer.forward_tokens is not None and trainer.forward_tokens < trainer.max_tokens_per_microbatch:
        yield (
            f"trainer.forward_tokens={trainer.forward_tokens} is less than trainer.max_tokens_per_microbatch="
            f"{trainer.max_tokens_per_microbatch}, but a pass without gradients needs less memory; raise it or set it to null"
        )
    for key, size in {"trainer": trainer.minibatch_size, "critic": cfg.critic.minibatch_size}.items():
        if size is not None and trainer.prompts_per_step % size:
            yield (
                f"trainer.prompts_per_step={trainer.prompts_per_step} is not divisible by "
                f"{key}.minibatch_size={size}; choose a divisor"
            )
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
    if cfg.trainer.max_tokens_per_microbatch < needed:
        padded = "" if needed == longest else f", padded for {why} to {needed}"
        yield (
            f"trainer.max_tokens_per_microbatch={cfg.trainer.max_tokens_per_microbatch} is less than "
            f"data.max_prompt_tokens + {what}={longest}{padded}; raise it to {needed} or more"
        )


def position_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that the model supports the length of the longest prompt and response."""
    if geometry is None:
        return
    longest = cfg.data.max_prompt_tokens + max_new_tokens(cfg)
    if longest > geometry.max_positions:
        yield (
            f"{_sum(cfg)}={longest} exceeds max_position_embeddings={geometry.max_positions} of model.path; "
            f"lower {_sum(cfg).replace(' + ', ' or ')}"
        )
    max_model_len = cfg.rollout.max_model_len
    if max_model_len is not None and max_model_len < longest:
        yield f"rollout.max_model_len={max_model_len} is less than {_sum(cfg)}={longest}; raise it or set it to null"
    if max_model_len is not None and max_model_len > geometry.max_positions:
        yield (
            f"rollout.max_model_len={max_model_len} exceeds max_position_embeddings={geometry.max_positions} of "
            "model.path; lower it or set it to null"
        )


def _sum(cfg: Config) -> str:
    evaluated = (cfg.evaluate.max_new_tokens or 0) > longest_response(cfg)
    return f"data.max_prompt_tokens + {'evaluate.max_new_tokens' if evaluated else _response_key(cfg)}"


def _response_key(cfg: Config) -> str:
    """Return the key that limits the tokens of a training row after its prompt."""
    has_own = cfg.environment.function is not None and cfg.environment.max_tokens is not None
    return "environment.max_tokens" if has_own else "rollout.sampling.max_new_tokens"


def example_batch_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Check that a step is one update, and that an example fits into a microbatch and the model's positions."""
    trainer, kind = cfg.trainer, run_kind(cfg)
    if trainer.minibatch_size not in (None, trainer.prompts_per_step):
        yield (
            f"trainer.minibatch_size={trainer.minibatch_size}: with algorithm.kind={kind.name} a step is one update of "
            f"trainer.prompts_per_step={trainer.prompts_per_step} examples; set it to null"
        )
    if trainer.ppo_epochs != 1:
        yield f"trainer.ppo_epochs={trainer.ppo_epochs}: with algorithm.kind={kind.name} examples are not repeated; set it to 1"
    multiple = padded_to(cfg.actor.layout, in_fp8(cfg.actor))
    needed = -(-longest_example(cfg) // multiple) * multiple * kind.rows_per_example
    if trainer.max_tokens_per_microbatch < max(needed, 2):
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} is too small for "
            f"{kind.rows_per_example} rows of data.max_tokens={longest_example(cfg)}; raise it to {max(needed, 2)} or more"
        )
    longest = cfg.data.max_tokens  # with null, long rows are found when the data are read
    if geometry is not None and longest is not None and longest > geometry.max_positions:
        yield (
            f"data.max_tokens={longest} exceeds max_position_embeddings={geometry.max_positions} of model.path; lower it"
        )
