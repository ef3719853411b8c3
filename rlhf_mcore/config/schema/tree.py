"""The tree of all groups. Every key a user may set is a field of a group, described beside it (``schema.key``).

Nothing here imports torch nor anything that does: help and configuration errors must be instant.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mcore.config.schema.algorithm import AlgorithmConfig
from rlhf_mcore.config.schema.environment import EnvironmentConfig
from rlhf_mcore.config.schema.group import Group
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


@dataclass
class Config(Group):
    """The whole tree."""

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
        more="Every library is asked for its own; docs/reliability.md lists what stays open on CUDA. On a CPU bits are equal on "
        "processors of one kind (docs/cpu.md).",
    )
    model: ModelConfig = group(ModelConfig, "what everything starts from")
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
        "[distillation](distillation.md).",
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
        "Without `environment.function` nothing does, and a response is one turn. See [environments](environments.md).",
    )
    data: DataConfig = group(DataConfig, "prompts")
    trainer: TrainerConfig = group(TrainerConfig, "size and shape of a step")
    checkpoint: CheckpointConfig = group(
        CheckpointConfig,
        "what is saved",
        "The last step is always saved. See [checkpoints](checkpoints.md).",
    )
    evaluate: EvaluateConfig = group(
        EvaluateConfig,
        "held-out prompts",
        "Those of `data.eval`, always before and after training. See [evaluation](evaluation.md).",
    )
    logging: LoggingConfig = group(LoggingConfig, "the record of a run")
    alarms: AlarmsConfig = group(AlarmsConfig, "rules on metrics, judged after every step")
