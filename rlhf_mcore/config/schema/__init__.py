"""The typed configuration tree: one pydantic model per group."""

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
