"""The tree of all groups. Every key a user may set is a field of a group, described beside it (``schema.key``).

Nothing here imports torch nor anything that does: help and configuration errors must be instant.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhf_mcore.config.choices import PRESETS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.former import FORMER, translate
from rlhf_mcore.config.schema.algorithm import AlgorithmConfig
from rlhf_mcore.config.schema.environment import EnvironmentConfig
from rlhf_mcore.config.schema.group import Group, is_group_type, to_dict
from rlhf_mcore.config.schema.key import AT_LEAST_0, group, key
from rlhf_mcore.config.schema.models import ActorConfig, CriticConfig, ModelConfig, ReferenceConfig, TeacherConfig
from rlhf_mcore.config.schema.rollout import BridgeConfig, RewardConfig, RolloutConfig
from rlhf_mcore.config.schema.run import (
    AlarmsConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LoggingConfig,
    TrainerConfig,
)


class Config(Group):
    """A configuration: ``rm.Config(model="my-model", algorithm="grpo", trainer={"num_steps": 5})``.

    Takes a dict of settings, keywords, or both (keywords win): names of groups with dicts, or dotted keys
    (``rm.Config({"actor.optimizer.lr": 1e-6})``). A preset fills in the keys that are not given.

    Raises:
        ConfigError: naming every unknown key and every value that a key does not take.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, /, **keys: Any) -> None:
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(
                f"settings={settings!r} is not valid; give a dict, or read a file with rm.load_config(path)"
            )
        try:
            super().__init__(**with_preset(with_keys_of_today(nest({**(settings or {}), **keys}))))
        except ValidationError as error:
            raise Group.explain(Config, error) from None

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Config:
        """Build a configuration from nested dicts. No preset is filled in.

        Raises:
            ValidationError: with every unknown key and every value that a key does not take.
        """
        return cls.__pydantic_validator__.validate_python(tree, self_instance=cls.__new__(cls))

    def updated(self, settings: Mapping[str, Any] | None = None) -> Config:
        """Return a checked copy in which some keys are set. Names are those of ``Config``; no preset is filled in.

        Raises:
            ConfigError: naming every unknown key and every value that a key does not take.
        """
        try:
            return self.read(with_keys_of_today(merge(to_dict(self), nest(settings or {}))))
        except ValidationError as error:
            raise Group.explain(Config, error) from None

    @property
    def run_directory(self) -> Path:
        """``<output_dir>/<project>/<experiment>``."""
        return Path(self.output_dir, self.project, self.experiment)

    output_dir: str = key("outputs", "where run directories are made: `<output_dir>/<project>/<experiment>/`")
    project: str = key("rlhf_mcore", "first part of the run directory's name")
    experiment: str = key("default", "second part")
    seed: int = key(
        0,
        "of the order of prompts and of every sampled response",
        AT_LEAST_0,
        more="The seed of a response is derived from it, the step, the prompt and the sample.",
        is_fixed=True,
    )
    deterministic: bool = key(
        False,
        "deterministic kernels on CUDA (slower); on a CPU they always are",
        more="Every library is asked for its own; docs/operations/determinism.md lists what stays open on "
        "CUDA. On a CPU bits are equal on "
        "processors of one kind (docs/operations/cpu.md).",
    )
    model: ModelConfig = group(
        ModelConfig, "the model that training starts from", "`model: PATH` is short for `model: {path: PATH}`."
    )
    actor: ActorConfig = group(ActorConfig, "the policy being trained")
    critic: CriticConfig = group(
        CriticConfig,
        "the value model",
        "Built only when `algorithm.advantage` needs values (`gae`). Its layout, optimizer and precision are its own.",
    )
    reference: ReferenceConfig = group(
        ReferenceConfig,
        "the frozen policy",
        "Built only when `algorithm.kl.coef` is not 0, or `algorithm.dpo.loss` reads it; it has the actor's layout.",
    )
    teacher: TeacherConfig = group(
        TeacherConfig,
        "a policy to learn from",
        "Built only with `teacher.path`, whose layout and precision are its own, or with `teacher.weights`. See "
        "[distillation](algorithms/distillation.md).",
    )
    rollout: RolloutConfig = group(
        RolloutConfig, "the engines that generate", "There are world size / (ranks of an engine) of them."
    )
    bridge: BridgeConfig = group(BridgeConfig, "how weights reach the engines")
    algorithm: AlgorithmConfig = group(
        AlgorithmConfig,
        "what is optimised",
        "A preset fills in keys that are not set, and `algorithm: dr_grpo` is short for `algorithm: {preset: dr_grpo}`. "
        "`configs/base.yaml` comments out what some preset sets.",
    )
    reward: RewardConfig = group(
        RewardConfig,
        "where scores come from",
        "They are a weighted sum of rules or a function of your own, and the score of a reward model.",
    )
    environment: EnvironmentConfig = group(
        EnvironmentConfig,
        "what answers the policy between its turns",
        "Without `environment.function` nothing does, and a response is one turn. See [environments](guide/environments/index.md).",
    )
    data: DataConfig = group(DataConfig, "prompts")
    trainer: TrainerConfig = group(TrainerConfig, "size and shape of a step")
    checkpoint: CheckpointConfig = group(
        CheckpointConfig,
        "what is saved",
        "The last step is always saved. See [checkpoints](operations/checkpoints.md).",
    )
    evaluate: EvaluateConfig = group(
        EvaluateConfig,
        "held-out prompts",
        "Those of `data.eval`, always before and after training. See [evaluation](guide/evaluation.md).",
    )
    logging: LoggingConfig = group(LoggingConfig, "the record of a run")
    alarms: AlarmsConfig = group(AlarmsConfig, "rules on metrics, judged after every step")


SHORT = {"algorithm": "preset", "model": "path"}  # for a text instead of a group


def nest(settings: Mapping[str, Any], kind: type[Group] = Config) -> dict[str, Any]:
    """Turn dotted keys into nested dicts. ``algorithm: dr_grpo`` stands for its preset, ``model: path`` for its path.

    Args:
        settings: keys of ``kind``. Names within a table of the user's own stay as they are.
        kind: the group that the settings are of.
    """
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        first, _, rest = str(name).partition(".")
        if kind is Config and name in SHORT and isinstance(value, str | os.PathLike):
            value = {SHORT[name]: value}
        hint = kind.model_fields[first].annotation if first in kind.model_fields else None
        if is_group_type(hint) and (rest or isinstance(value, Mapping)):
            value = nest({rest: value} if rest else value, hint)  # type: ignore[arg-type]
        elif rest:
            for part in reversed(rest.split(".")):
                value = {part: value}
        tree[first] = merge(tree.get(first), value)
    return tree


def merge(before: Any, value: Any) -> Any:
    """Merge nested dicts; any other value replaces the earlier one."""
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **{name: merge(before.get(name), child) for name, child in value.items()}}
    return value


def with_keys_of_today(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace former keys by those that have taken their place, with a warning for each. Keys of a Group are today's.

    Raises:
        ConfigError: a former key has a value that it did not take.
    """
    for found in translate(dict(_settings_for_translation(tree))):
        found.warn()
        for name in found.was:
            tree = _without(tree, name)
        tree = merge(tree, nest(found.now))
    return tree


def _settings_for_translation(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the former keys of a tree, and those that their translation needs."""
    for dotted in dict.fromkeys(chain.from_iterable(former.keys for former in FORMER)):
        *groups, last = dotted.split(".")
        inner: Any = tree
        for name in groups:
            inner = inner.get(name) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and last in inner:
            yield dotted, inner[last]


def _without(tree: Mapping[str, Any], dotted: str) -> dict[str, Any]:
    """Copy a tree without a key, and without the groups that are empty then."""
    first, _, rest = dotted.partition(".")
    inner = _without(tree[first], rest) if rest else {}
    others = {name: value for name, value in tree.items() if name != first}
    return {**others, first: inner} if inner else others


def with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    """Fill in the keys of ``algorithm`` that its preset sets and the tree does not."""
    algorithm = tree.get("algorithm", {})
    preset = algorithm.get("preset") if isinstance(algorithm, Mapping) else None
    if not isinstance(preset, str) or preset not in PRESETS:
        return tree
    return {**tree, "algorithm": merge(nest(PRESETS[preset], AlgorithmConfig), algorithm)}
