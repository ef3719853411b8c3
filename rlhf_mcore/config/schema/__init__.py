"""The typed configuration tree: one pydantic model per group."""

from pydantic import ValidationError

from rlhf_mcore.config.errors import ConfigError
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
from rlhf_mcore.config.schema.group import HOOKS, Group
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


def _explain(kind: type[Group], error: ValidationError) -> ConfigError:
    from rlhf_mcore.config.problems import explain  # it imports the schema

    return explain(kind, error)


def _show(cfg: Config) -> str:
    from rlhf_mcore.config.keys import changed_keys  # it imports the schema

    return f"Config({', '.join(f'{key}={value!r}' for key, value in changed_keys(cfg).items())})"


HOOKS.explain, HOOKS.show = _explain, _show
