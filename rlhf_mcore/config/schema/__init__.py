"""The typed configuration tree: one dataclass per group. A key that is refused at its assignment is explained with all keys."""

from __future__ import annotations

from typing import Any

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
    LossScaleConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    RecomputeConfig,
    ReferenceConfig,
    RewardModelConfig,
    ScheduleConfig,
    TeacherConfig,
)
from rlhf_mcore.config.schema.rollout import (
    BridgeConfig,
    FunctionConfig,
    RewardConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    RuleConfig,
    SamplingConfig,
    SandboxConfig,
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
from rlhf_mcore.config.schema.services import JudgeConfig, RemoteRewardConfig, RewardRayConfig
from rlhf_mcore.config.schema.tree import Config

__all__ = [
    "ActorConfig",
    "ActorLoraConfig",
    "AlarmRuleConfig",
    "AlarmsConfig",
    "AlgorithmConfig",
    "BridgeConfig",
    "CheckpointConfig",
    "Config",
    "CovarianceConfig",
    "CriticConfig",
    "DataConfig",
    "DpoConfig",
    "DynamicSamplingConfig",
    "EnvironmentConfig",
    "EvaluateConfig",
    "FunctionConfig",
    "JudgeConfig",
    "KLConfig",
    "KLControllerConfig",
    "LayoutConfig",
    "LoggingConfig",
    "LoraConfig",
    "LossScaleConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OverlongConfig",
    "RecomputeConfig",
    "ReferenceConfig",
    "RemoteRewardConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RewardRayConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutLayoutConfig",
    "RuleConfig",
    "SamplingConfig",
    "SandboxConfig",
    "SapoConfig",
    "ScheduleConfig",
    "SpeculativeConfig",
    "TeacherConfig",
    "TrainerConfig",
]


def _refuse(kind: type, name: str, value: Any) -> None:
    """Explain why a key takes no such value; what explains it is imported where something is wrong."""
    from rlhf_mcore.config.assignment import refuse

    refuse(kind, name, value)


Group.refuse = _refuse
