"""Check keys against each other, and the files that they name, before any process starts.

Every problem names the field, its value and the remedy. All problems are reported at once. ``schema`` has already checked the
values of single keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.keys import DESCRIPTIONS, value_of
from rlhf_mcore.config.load import MISSING, WrongValues
from rlhf_mcore.config.questions import grades, reads_scores, unused_rules
from rlhf_mcore.config.rules.algorithm import algorithm_problems, preference_problems
from rlhf_mcore.config.rules.data import example_problems, prompt_problems
from rlhf_mcore.config.rules.environment import environment_problems
from rlhf_mcore.config.rules.fp8 import fp8_problems, quantised_problems
from rlhf_mcore.config.rules.layouts import (
    balance_problems,
    cut_problems,
    engine_problems,
    recompute_problems,
    role_problems,
    world_problems,
)
from rlhf_mcore.config.rules.megatron import megatron_problems
from rlhf_mcore.config.rules.parts import (
    indexer_problems,
    lora_problems,
    mtp_problems,
    processor_problems,
    target_problems,
    vision_problems,
)
from rlhf_mcore.config.rules.reward import ray_problems, reward_problems
from rlhf_mcore.config.rules.rollout import rollout_problems, route_problems
from rlhf_mcore.config.rules.run import alarm_problems, checkpoint_problems, path_problems, tracker_problems
from rlhf_mcore.config.rules.teacher import teacher_problems
from rlhf_mcore.config.rules.trainer import batch_problems, example_batch_problems, position_problems, schedule_problems
from rlhf_mcore.config.schema import Config, TeacherConfig
from rlhf_mcore.config.schema.group import ENGINE
from rlhf_mcore.readers.model_files import inspect_model
from rlhf_mcore.readers.tokenizer_match import own_tokenizer_problems
from rlhf_mcore.readers.user_functions import is_file_spec


def validate(cfg: Config, world_size: int | None = None, *, check_files: bool = True) -> None:
    """Check a configuration for a world of ``world_size`` processes (None: ``default_world_size``).

    Planning needs no ``check_files``: then only the ``config.json`` of models is needed, not weights, tokenizer, prompts or functions.

    Raises:
        ConfigError: there are problems; it lists all of them.
    """
    kind = run_kind(cfg)
    geometry, model_problems = inspect_model(cfg.model.path, "model.path", kind.starting_heads)
    problems = [*unused_problems(cfg), *map(FileProblem, path_problems(cfg.output_dir))]
    problems += [*tracker_problems(cfg.logging), *alarm_problems(cfg.alarms), *checkpoint_problems(cfg)]
    problems += [*megatron_problems(cfg), *lora_problems(cfg), *model_problems]
    problems += map(FileProblem, own_tokenizer_problems(cfg.model))
    problems += [*world_problems(cfg, world_size), *schedule_problems(cfg)]
    if geometry is not None:
        problems += cut_problems("actor", cfg.actor.layout, geometry, "model.path")
        problems += balance_problems("actor", cfg.actor.moe, geometry, "model.path")
        problems += indexer_problems(cfg, geometry)
        problems += recompute_problems("actor", cfg.actor.recompute, geometry, packing=cfg.trainer.packing)
        problems += [*mtp_problems(cfg, geometry), *target_problems(cfg, geometry), *vision_problems(cfg, geometry)]
        problems += processor_problems(cfg) if geometry.vision is not None else ()
    if kind.generates and cfg.rollout.quantization is not None:
        problems += quantised_problems(cfg, geometry)
    if cfg.actor.fp8 == "blockwise":
        problems += fp8_problems(cfg, geometry)
    if cfg.actor.router_replay != "off":
        problems += route_problems(cfg, geometry)
    problems += role_problems(cfg, geometry)
    if kind.generates:
        problems += [*algorithm_problems(cfg), *sampling_problems(cfg), *rollout_problems(cfg)]
        problems += [*environment_problems(cfg), *reward_problems(cfg), *ray_problems(cfg), *prompt_problems(cfg)]
        problems += engine_problems(cfg, world_size, geometry)
        problems += [*batch_problems(cfg), *position_problems(cfg, geometry)]
        if cfg.teacher != TeacherConfig() or not reads_scores(cfg):
            problems += teacher_problems(cfg)
    else:
        problems += [*example_problems(cfg), *example_batch_problems(cfg, geometry)]
        problems += preference_problems(cfg) if kind.compares else ()
    if not check_files:
        problems = [problem for problem in problems if not isinstance(problem, FileProblem)]
    if problems:
        raise ConfigError.many(problems)


def report_all(found: WrongValues, world_size: int | None = None) -> ConfigError:
    """Return an error that also contains the problems of rules among the other keys.

    Consequences are skipped: problems that name an invalid key, or begin with a missing key or with the suggestion for an unknown
    key.
    """
    try:
        validate(found.rest, world_size)
    except ConfigError as error:
        wrong = [rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in found.keys]
        meant = re.findall(r"did you mean ([\w.]+)\?|([\w.]+) is a group, not a value", "\n".join(found.problems))
        wrong += [rf"^{re.escape(key)}\b" for pair in meant for key in pair if key] + [rf"={re.escape(MISSING)}(?!\w)"]
        others = [problem for problem in error.problems if not re.search("|".join(wrong), problem)]
        return ConfigError.many([*found.problems, *others])
    return found


# ----------------------------------------------------------------------------------------------------------- single keys
def sampling_problems(cfg: Config) -> Iterator[str]:
    """Reject an evaluation that samples the same greedy response several times."""
    if cfg.evaluate.samples > 1 and cfg.evaluate.temperature == 0:
        several = f"evaluate.samples={cfg.evaluate.samples} with evaluate.temperature=0.0"
        yield f"{several} samples the same greedy response each time; raise evaluate.temperature or set evaluate.samples=1"


def unused_problems(cfg: Config) -> Iterator[str]:
    """List keys that are set but have no effect, because of the value of another key."""
    kind = run_kind(cfg)
    for key, default in _conditional_defaults().items():
        if not kind.reads(key) or (value := value_of(cfg, key)) == default:
            continue
        description = DESCRIPTIONS[key]
        while description.only_with:
            owner, _, values = description.only_with.partition("=")
            owner_value, description = value_of(cfg, owner), DESCRIPTIONS[owner]  # the owner may depend on another key
            if owner == ENGINE and engine_kind(owner_value).reads(key):
                break
            if (choices := description.choices) and choices.allows is is_file_spec and is_file_spec(owner_value):
                break  # a user's function may read every key
            if owner_value not in values.split(" or ") if values else not owner_value:
                cure = f"set {owner}{'=' * bool(values)}{values}{'=true' * (owner_value is False)}"
                idle = "null" if owner_value is None else owner_value
                yield f"{key}={value} has no effect with {owner}={idle}; remove it, or {cure}"
                break


@cache
def _conditional_defaults() -> dict[str, Any]:
    """Return the defaults of keys that need another key to have an effect."""
    default = Config()
    return {key: value_of(default, key) for key, description in DESCRIPTIONS.items() if description.only_with}


# ------------------------------------------------------------------------------------------------------------ warnings
def warnings_of(cfg: Config) -> Iterator[str]:
    """List settings that work but are probably mistakes."""
    for unused, key in unused_rules(cfg.reward).items() if grades(cfg) else ():
        also = "; reward.functions adds a function to rules" if key == "reward.function" else ""
        yield f"{unused} has no effect, because {key} replaces it{also}"
    own, limit = cfg.environment, cfg.rollout.sampling.max_new_tokens
    if own.function is not None and own.max_tokens is None and own.max_turns != 1:
        yield (
            f"environment.max_tokens is null, so an episode, including the environment's text, has at most {limit} tokens, the limit "
            f"of one turn (rollout.sampling.max_new_tokens); set it to the tokens of environment.max_turns={own.max_turns} turns"
        )
    for role in ("actor", "critic"):
        optimizer = value_of(cfg, f"{role}.optimizer")
        is_read = run_kind(cfg).reads(f"{role}.optimizer") and optimizer.state_dtype == "bf16"
        if is_read and optimizer.beta2 > 1 - 2**-8:  # half the distance between bf16 numbers, relative to them
            yield (
                f"{role}.optimizer.beta2={optimizer.beta2:g} with state_dtype=bf16: a bf16 second moment cannot shrink by so "
                "little, so it stays at its largest value; set beta2 to 0.99 or less"
            )
