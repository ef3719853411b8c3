"""The typed configuration tree: one pydantic model per group."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rlhf_mcore.config.schema.algorithm import (
    AlgorithmConfig,
    CovarianceConfig,
    DpoConfig,
    DynamicSamplingConfig,
    KLConfig,
    KLControllerConfig,
    OverlongConfig,
    RolloutCorrectionConfig,
    SapoConfig,
)
from rlhf_mcore.config.schema.environment import EnvironmentConfig
from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.models import (
    ActorConfig,
    ActorLoraConfig,
    CriticConfig,
    LayoutConfig,
    LoraConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RecomputeConfig,
    ReferenceConfig,
    RewardModelConfig,
    ScheduleConfig,
    TeacherConfig,
)
from rlhf_mcore.config.schema.reward import (
    FunctionConfig,
    JudgeConfig,
    RemoteRewardConfig,
    RewardConfig,
    RewardRayConfig,
    RuleConfig,
    SandboxConfig,
)
from rlhf_mcore.config.schema.rollout import (
    BridgeConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    SamplingConfig,
    SpeculativeConfig,
)
from rlhf_mcore.config.schema.run import (
    AlarmRuleConfig,
    AlarmsConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    LoggingConfig,
    TrainerConfig,
)
from rlhf_mcore.config.schema.tree import Config


def _explain(kind: type[Group], error: ValidationError) -> Exception:
    from rlhf_mcore.config.problems import explain  # problems imports the schema

    return explain(kind, error)


def _assign_former(owner: Group, name: str, value: Any) -> bool:
    from rlhf_mcore.config.problems import assign_former

    return assign_former(owner, name, value)


def _show(cfg: Config) -> str:
    """Return a text with the keys that differ from their defaults, without secrets."""
    from rlhf_mcore.config.keys import changed_keys

    return f"Config({', '.join(f'{key}={value!r}' for key, value in changed_keys(cfg).items())})"


Group.explain, Group.assign_former = _explain, _assign_former
Config.__repr__ = Config.__str__ = _show  # type: ignore[assignment, method-assign]
