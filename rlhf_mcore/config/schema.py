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
    # layers of each stage (of each chunk, in the order of the network); null: all stages have equally many
    layers_per_stage: Optional[list[int]] = None
    cp: int = 1
    ep: int = 1
    etp: Optional[int] = None  # tensor-parallel size of an expert; null: tp
    sequence_parallel: bool = False


@dataclass
class ModelConfig:
    """The model that everything starts from, as a Hugging Face directory."""

    path: str = "???"
    tokenizer_path: Optional[str] = None  # null: model.path
    allow_other_tokenizer: bool = False  # a tokenizer_path whose tokens are not those of model.path's own tokenizer
    attention: str = "auto"  # rollout.engine=hf: auto (as transformers decides) | eager | sdpa | flash_attention_2
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
    warmup_ratio: float = 0.0  # warmup as a share of total_updates, instead; 0: warmup_updates
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
    ranks: Optional[list[int]] = None  # [first, end): the ranks that hold it; null: all
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)


@dataclass
class CriticConfig:
    """The value model of PPO, in a layout of its own. Built only when algorithm.advantage needs values."""

    path: Optional[str] = (
        None  # a language model (its value head begins at zero) or a *ForTokenClassification; null: model.path
    )
    dtype: Optional[str] = None  # null: model.dtype
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    ranks: Optional[list[int]] = None  # [first, end): the ranks that hold it; null: all
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)
    value_clip: Optional[float] = 0.2  # how far a value may move from the one before the update; null: not clipped
    normalize_returns: bool = False  # predict returns in units of their running mean and deviation
    warmup_steps: int = 0  # steps in which only the critic learns
    minibatch_size: Optional[int] = None  # prompts per update; null: trainer.minibatch_size
    ppo_epochs: Optional[int] = None  # null: trainer.ppo_epochs


@dataclass
class ReferenceConfig:
    """The frozen policy that the KL term compares with. It has the actor's layout and is built only when needed."""

    path: Optional[str] = None  # null: model.path
    offload: bool = False  # keep the weights in host memory between uses
    refresh_steps: int = 0  # take over the actor's weights every so many steps; 0: never


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
    max_num_batched_tokens: Optional[int] = None  # vllm: most tokens of one forward pass; null: vLLM's choice
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
    # planned: off | digest (hash every tensor on both sides after every sync) | full (compare with a plain load, for debugging)
    verify: str = "off"
    canary: bool = False  # after every sync, compare logprobs of a few tokens between engines and trainer
    live_cpu_weights: bool = False  # CPU: plain kernels on live weights instead of vLLM's packed copies


@dataclass
class KLControllerConfig:
    """How the weight of the KL changes over a run; it starts at ``kl.coef``."""

    name: str = "fixed"  # fixed | adaptive | linear
    target: Optional[float] = None  # adaptive: wanted KL, in nats per response token
    gain: float = 0.1  # adaptive: the weight changes by at most a fifth of it in a step
    final: Optional[float] = None  # linear: the weight after so many steps
    steps: Optional[int] = None  # linear; null: trainer.num_steps


@dataclass
class KLConfig:
    """KL divergence to the reference policy. coef 0 switches it off (no reference model is built)."""

    coef: float = 0.0
    estimator: str = "k3"  # k1 | k2 | k3
    placement: str = "loss"  # loss | reward
    clip: Optional[float] = 10.0  # k2, k3: largest KL of a token, in nats; null: no limit
    controller: KLControllerConfig = field(default_factory=KLControllerConfig)


@dataclass
class RolloutCorrectionConfig:
    """What is done about the trainer's probability of a token (or response) not being that of the engine that drew it.

    Weights and masks apply to the policy term of the loss only.
    """

    mode: str = "off"  # off | token | sequence: weigh by the ratio of the two probabilities
    cap: float = 2.0  # largest weight
    mask_low: Optional[float] = None  # tokens or sequences of a smaller ratio are left out; null: none
    mask_high: Optional[float] = None  # and those of a larger ratio


@dataclass
class OverlongConfig:
    """A soft punishment for responses that come close to the token limit."""

    enabled: bool = False
    max_tokens: Optional[int] = (
        None  # a response of this length gets the full penalty; null: rollout.sampling.max_new_tokens
    )
    cache_tokens: Optional[int] = None  # it grows over the last so many tokens; null: a fifth of max_tokens
    penalty: float = 1.0  # taken off the score


@dataclass
class DynamicSamplingConfig:
    """Replace prompts whose responses all got the same score, from which a group-relative advantage learns nothing."""

    enabled: bool = False
    max_batches: int = 10  # batches of prompts that a step may generate


@dataclass
class AlgorithmConfig:
    """What is optimised. A preset only fills in keys that are set here."""

    # grpo | dr_grpo | ppo | rloo | reinforce_plus_plus | reinforce_plus_plus_baseline | gspo | cispo | dapo | sft | reward_model
    preset: str = "grpo"
    kind: str = (
        "rl"  # rl | sft (imitate responses) | reward_model (tell chosen from rejected ones): see docs/supervised.md
    )
    # gae | grpo | rloo | reinforce | reinforce_plus_plus | reinforce_plus_plus_baseline | path/to/file.py:name
    advantage: str = "grpo"
    policy_loss: str = "ppo_clip"  # ppo_clip | gspo | cispo | path/to/file.py:name
    use_critic: str = "auto"  # auto (with gae) | true | false
    normalize_std: bool = True  # grpo: divide by the group's standard deviation
    gamma: float = 1.0  # gae, reinforce: discount of later rewards
    lam: float = 0.95  # gae: 0 trusts the critic, 1 the rewards
    whiten_advantages: bool = False  # gae, reinforce: mean 0 and deviation 1 over the tokens of a step
    bootstrap_truncated: bool = (
        False  # gae: a response that the token limit cut off ends with the critic's value, not with 0
    )
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: Optional[float] = None  # ppo_clip: bound of the ratio where the advantage is negative; null: none
    kl: KLConfig = field(default_factory=KLConfig)
    entropy_coef: float = 0.0
    centering: float = 0.0  # reward_model: pulls the sum of a pair's scores towards 0
    loss_aggregation: str = "sequence"  # token | sequence | constant
    constant_length: Optional[int] = None  # constant only; null: rollout.sampling.max_new_tokens
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)


@dataclass
class RuleConfig:
    """One rule grader and its weight in the sum. A grade g between 0 and 1 counts as incorrect + g * (correct - incorrect)."""

    name: str = "???"
    weight: float = 1.0
    correct: float = 1.0
    incorrect: float = 0.0
    pattern: Optional[str] = (
        None  # regex: of RE2's syntax, found anywhere in the response; null: the ground truth is the expression
    )
    min_chars: int = 0  # length: from here on a response has the full mark
    max_chars: Optional[int] = None  # length: and up to here; null: no limit
    margin_chars: int = 0  # length: outside of the two it falls to 0 over so many characters
    scripts: list[str] = field(
        default_factory=lambda: ["Latin"]
    )  # language: Unicode's names, such as Latin, Han, Cyrillic


@dataclass
class RewardModelConfig:
    """A Hugging Face sequence-classification model with one label, on the families and the tokenizer of model.path."""

    path: Optional[str] = None  # null: no reward model
    weight: float = 1.0  # of its score; rules and function are added to it
    dtype: Optional[str] = None  # null: model.dtype
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    ranks: Optional[list[int]] = None  # [first, end): the ranks that hold it; null: all
    offload: bool = False  # keep the weights in host memory between uses


@dataclass
class RewardConfig:
    """Where scores come from: rule graders or a function of the user's, and a reward model."""

    rules: list[RuleConfig] = field(default_factory=lambda: [RuleConfig(name="final_number")])
    # data_source: its rules, in the place of reward.rules; "aime*" is every source that begins so. Those of well-known sources are
    # built in ({}: no others); null: reward.rules for all
    sources: Optional[dict[str, list[RuleConfig]]] = None
    function: Optional[str] = None  # path/to/file.py:name, replaces the rules
    workers: Optional[int] = None  # processes of a rank that call the function; null: its share of the cores, at most 8
    timeout_s: float = 60.0  # for one response
    memory_gib: float = 8.0  # of a worker
    env: list[str] = field(
        default_factory=list
    )  # environment variables that workers see beside PATH, HOME and a few more
    on_error: str = "fail"  # a response without a score: fail (end the run) | zero (score it 0)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)


@dataclass
class DataConfig:
    """Prompts, from parquet or jsonl files."""

    train: list[str] = field(default_factory=list)
    eval: list[str] = field(default_factory=list)
    prompt_key: Any = "prompt"  # a column, or a list with one for each file of train
    answer_key: Any = None  # a column, or a list as prompt_key; null: reward_model.ground_truth, then "answer"
    eval_prompt_key: Any = None  # of the files of eval: a column, or a list with one for each; null: prompt_key
    eval_answer_key: Any = None  # likewise; null: answer_key
    response_key: str = "response"  # sft
    chosen_key: str = "chosen"  # reward_model
    rejected_key: str = "rejected"  # reward_model
    # prompts that are texts: auto (as one message of the user, where the tokenizer has a template and the text none of its special
    # tokens) | true (always) | false (as they are). Lists of messages always go through the template.
    apply_chat_template: str = "auto"
    transform: Optional[str] = (
        None  # path/to/file.py:name, called with every row; returns it, changed, or None to drop it
    )
    max_prompt_tokens: int = 512
    # sft, reward_model: of prompt and response together, instead of max_prompt_tokens; null: as many as a microbatch has room for
    max_tokens: Optional[int] = None
    overlong_prompts: str = "error"  # error | drop
    shuffle: bool = True
    weights: Optional[list[float]] = None  # share of each file of train in a step; null: one data set of all rows
    # Bounds: every rank holds all rows in memory.
    max_row_bytes: int = 16777216  # of a line of jsonl, or a cell of parquet
    max_rows: int = 2000000  # of all files of train, or of eval
    max_bytes: int = 8589934592  # of the rows of a file


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
    max_bad_updates: int = (
        5  # updates in a row, skipped because loss or gradient is not finite, after which the run ends
    )
    collective_timeout_s: int = 1800  # how long a rank waits for the others in a collective
    watchdog_s: int = (
        3600  # a rank that has not begun a new phase for so long prints its stacks and ends the job; 0: off
    )
    max_restarts: int = 0  # times that the launcher starts a failed run again, from its last checkpoint


@dataclass
class CheckpointConfig:
    """When checkpoints are saved, which of them stay, and how a run resumes. The last step is always saved."""

    save_steps: int = 20  # 0: not by steps
    save_epochs: float = 0.0  # 0: not by epochs of data.train
    save_minutes: float = 30.0  # 0: not by time
    metric_for_best_model: Optional[str] = None  # of the evaluation; a checkpoint is saved whenever it has improved
    greater_is_better: bool = True
    load_best_model_at_end: bool = False
    save_by: Optional[str] = (
        "auto"  # time limit: minutes from the start | 2026-01-01T00:00 | auto (SLURM's); null: none
    )
    save_total_limit: Optional[int] = 2  # newest checkpoints that stay; null: all
    keep_every: Optional[int] = None  # checkpoints of steps that this divides stay too
    keep: list[int] = field(default_factory=list)  # steps that are saved, and whose checkpoints stay
    mode: Optional[str] = (
        None  # of files: null (umask) | private (optimizer, state and config 0600) | 0600 | 0640 | ... (all)
    )
    archive: bool = False  # what does not stay becomes archive/checkpoint-<step>.tar.zst
    async_save: bool = False  # write in the background
    delta: bool = False  # between full saves, weights as compressed differences to the last full one
    full_every: int = 10  # delta: every so many saves is a full one
    resume: str = "auto"  # auto (the newest checkpoint, if there is one) | never | path of a checkpoint
    # what is done when data, reward, tokenizer, template or a model has another content than it had: refuse | warn
    changed_inputs: str = "refuse"
    on_damaged: str = "fallback"  # auto: fallback (to the checkpoint before a damaged one) | error
    on_failed_save: str = "stop"  # stop | continue (and try again when the next save is due)
    verify: bool = True  # check every hash before loading


@dataclass
class EvaluateConfig:
    """Evaluation on held-out prompts (data.eval): before, during and after training, and by ``rlhf-mcore evaluate``."""

    every: int = 0  # steps; 0: only before and after
    max_prompts: Optional[int] = None
    samples: int = 1  # responses per prompt
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: Optional[int] = None  # null: rollout.sampling.max_new_tokens
    prompts_per_batch: Optional[int] = None  # of an engine; null: as many as keep it busy
    # of the command only
    checkpoint: Optional[str] = None  # Hugging Face directory, checkpoint, run directory, shards; null: this run
    compare: Optional[str] = None  # what it is compared with, on the same prompts
    output_dir: Optional[str] = None  # null: evaluations/ beside the checkpoint


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
    critic: CriticConfig = field(default_factory=CriticConfig)
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
