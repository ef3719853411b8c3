"""The tree of all groups. Every key of the user is a field of a group, with its description (``schema.group``).

This package must not import torch, even indirectly, because help and configuration errors must be instant.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import ValidationError, model_validator

from rlhf_mcore.config.choices import PRESETS, ROLLOUT
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.former import is_former_group, to_current
from rlhf_mcore.config.schema.algorithm import AlgorithmConfig
from rlhf_mcore.config.schema.environment import EnvironmentConfig
from rlhf_mcore.config.schema.group import HOOKS, Choices, Group, NonNegativeInt, group, is_group_type, key, to_dict
from rlhf_mcore.config.schema.models import ActorConfig, CriticConfig, ModelConfig, ReferenceConfig, TeacherConfig
from rlhf_mcore.config.schema.reward import RewardConfig
from rlhf_mcore.config.schema.rollout import BridgeConfig, RolloutConfig
from rlhf_mcore.config.schema.run import (
    AlarmsConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LoggingConfig,
    TrainerConfig,
)


def _is_directory_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


DirectoryName = Annotated[str, Choices(allows=_is_directory_name, form="a name without slashes")]


class Config(Group):
    """A configuration: ``rm.Config(model="my-model", algorithm="grpo", trainer={"num_steps": 5})``.

    Args:
        settings: names of groups with dicts, or dotted keys (``rm.Config({"actor.optimizer.lr": 1e-6})``).
        keys: the same as keywords, which win over ``settings``. A preset fills in the keys that are not given.

    Raises:
        ConfigError: there are unknown keys or invalid values; it names all of them.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, /, **keys: Any) -> None:
        if settings is not None and not isinstance(settings, Mapping):
            raise ConfigError(
                f"settings={settings!r} is not valid; give a dict, or read a file with rm.load_config(path)"
            )
        try:
            super().__init__(**with_preset(with_keys_of_today(nest({**(settings or {}), **keys}))))
        except ValidationError as error:
            raise HOOKS.explain(Config, error) from None

    def __repr__(self) -> str:
        """Return a text with the keys that differ from their defaults, without secrets."""
        return HOOKS.show(self)

    __str__ = __repr__

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Config:
        """Build a configuration from nested dicts. A preset fills in nothing.

        Raises:
            ValidationError: there are unknown keys or invalid values; it lists all of them.
        """
        return cls.__pydantic_validator__.validate_python(tree, self_instance=cls.__new__(cls))

    def updated(self, settings: Mapping[str, Any] | None = None) -> Config:
        """Return a validated copy with other values for some keys, named as in ``Config``. A preset fills in nothing.

        Raises:
            ConfigError: there are unknown keys or invalid values; it names all of them.
        """
        try:
            return self.read(with_keys_of_today(merge(to_dict(self), nest(settings or {}))))
        except ValidationError as error:
            raise HOOKS.explain(Config, error) from None

    @model_validator(mode="after")
    def _choose_environment(self) -> Config:
        if self.rollout.function is not None and self.environment.function is None:
            self.environment.function = ROLLOUT
        return self

    @property
    def run_directory(self) -> Path:
        """``<output_dir>/<project>/<experiment>``."""
        return Path(self.output_dir, self.project, self.experiment)

    output_dir: str = key("outputs", "parent of run directories, `<output_dir>/<project>/<experiment>/`")
    project: DirectoryName = key("rlhf_mcore", "project; first part of the run directory's name")
    experiment: DirectoryName = key("default", "experiment; second part of the run directory's name")
    seed: NonNegativeInt = key(0, "seed for the prompt order and for every sampled response", is_fixed=True)
    """The seed of a response is derived from this seed, the step, the prompt and the sample."""
    deterministic: bool = key(False, "use deterministic kernels on CUDA (slower); CPU runs are always deterministic")
    """Every library is set to its deterministic mode; docs/operations/determinism.md lists the exceptions on CUDA. CPU
    results are equal, bit for bit, on processors of one kind (docs/operations/cpu.md)."""
    model: ModelConfig = group(ModelConfig, "the model that training starts from")
    """`model: PATH` is short for `model: {path: PATH}`."""
    actor: ActorConfig = group(ActorConfig, "the policy being trained")
    critic: CriticConfig = group(CriticConfig, "the value model")
    """Built only if `algorithm.advantage` needs values (`gae`). Its layout, optimizer and precision are independent of
    the actor's."""
    reference: ReferenceConfig = group(ReferenceConfig, "the frozen policy")
    """Built only if `algorithm.kl.coef` is above 0, or `algorithm.dpo.loss` uses a reference. It has the actor's
    layout."""
    teacher: TeacherConfig = group(TeacherConfig, "a policy to learn from")
    """Built only with `teacher.path`, which has an independent layout and precision, or with `teacher.weights`. See
    [distillation](algorithms/distillation.md)."""
    rollout: RolloutConfig = group(RolloutConfig, "the engines that generate")
    """Without `rollout.placement: disaggregated` there are world size / (ranks of an engine) engines."""
    bridge: BridgeConfig = group(BridgeConfig, "weight sync from the trainer to the engines")
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "the training objective")
    """A preset fills in keys that are not set. `algorithm: dr_grpo` is short for `algorithm: {preset: dr_grpo}`.
    `configs/base.yaml` comments out keys that a preset sets."""
    reward: RewardConfig = group(RewardConfig, "scores of responses")
    """The score is a weighted sum of rules or the result of your function, plus the score of a reward model."""
    environment: EnvironmentConfig = group(EnvironmentConfig, "answers the policy between its turns")
    """Without `environment.function` there is no environment, and a response is one turn. See
    [environments](guide/environments/index.md)."""
    data: DataConfig = group(DataConfig, "prompts")
    trainer: TrainerConfig = group(TrainerConfig, "size and shape of a training step")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "checkpoints and resume")
    """The last step is always saved. See [checkpoints](operations/checkpoints.md)."""
    evaluate: EvaluateConfig = group(EvaluateConfig, "evaluation on held-out prompts")
    """The prompts of `data.eval` are evaluated before and after every training. See
    [evaluation](guide/evaluation.md)."""
    logging: LoggingConfig = group(LoggingConfig, "logging of a run")
    alarms: AlarmsConfig = group(AlarmsConfig, "rules on metrics, checked after every step")


SHORT = {"algorithm": "preset", "model": "path"}  # the key that a text sets if it is given instead of a group


def nest(settings: Mapping[str, Any], kind: type[Group] = Config) -> dict[str, Any]:
    """Return nested dicts for dotted keys. ``algorithm: dr_grpo`` sets its preset, ``model: path`` its path.

    Args:
        settings: keys of ``kind``. Names within a table of the user do not change.
        kind: the group that contains the keys.
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
    """Merge nested dicts. Any other value replaces the earlier value."""
    if isinstance(before, Mapping) and isinstance(value, Mapping):
        return {**before, **{name: merge(before.get(name), child) for name, child in value.items()}}
    return value


def with_keys_of_today(tree: dict[str, Any]) -> dict[str, Any]:
    """Replace keys of the last release by current keys, with a warning for each. Keys of a Group are always current.

    Raises:
        ConfigError: a former key has a value that it never allowed.
    """
    return nest(to_current(dict(_flatten(tree))))


def _flatten(tree: Mapping[str, Any], kind: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values of a tree, without the names within tables of the user."""
    for name, value in tree.items():
        hint = kind.model_fields[name].annotation if name in kind.model_fields else Group
        if isinstance(value, Mapping) and is_group_type(hint) and (hint is not Group or is_former_group(prefix + name)):
            yield from _flatten(value, hint, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def with_preset(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree with the keys of ``algorithm`` that its preset sets, unless the tree sets them."""
    algorithm = tree.get("algorithm", {})
    preset = algorithm.get("preset") if isinstance(algorithm, Mapping) else None
    if not isinstance(preset, str) or preset not in PRESETS:
        return tree
    return {**tree, "algorithm": merge(nest(PRESETS[preset], AlgorithmConfig), algorithm)}
