"""All checks that need more than one field, or a look at the files that the fields name. No process has started yet.

Every problem names the field, its value and the remedy, and all of them are reported at once. What a key may be is in its
description (``schema.key``).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from os.path import exists, isdir
from pathlib import Path
from typing import Any

from rlhf_mcore.config.alarm_rules import alarm_problems
from rlhf_mcore.config.algorithm_rules import algorithm_problems
from rlhf_mcore.config.checkpoint_rules import checkpoint_problems
from rlhf_mcore.config.choices import ENVIRONMENTS, TRACKERS
from rlhf_mcore.config.data_files import example_problems, prompt_problems
from rlhf_mcore.config.derive import (
    default_world_size,
    grades,
    longest_example,
    longest_response,
    max_new_tokens,
    num_steps,
    padded_to,
    resolve,
    role_layouts,
)
from rlhf_mcore.config.errors import ConfigError, FileProblem, shortened
from rlhf_mcore.config.keys import DESCRIPTIONS, value_of
from rlhf_mcore.config.layouts import balance_problems, cut_problems, engine_problems, role_problems, world_problems
from rlhf_mcore.config.megatron_fields import megatron_problems
from rlhf_mcore.config.model_files import inspect_model
from rlhf_mcore.config.mtp_rules import mtp_problems
from rlhf_mcore.config.reward_rules import functions_problems, rule_problems, service_problems
from rlhf_mcore.config.rollout_rules import rollout_problems
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, LoggingConfig, OptimizerConfig
from rlhf_mcore.config.schema.key import Choices, Range
from rlhf_mcore.config.schema.run import wanted_trackers
from rlhf_mcore.config.tokenizer_files import own_tokenizer_problems
from rlhf_mcore.config.tool_schemas import read_tools
from rlhf_mcore.config.user_functions import function_problems, is_file_spec
from rlhf_mcore.types import ModelGeometry

__all__ = ["default_world_size", "resolve", "validate"]


def validate(cfg: Config, world_size: int | None = None, *, check_files: bool = True) -> None:
    """Check a configuration for a world of ``world_size`` processes (None: ``default_world_size``).

    Without ``check_files``, for planning, a model is its ``config.json``: weights, tokenizer, prompts and functions may be absent.

    Raises:
        ConfigError: with every problem that was found.
    """
    kind = run_kind(cfg)
    out_of_range = list(range_problems(cfg))
    problems = [*choice_problems(cfg), *out_of_range, *unused_problems(cfg)]
    problems += map(FileProblem, _path_problems(cfg))
    problems += [*tracker_problems(cfg.logging), *alarm_problems(cfg.alarms)]
    problems += [*checkpoint_problems(cfg), *megatron_problems(cfg)]
    geometry, model_problems = inspect_model(cfg.model.path, "model.path", kind.starting_heads)
    problems += [*model_problems, *map(FileProblem, own_tokenizer_problems(cfg.model))]
    # Numbers are compared with each other only where each is in range: the checks divide by them.
    in_range = not out_of_range
    if in_range:
        problems += [*world_problems(cfg, world_size), *_schedule_problems(cfg)]
    if in_range and geometry is not None:
        problems += cut_problems("actor", cfg.actor.layout, geometry, "model.path")
        problems += balance_problems("actor", cfg.actor.moe, geometry, "model.path")
        problems += mtp_problems(cfg, geometry)
    if kind.generates:
        problems += [*algorithm_problems(cfg), *rollout_problems(cfg), *reward_problems(cfg)]
        problems += [*_ray_problems(cfg), *prompt_problems(cfg), *role_problems(cfg, geometry if in_range else None)]
        if in_range:
            problems += [
                *engine_problems(cfg, world_size, geometry),
                *_batch_problems(cfg),
                *_position_problems(cfg, geometry),
            ]
    else:
        problems += example_problems(cfg)
        if in_range:
            problems += _example_batch_problems(cfg, geometry)
    if not check_files:
        problems = [problem for problem in problems if not isinstance(problem, FileProblem)]
    if problems:
        raise ConfigError.many(problems)


# ----------------------------------------------------------------------------------------------------------- single keys
def choice_problems(cfg: Config) -> Iterator[str]:
    """Keys whose text is none of their choices."""
    for key, value, allowed in _allowed_values(cfg):
        if not isinstance(allowed, Choices) or value is None or value in allowed.meanings:
            continue
        if allowed.or_function and is_file_spec(value):
            yield from function_problems(value, key)
        else:
            yield f"{key}={value!r} is not a choice; choose one of: {allowed}"


def range_problems(cfg: Config) -> Iterator[str]:
    """Keys whose number is out of range."""
    for key, value, allowed in _allowed_values(cfg):
        if isinstance(allowed, Range) and value is not None and not allowed.holds(value):
            yield f"{key}={value} is out of range; it must be {allowed}"
    if run_kind(cfg).generates and cfg.evaluate.samples > 1 and cfg.evaluate.temperature == 0:
        yield (
            f"evaluate.samples={cfg.evaluate.samples} with evaluate.temperature=0.0 draws the same greedy response again and "
            "again; raise evaluate.temperature or set evaluate.samples=1"
        )


def unused_problems(cfg: Config) -> Iterator[str]:
    """Keys that somebody has set, and that have no effect with what another key is."""
    default = Config()
    for key, description in DESCRIPTIONS.items():
        if not run_kind(cfg).reads(key) or (value := value_of(cfg, key)) == value_of(default, key):
            continue
        while description.only_with:
            owner, _, wanted = description.only_with.partition("=")
            found, description = value_of(cfg, owner), DESCRIPTIONS[owner]  # which may need another in its turn
            if _is_misspelled(owner, found) or _is_misspelled(key, value):
                break  # which is another problem
            if found not in wanted.split(" or ") if wanted else found == 0:
                cure = (
                    f"set {owner}={wanted}" if wanted else f"set {owner}=true" if found is False else f"raise {owner}"
                )
                yield f"{key}={value} has no effect with {owner}={found}; remove it, or {cure}"
                break


def _is_misspelled(key: str, value: Any) -> bool:
    allowed = DESCRIPTIONS[key].allowed
    return isinstance(allowed, Choices) and value not in allowed.meanings


def _allowed_values(cfg: Config) -> Iterator[tuple[str, Any, Range | Choices]]:
    """Every key that the run reads and whose description bounds its value."""
    kind = run_kind(cfg)
    for key, description in DESCRIPTIONS.items():
        if not kind.reads(key):
            continue
        if description.allowed is not None:
            yield key, value_of(cfg, key), description.allowed


# -------------------------------------------------------------------------------------------------------- several keys
def _path_problems(cfg: Config) -> Iterator[str]:
    for key in ("project", "experiment"):
        value = value_of(cfg, key)
        if value in ("", ".", "..") or "/" in value or "\0" in value:
            yield f"{key}={value!r} is the name of a directory of the run; use a name without slashes"
    folder = Path(cfg.output_dir).absolute()
    existing = next(parent for parent in (folder, *folder.parents) if exists(parent))
    if not isdir(existing):
        yield f"output_dir={cfg.output_dir}: {existing} is a file, not a directory; choose another output_dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"output_dir={cfg.output_dir}: {existing} is not writable; choose another output_dir"


def tracker_problems(cfg: LoggingConfig) -> Iterator[str]:
    """Trackers that there are not, or whose package is not installed."""
    for name in wanted_trackers(cfg):
        if (declared := TRACKERS.get(name)) is None:
            meant = difflib.get_close_matches(name, TRACKERS, n=1, cutoff=0.5)
            hint = f"did you mean {meant[0]}?" if meant else f"choose some of: {', '.join(TRACKERS)}"
            yield f"logging.trackers has {name!r}, which is no tracker; {hint}"
        elif declared.package and find_spec(declared.package) is None:
            yield FileProblem(
                f"logging.trackers has {name!r}, and its package {declared.package} is not installed; "
                f"pip install 'rlhf_mcore[{name}]', or remove it from logging.trackers"
            )


def reward_and_data_problems(cfg: Config) -> Iterator[str]:
    """What concerns scores and prompts alone: no model is read."""
    yield from (*choice_problems(cfg), *range_problems(cfg), *reward_problems(cfg), *prompt_problems(cfg))


def reward_problems(cfg: Config) -> Iterator[str]:
    """Whether something gives scores."""
    yield from _environment_problems(cfg)
    if cfg.reward.function is not None:
        yield from map(FileProblem, function_problems(cfg.reward.function, "reward.function"))
    for index, function in enumerate(cfg.reward.functions):
        yield from map(FileProblem, function_problems(function.path, f"reward.functions[{index}].path"))
    yield from functions_problems(cfg.reward)
    yield from rule_problems(cfg.reward)
    yield from service_problems(cfg.reward)
    for key, names in {"reward.env": cfg.reward.env, "environment.env": cfg.environment.env}.items():
        for name in names:
            if name not in os.environ:
                yield FileProblem(f"{key} names {name}, which is not set here; export it, or remove it from the list")
    if not grades(cfg):
        default = Config()
        for key in (
            "reward.function",
            "reward.functions",
            "reward.remote.url",
            "reward.judge.url",
            "reward.sources",
            "reward.rules",
        ):
            if (value := value_of(cfg, key)) and value != value_of(default, key):
                yield (
                    f"{key} is set, but has no effect with environment.score=environment; remove it, or set environment.score=reward "
                    "(its score alone) or sum (both)"
                )


def _ray_problems(cfg: Config) -> Iterator[str]:
    """A process is part of one cluster."""
    own, engines = cfg.reward.ray.address, cfg.rollout.ray.address
    if cfg.reward.pool == "ray" and cfg.rollout.placement == "disaggregated" and (own is None or own != engines):
        yield (
            f"reward.ray.address={own} and rollout.ray.address={engines}: with rollout.placement=disaggregated workers of rewards and "
            "engines are in one cluster; set both to its address"
        )


def _environment_problems(cfg: Config) -> Iterator[str]:
    own = cfg.environment
    if own.function is None:
        return
    if own.function not in ENVIRONMENTS and not is_file_spec(own.function):
        yield f"environment.function={own.function} is neither path/to/file.py:Class nor one of {', '.join(ENVIRONMENTS)}; correct it"
    elif own.function not in ENVIRONMENTS:
        yield from map(FileProblem, function_problems(own.function, "environment.function"))
    try:
        read_tools(own.tools)
    except ConfigError as error:
        yield FileProblem(str(error))
    if own.max_tokens is not None and own.max_tokens < cfg.rollout.sampling.max_new_tokens:
        yield (
            f"environment.max_tokens={own.max_tokens} of an episode is less than rollout.sampling.max_new_tokens="
            f"{cfg.rollout.sampling.max_new_tokens} of one turn; raise it, or lower that"
        )


def _schedule_problems(cfg: Config) -> Iterator[str]:
    for role in ("actor", "critic"):
        optimizer = value_of(cfg, f"{role}.optimizer")
        lr, min_lr = optimizer.lr, optimizer.schedule.min_lr
        if run_kind(cfg).reads(f"{role}.optimizer") and min_lr > lr:
            yield f"{role}.optimizer.schedule.min_lr={min_lr:g} is above {role}.optimizer.lr={lr:g}; lower it"
        unused = {"adamw": ("momentum",), "sgd": ("beta1", "beta2", "eps")}.get(optimizer.name, ())
        for name in unused if run_kind(cfg).reads(f"{role}.optimizer") else ():
            if (value := getattr(optimizer, name)) != getattr(OptimizerConfig, name):
                shown = f"{role}.optimizer.{name}={value:g}"
                yield f"{shown} has no effect with {role}.optimizer.name={optimizer.name}; remove it, or change that"
    last = num_steps(cfg)
    if beyond := [step for step in cfg.trainer.profile.steps if not 1 <= step <= last]:
        yield (
            f"trainer.profile.steps: {shortened(beyond, separator=', ')} is no step of the run; "
            f"name steps from 1 to trainer.num_steps={last}"
        )


def _batch_problems(cfg: Config) -> Iterator[str]:
    trainer = cfg.trainer
    if trainer.forward_tokens is not None and trainer.forward_tokens < trainer.max_tokens_per_microbatch:
        yield (
            f"trainer.forward_tokens={trainer.forward_tokens} is less than trainer.max_tokens_per_microbatch="
            f"{trainer.max_tokens_per_microbatch}, though a pass without gradients needs less memory; raise it or set it to null"
        )
    for key, size in {"trainer": trainer.minibatch_size, "critic": cfg.critic.minibatch_size}.items():
        if size is not None and trainer.prompts_per_step % size:
            yield (
                f"trainer.prompts_per_step={trainer.prompts_per_step} is not divisible by "
                f"{key}.minibatch_size={size}; choose a divisor"
            )
    yield from microbatch_problems(cfg)


def microbatch_problems(cfg: Config) -> Iterator[str]:
    """A sequence is never cut, so the longest one has to fit: of training, and of evaluation where a reward model reads it."""
    longest, what = cfg.data.max_prompt_tokens + longest_response(cfg), _response_key(cfg)
    if cfg.reward.model.path is not None and max_new_tokens(cfg) > longest_response(cfg):
        longest, what = cfg.data.max_prompt_tokens + max_new_tokens(cfg), "evaluate.max_new_tokens"
    reasons = {
        padded_to(role.layout): "context parallelism" if role.layout.cp > 1 else f"{role.name}.megatron.tp_comm_overlap"
        for role in role_layouts(cfg)
        if role.layout.cp > 1 or (value_of(cfg, f"{role.name}.megatron") or {}).get("tp_comm_overlap") is True
    }
    needed, why = max([(-(-longest // size) * size, why) for size, why in reasons.items()], default=(longest, ""))
    if cfg.trainer.max_tokens_per_microbatch < needed:
        padded = "" if needed == longest else f", padded for {why} to {needed}"
        yield (
            f"trainer.max_tokens_per_microbatch={cfg.trainer.max_tokens_per_microbatch} is less than "
            f"data.max_prompt_tokens + {what}={longest}{padded}; raise it to {needed} or more"
        )


def _position_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Whether the model has positions for the longest prompt and response."""
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
    """The key that bounds a row of a step after its prompt."""
    has_own = cfg.environment.function is not None and cfg.environment.max_tokens is not None
    return "environment.max_tokens" if has_own else "rollout.sampling.max_new_tokens"


def _example_batch_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """Whether a step is one update, a microbatch has room for an example, and the model has positions for it."""
    trainer, kind = cfg.trainer, run_kind(cfg)
    if trainer.minibatch_size not in (None, trainer.prompts_per_step):
        yield (
            f"trainer.minibatch_size={trainer.minibatch_size}: with algorithm.kind={kind.name} a step is one update, of "
            f"trainer.prompts_per_step={trainer.prompts_per_step} examples; set it to null"
        )
    if trainer.ppo_epochs != 1:
        yield f"trainer.ppo_epochs={trainer.ppo_epochs}: with algorithm.kind={kind.name} examples are not repeated; set it to 1"
    multiple = padded_to(cfg.actor.layout)
    needed = -(-longest_example(cfg) // multiple) * multiple * kind.rows_per_example
    if trainer.max_tokens_per_microbatch < max(needed, 2):
        yield (
            f"trainer.max_tokens_per_microbatch={trainer.max_tokens_per_microbatch} has no room for "
            f"{kind.rows_per_example} rows of data.max_tokens={longest_example(cfg)}; raise it to {max(needed, 2)} or more"
        )
    longest = cfg.data.max_tokens  # null: what is too long is found out when data are read
    if geometry is not None and longest is not None and longest > geometry.max_positions:
        yield (
            f"data.max_tokens={longest} exceeds max_position_embeddings={geometry.max_positions} of model.path; lower it"
        )
