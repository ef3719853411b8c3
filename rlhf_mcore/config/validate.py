"""Check fields against each other, and the files that they name. No process has started yet.

Every problem names the field, its value and the remedy, and all of them are reported at once. The values of a key are in its
description (``schema.key``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from rlhf_mcore.config.choices import is_file_spec
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.implied import reads_scores
from rlhf_mcore.config.keys import DESCRIPTIONS, value_of
from rlhf_mcore.config.model_files import inspect_model
from rlhf_mcore.config.rules.alarms import alarm_problems
from rlhf_mcore.config.rules.algorithm import algorithm_problems
from rlhf_mcore.config.rules.checkpoint import checkpoint_problems
from rlhf_mcore.config.rules.data import example_problems, prompt_problems
from rlhf_mcore.config.rules.environment import environment_problems
from rlhf_mcore.config.rules.layouts import (
    balance_problems,
    cut_problems,
    engine_problems,
    role_problems,
    world_problems,
)
from rlhf_mcore.config.rules.lora import lora_problems, target_problems
from rlhf_mcore.config.rules.megatron import megatron_problems
from rlhf_mcore.config.rules.mtp import mtp_problems
from rlhf_mcore.config.rules.preference import preference_problems
from rlhf_mcore.config.rules.reward import (
    ray_problems,
    reward_problems,
)
from rlhf_mcore.config.rules.rollout import rollout_problems
from rlhf_mcore.config.rules.run import path_problems, tracker_problems
from rlhf_mcore.config.rules.trainer import (
    batch_problems,
    example_batch_problems,
    position_problems,
    schedule_problems,
)
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, TeacherConfig
from rlhf_mcore.config.schema.key import Choices, Range
from rlhf_mcore.config.tokenizer_match import own_tokenizer_problems
from rlhf_mcore.config.user_functions import function_problems


def validate(cfg: Config, world_size: int | None = None, *, check_files: bool = True) -> None:
    """Check a configuration for a world of ``world_size`` processes (None: ``default_world_size``).

    Without ``check_files``, for planning, a model is its ``config.json``: weights, tokenizer, prompts and functions may be absent.

    Raises:
        ConfigError: with every problem that was found.
    """
    kind = run_kind(cfg)
    out_of_range = list(range_problems(cfg))
    problems = [*choice_problems(cfg), *out_of_range, *unused_problems(cfg)]
    problems += map(FileProblem, path_problems(cfg))
    problems += [*tracker_problems(cfg.logging), *alarm_problems(cfg.alarms)]
    problems += [*checkpoint_problems(cfg), *megatron_problems(cfg)]
    problems += lora_problems(cfg)
    geometry, model_problems = inspect_model(cfg.model.path, "model.path", kind.starting_heads)
    problems += [*model_problems, *map(FileProblem, own_tokenizer_problems(cfg.model))]
    # Numbers are compared with each other only where each is in range: the checks divide by them.
    in_range = not out_of_range
    if in_range:
        problems += [*world_problems(cfg, world_size), *schedule_problems(cfg)]
    if in_range and geometry is not None:
        problems += cut_problems("actor", cfg.actor.layout, geometry, "model.path")
        problems += balance_problems("actor", cfg.actor.moe, geometry, "model.path")
        problems += mtp_problems(cfg, geometry)
        problems += target_problems(cfg, geometry)
        if geometry.vision is not None or cfg.actor.vision.train in ("merger", "all"):
            from rlhf_mcore.config.rules.vision import processor_problems, vision_problems  # few models read images

            problems += [
                *vision_problems(cfg, geometry),
                *(processor_problems(cfg) if geometry.vision is not None else ()),
            ]
    if kind.generates and cfg.rollout.quantization is not None:
        from rlhf_mcore.config.rules.quantisation import quantised_problems

        problems += quantised_problems(cfg, geometry)
    if cfg.actor.fp8 == "blockwise":
        from rlhf_mcore.config.rules.fp8 import fp8_problems

        problems += fp8_problems(cfg, geometry if in_range else None)
    if cfg.actor.router_replay != "off":
        from rlhf_mcore.config.rules.routes import route_problems

        problems += route_problems(cfg, geometry)
    if kind.generates:
        problems += [
            *algorithm_problems(cfg),
            *rollout_problems(cfg),
            *environment_problems(cfg),
            *reward_problems(cfg),
        ]
        problems += [*ray_problems(cfg), *prompt_problems(cfg), *role_problems(cfg, geometry if in_range else None)]
        if cfg.teacher != TeacherConfig() or not reads_scores(cfg):
            from rlhf_mcore.config.rules.teacher import teacher_problems  # few runs have one

            problems += teacher_problems(cfg, geometry if in_range else None)
        if in_range:
            problems += [
                *engine_problems(cfg, world_size, geometry),
                *batch_problems(cfg),
                *position_problems(cfg, geometry),
            ]
    else:
        problems += example_problems(cfg)
        if kind.compares:
            problems += preference_problems(cfg, geometry if in_range else None)
        if in_range:
            problems += example_batch_problems(cfg, geometry)
    if not check_files:
        problems = [problem for problem in problems if not isinstance(problem, FileProblem)]
    if problems:
        raise ConfigError.many(problems)


# ----------------------------------------------------------------------------------------------------------- single keys
def choice_problems(cfg: Config) -> Iterator[str]:
    """List the keys whose text is none of their choices."""
    for key, value, allowed in _allowed_values(cfg):
        if not isinstance(allowed, Choices) or value is None or allowed.holds(value):
            continue
        if allowed.or_function and is_file_spec(value):
            yield from function_problems(value, key)
        else:
            null = ", or null" * bool(DESCRIPTIONS[key].null)
            yield f"{key}={value!r} is not a choice; choose one of: {allowed}{null}"


def range_problems(cfg: Config) -> Iterator[str]:
    """List the keys whose number is out of range."""
    for key, value, allowed in _allowed_values(cfg):
        if isinstance(allowed, Range) and value is not None and not allowed.holds(value):
            yield f"{key}={value} is out of range; it must be {allowed}"
    if run_kind(cfg).generates and cfg.evaluate.samples > 1 and cfg.evaluate.temperature == 0:
        yield (
            f"evaluate.samples={cfg.evaluate.samples} with evaluate.temperature=0.0 draws the same greedy response again and "
            "again; raise evaluate.temperature or set evaluate.samples=1"
        )


def unused_problems(cfg: Config) -> Iterator[str]:
    """List the keys that somebody has set in vain, because of the value of another key."""
    kind = run_kind(cfg)
    for key, default in _conditional_defaults().items():
        if not kind.reads(key) or (value := value_of(cfg, key)) == default:
            continue
        description = DESCRIPTIONS[key]
        while description.only_with:
            owner, _, values = description.only_with.partition("=")
            owner_value, description = value_of(cfg, owner), DESCRIPTIONS[owner]  # which may need another in its turn
            if _is_misspelled(owner, owner_value) or _is_misspelled(key, value):
                break  # which is another problem
            if owner == "rollout.engine" and engine_kind(owner_value).reads(key):
                break
            if owner_value not in values.split(" or ") if values else owner_value == 0:
                cure = (
                    f"set {owner}={values}"
                    if values
                    else f"set {owner}=true"
                    if owner_value is False
                    else f"raise {owner}"
                )
                yield f"{key}={value} has no effect with {owner}={owner_value}; remove it, or {cure}"
                break


@cache
def _conditional_defaults() -> dict[str, Any]:
    """Return the defaults of the keys that have an effect only with another key."""
    default = Config()
    return {key: value_of(default, key) for key, description in DESCRIPTIONS.items() if description.only_with}


def _is_misspelled(key: str, value: Any) -> bool:
    allowed = DESCRIPTIONS[key].allowed
    return isinstance(allowed, Choices) and not allowed.holds(value)


def _allowed_values(cfg: Config) -> Iterator[tuple[str, Any, Range | Choices]]:
    """List every key that the run reads and whose values are bounded."""
    kind = run_kind(cfg)
    for key, description in DESCRIPTIONS.items():
        if not kind.reads(key):
            continue
        if description.allowed is not None:
            yield key, value_of(cfg, key), description.allowed


# -------------------------------------------------------------------------------------------------------- several keys


def reward_and_data_problems(cfg: Config) -> Iterator[str]:
    """Check scores and prompts alone: no model is read."""
    yield from (
        *choice_problems(cfg),
        *range_problems(cfg),
        *environment_problems(cfg),
        *reward_problems(cfg),
        *prompt_problems(cfg),
    )
