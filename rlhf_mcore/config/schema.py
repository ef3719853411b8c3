"""The typed configuration tree. One dataclass per group; every key a user may set is a field here.

This module imports neither torch nor anything that does: help and configuration errors must be instant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional


@dataclass
class LayoutConfig:
    """How a trained model is cut: tensor, pipeline (virtual), context and expert parallel sizes.

    The data-parallel size follows from the world size.
    """

    tp: int = 1
    pp: int = 1
    vpp: Optional[int] = None  # model chunks per pipeline rank (interleaved schedule); null: no interleaving
    cp: int = 1
    ep: int = 1
    etp: Optional[int] = None  # tensor-parallel size of an expert; null: tp
    sequence_parallel: bool = False


@dataclass
class ModelConfig:
    """The model that everything starts from, as a Hugging Face directory."""

    path: str = "???"
    tokenizer_path: Optional[str] = None  # null: model.path
    dtype: str = "auto"  # auto (fp32 on the CPU, bf16 on CUDA) | fp32 | bf16 | fp16
    layer_spec: str = "auto"  # auto | te | local


@dataclass
class LossScaleConfig:
    """Dynamic loss scaling, used by fp16 only."""

    initial: float = 65536.0
    minimum: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2


@dataclass
class ScheduleConfig:
    """Learning-rate schedule, counted in optimizer updates."""

    name: str = "constant"  # constant | linear | cosine
    warmup_updates: int = 0
    total_updates: Optional[int] = None  # null: as many as the run makes
    min_lr: float = 0.0


@dataclass
class OptimizerConfig:
    """AdamW with fp32 master weights, sharded over data-parallel ranks."""

    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # 0 switches clipping off
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)


@dataclass
class RecomputeConfig:
    """Activation recomputation: off, selective (core attention) or full layers."""

    granularity: str = "off"  # off | selective | full
    method: str = "uniform"  # full only: uniform | block
    num_layers: int = 1  # full only: layers per unit (uniform) or recomputed layers per stage (block)


@dataclass
class MoEConfig:
    """Training of mixture-of-experts models."""

    aux_loss_coef: float = 0.0  # of the load-balancing loss of every layer; 0: off


@dataclass
class ActorConfig:
    """The policy being trained."""

    layout: LayoutConfig = field(default_factory=LayoutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)


@dataclass
class ReferenceConfig:
    """The frozen policy that the KL term compares with. It has the actor's layout and is built only when needed."""

    path: Optional[str] = None  # null: model.path


@dataclass
class RolloutLayoutConfig:
    """Tensor-parallel size of a rollout engine; world size / tp engines run side by side."""

    tp: int = 1


@dataclass
class SamplingConfig:
    """How responses are drawn. temperature 0 is greedy, top_k -1 and top_p 1 are off."""

    n: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 256


@dataclass
class RolloutConfig:
    """The engines that generate responses, in the trainer's processes."""

    engine: str = "vllm"  # vllm | hf
    placement: str = "colocated"  # colocated
    layout: RolloutLayoutConfig = field(default_factory=RolloutLayoutConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    max_model_len: Optional[int] = None  # null: data.max_prompt_tokens + sampling.max_new_tokens
    max_num_seqs: int = 256
    gpu_memory_utilization: float = 0.5  # CUDA: share of the device's memory an engine may use
    kv_cache_gib: float = 0.5  # CPU: size of an engine's KV cache
    prefix_caching: bool = True
    enforce_eager: bool = False
    sleep: bool = True  # CUDA: give weights' and cache's memory back while training


@dataclass
class BridgeConfig:
    """How the actor's weights reach the engines."""

    # planned: every byte straight to its place in the engine's parameters | gather: full tensors, one at a time (the baseline)
    method: str = "planned"
    bucket_bytes: int = 268435456  # planned: limit of what a rank sends, and receives, at a time; two are in flight
    verify: str = "off"  # planned: off | digest (hash every tensor on both sides after every sync)
    live_cpu_weights: bool = False  # CPU: plain kernels on live weights instead of vLLM's packed copies


@dataclass
class KLConfig:
    """KL divergence to the reference policy. coef 0 switches it off (no reference model is built)."""

    coef: float = 0.0
    estimator: str = "k3"  # k1 | k2 | k3
    placement: str = "loss"  # loss | reward


@dataclass
class AlgorithmConfig:
    """What is optimised. A preset only fills in keys that are set here."""

    preset: str = "grpo"  # grpo | dr_grpo
    advantage: str = "grpo"  # grpo
    normalize_std: bool = True  # divide group-relative advantages by the group's standard deviation
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    loss_aggregation: str = "sequence"  # token | sequence | constant
    constant_length: Optional[int] = None  # constant only; null: rollout.sampling.max_new_tokens


@dataclass
class RuleConfig:
    """One rule grader and its weight in the sum."""

    name: str = "???"
    weight: float = 1.0


@dataclass
class RewardConfig:
    """Where scores come from: rule graders, or a function of the user's."""

    rules: list[RuleConfig] = field(default_factory=lambda: [RuleConfig(name="final_number")])
    function: Optional[str] = None  # path/to/file.py:name, replaces the rules


@dataclass
class DataConfig:
    """Prompts, from parquet or jsonl files."""

    train: list[str] = field(default_factory=list)
    eval: list[str] = field(default_factory=list)
    prompt_key: str = "prompt"
    answer_key: Optional[str] = None  # null: reward_model.ground_truth, then "answer"
    max_prompt_tokens: int = 512
    overlong_prompts: str = "error"  # error | drop
    shuffle: bool = True


@dataclass
class TrainerConfig:
    """The size and shape of a step."""

    num_steps: int = 100
    prompts_per_step: int = 32
    minibatch_size: Optional[int] = None  # prompts per optimizer update; null: prompts_per_step
    ppo_epochs: int = 1
    max_tokens_per_microbatch: int = 8192
    packing: bool = True  # false: padded microbatches
    world_size: Optional[int] = None  # processes that `rlhf-mcore train` starts; null: the fewest that fit
    threads_per_rank: int = 1  # CPU: compute threads of a process


@dataclass
class CheckpointConfig:
    """When the actor is written as a Hugging Face model directory. It is always written at the end."""

    save_steps: int = 0  # 0: only at the end


@dataclass
class EvaluateConfig:
    """Evaluation on held-out prompts (data.eval), before, during and after training."""

    every: int = 0  # steps; 0: only before and after
    max_prompts: Optional[int] = None
    temperature: float = 0.0
    max_new_tokens: Optional[int] = None  # null: rollout.sampling.max_new_tokens


@dataclass
class LoggingConfig:
    """Where a run's record goes, beside metrics.jsonl."""

    console: str = "auto"  # auto | rich | plain | off
    tensorboard: bool = True
    rollouts_every: int = 1  # steps between rollouts/step-*.jsonl; 0: never


@dataclass
class Config:
    """The whole tree."""

    output_dir: str = "outputs"
    project: str = "rlhf_mcore"
    experiment: str = "default"
    seed: int = 0
    deterministic: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    bridge: BridgeConfig = field(default_factory=BridgeConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data: DataConfig = field(default_factory=DataConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


PRESETS: dict[str, dict[str, Any]] = {
    # Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), eq. 3-4: group-normalised advantage, mean per sequence, k3 KL
    # in the loss.
    "grpo": {"advantage": "grpo", "normalize_std": True, "loss_aggregation": "sequence"},
    # Liu et al. 2025, Understanding R1-Zero-Like Training (arXiv 2503.20783): no std, constant length.
    "dr_grpo": {"advantage": "grpo", "normalize_std": False, "loss_aggregation": "constant"},
}
