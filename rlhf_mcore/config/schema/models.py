"""Groups of the models: their source, their layout, and the training of actor and critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from annotated_types import Ge, Gt, Le, Lt

from rlhf_mcore.config.schema.group import (
    Decay,
    Fraction,
    Group,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Size,
    group,
    key,
)

Dtype = Literal["auto", "fp32", "bf16", "fp16"]
Offload = Literal["auto", "never", "state", "always"]
RecomputedPart = Literal["core_attn", "mlp", "moe", "moe_act", "shared_experts", "layernorm", "mla_up_proj"]
FrozenOffload = Literal["auto", "never", "always", "by_layer"]


class LayoutConfig(Group):
    """Set how a trained model is split over ranks. The data-parallel size follows from the world size."""

    tp: Size = key(1, "tensor-parallel size")
    pp: Size = key(1, "pipeline-parallel size (number of stages)")
    vpp: Optional[Annotated[int, Ge(2), Le(1024)]] = key(None, "model chunks per stage (interleaved schedule)")
    layers_per_stage: Optional[list[PositiveInt]] = key(None, "layers per stage, such as `[3, 5]`; null: equal numbers")
    """With `vpp` per chunk, in network order. Use it if `pp` (times `vpp`) does not divide the layers, or to leave
    memory for the embeddings."""
    cp: Size = key(1, "context-parallel size: number of ranks that split the tokens of each sequence")
    """Microbatch limits count the tokens of all these ranks. See [long
    sequences](scale/parallelism.md#long-sequences)."""
    ep: Size = key(1, "expert-parallel size: number of ranks of a pipeline stage that split the experts of a layer")
    """`ep` · `etp` must divide the ranks of a stage, and `ep` the number of experts."""
    etp: Optional[Size] = key(None, "tensor-parallel size of an expert; null: `tp`, as `ep=1` requires")
    sequence_parallel: bool = key(False, "split activations outside attention and MLP over the tensor-parallel ranks")
    """It requires `tp` of at least 2. MoE models with such a `tp` require it."""


class ModelConfig(Group):
    """The model that training starts from."""

    path: str = key("???", "Hugging Face directory (config.json, tokenizer, safetensors), or a Hub id, `ORG/NAME`")
    """See [Hub ids](guide/data.md#hub-ids). Before any process starts, the headers of the weights (embedding, first and
    last layer) are compared with `config.json`."""
    tokenizer_path: Optional[str] = key(None, "directory of the tokenizer; null: `model.path`")
    allow_other_tokenizer: bool = key(False, "allow a `tokenizer_path` whose tokens differ from those in `model.path`")
    """Otherwise such a tokenizer is rejected, because the model would read wrong tokens."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = key("auto", "`hf`: attention implementation")
    """`auto`: the default of transformers. `flash_attention_2`: CUDA; needs the package flash-attn."""
    dtype: Dtype = key("auto", "data type of weights and activations", is_fixed=True)
    """`auto`: fp32 on a CPU, bf16 on CUDA. Master weights are always fp32."""
    layer_spec: Literal["auto", "te", "local"] = key("auto", "implementation of Megatron's layers")
    """`auto`: Transformer Engine if it is installed, else local."""


class ScheduleConfig(Group):
    """Learning-rate schedule, counted in optimizer updates."""

    name: Literal["constant", "linear", "cosine"] = key("constant", "decay of the learning rate after warm-up")
    warmup: NonNegativeFloat = key(0.0, "linear warm-up: a share of all updates if below 1, else a number of updates")
    """It is rounded up to whole updates."""
    total_updates: Optional[PositiveInt] = key(None, "updates until `min_lr` is reached; null: all updates of the run")
    min_lr: NonNegativeFloat = key(0.0, "learning rate at the end of the decay")


class OptimizerConfig(Group):
    """fp32 master weights and moments, sharded over data-parallel ranks."""

    name: Literal["adamw", "muon", "sgd"] = key("adamw", "optimizer", is_fixed=True)
    """`muon`: Muon for the matrices of the layers, AdamW for all other weights, with the same `lr` and `weight_decay`.
    `sgd`: with momentum. See [Muon and SGD](scale/tuning.md#muon-and-sgd)."""
    momentum: Decay = key(0.95, "decay of the momentum; `muon` uses Nesterov momentum", only_with=".name=muon or sgd")
    lr: NonNegativeFloat = key(1e-6, "peak learning rate")
    beta1: Decay = key(0.9, "decay of the first moment", only_with=".name=adamw or muon")
    beta2: Decay = key(0.999, "decay of the second moment", only_with=".name=adamw or muon")
    eps: PositiveFloat = key(1e-8, "added to the denominator of an update", only_with=".name=adamw or muon")
    weight_decay: NonNegativeFloat = key(0.0, "decoupled weight decay")
    clip_grad: NonNegativeFloat = key(1.0, "maximum norm of the gradient of the whole model; 0: no clipping")
    offload: Fraction = key(
        0.0, "share of masters and moments in host memory, which the CPU steps", only_with=".name=adamw"
    )
    """Unlike `actor.offload`, this also saves device memory during an update. See [host
    steps](scale/memory.md#step-the-optimizer-on-the-host)."""
    state_dtype: Literal["fp32", "bf16"] = key("fp32", "data type of moments on the device", only_with=".name=adamw")
    """`bf16`: bf16 moments and masters as 16-bit remainders, 6 bytes per weight instead of 12. It needs bf16 weights and
    Transformer Engine's FusedAdam. See [bf16 state](scale/memory.md#bf16-optimizer-state)."""
    schedule: ScheduleConfig = group(ScheduleConfig, "counted in optimizer updates")


class RecomputeConfig(Group):
    """Activation recomputation."""

    granularity: Literal["off", "selective", "full", "block"] = key("off", "recomputed activations")
    """`selective`: the parts of a layer that `modules` names. `full`: all layers, in groups of `num_layers` (Megatron's
    method uniform). `block`: the first `num_layers` layers of a stage (Megatron's method block)."""
    num_layers: PositiveInt = key(1, "`full`: layers per group; `block`: layers of a stage")
    modules: list[RecomputedPart] = key(["core_attn"], "`selective`: parts of a layer whose activations are recomputed")
    """`moe`: a whole MoE layer. `moe_act`: the activation between an expert's two products. `moe_act` and `layernorm`
    require Transformer Engine."""

    @property
    def whole_layers(self) -> bool:
        """Return whether whole layers are recomputed."""
        return self.granularity in ("full", "block")


class MoEConfig(Group):
    """Training of mixture-of-experts models."""

    aux_loss_coef: NonNegativeFloat = key(0.0, "weight of the load-balancing loss, summed over layers; 0: off")
    """The Switch Transformers loss, which is 1 per layer at perfect balance. It is reported as `actor/load_balance`;
    `loss/total` does not include it."""
    expert_bias_rate: Fraction = key(0.0, "change of a router bias per expert and update (DeepSeek-V3); 0: frozen")
    """After each update it is added to the bias of experts that received fewer tokens than the mean, and subtracted for
    the others (arXiv 2408.15664). DeepSeek-V3 was trained with 0.001."""


class VisionConfig(Group):
    """The vision tower of a model that reads images (Qwen2.5-VL, Qwen3-VL)."""

    train: Literal["none", "merger", "all"] = key("none", "trained part of the vision tower", is_fixed=True)
    """`none`: engines receive the tower once. `merger`: the projections from patches to tokens. `all`: the whole tower.
    See [images](guide/images.md#train-the-vision-tower)."""


class MTPConfig(Group):
    """MTP layers: layers that predict tokens after the next one (DeepSeek-V3, GLM-4.5)."""

    mode: Literal["keep", "train", "joint"] = key("keep", "training of the MTP layers of `model.path`", is_fixed=True)
    """`keep`: not trained; checkpoints contain them unchanged. `train`: they learn to predict the responses; the rest of
    the model gets the same update as with `keep`. `joint`: `algorithm.kind: sft` only; their loss trains the whole
    model. See [MTP](algorithms/mtp.md)."""
    loss_coef: PositiveFloat = key(0.1, "factor of the MTP loss, a mean over layers", only_with="actor.mtp.mode=joint")
    """As Megatron's `mtp_loss_scaling_factor`."""


class LoraConfig(Group):
    """Low-rank adapters, trained instead of the weights."""

    rank: Optional[PositiveInt] = key(None, "rank of the adapters; null: all weights are trained", is_fixed=True)
    alpha: Optional[PositiveFloat] = key(None, "scale; null: 2 · `rank`", is_fixed=True, only_with=".rank")
    """The output is multiplied by it and divided by `rank`."""
    dropout: Decay = key(0.0, "share of an adapter's inputs that is dropped during training", only_with=".rank")
    targets: list[str] = key(["all-linear"], "linear layers with an adapter", is_fixed=True, only_with=".rank")
    """`all-linear` (every linear layer except the output layer and the router), last parts of names (`q_proj`), or
    patterns of whole names (`*.layers.0.*`). Add `embed_tokens` and `lm_head` for the embedding and the output
    layer."""
    init: Literal["gaussian", "pissa"] = key("gaussian", "initial values of adapters", is_fixed=True, only_with=".rank")
    """`gaussian`: A is initialised as in PEFT, B is zero. `pissa`: the principal singular vectors of the weights; saved
    adapters have twice the rank. The run starts with the output of the model in both cases."""
    use_rslora: bool = key(False, "divide by the square root of `rank`", is_fixed=True, only_with=".rank")
    use_dora: bool = key(False, "also train a magnitude per output (DoRA)", is_fixed=True, only_with=".rank")
    path: Optional[str] = key(None, "PEFT directory with initial adapters; null: new adapters", only_with=".rank")


class ActorLoraConfig(LoraConfig):
    """Adapters of the policy, which are also sent to the engines."""

    sync: Literal["auto", "merge", "adapter"] = key("auto", "weights that engines receive", only_with=".rank")
    """`merge`: whole weights, with the adapters added. `adapter`: only A and B. `auto`: `adapter` if the engine
    supports it, else `merge`."""


class ActorConfig(Group):
    """The policy being trained."""

    layout: LayoutConfig = group(LayoutConfig, "parallel layout; the data-parallel size is world_size / (tp * pp * cp)")
    ranks: Optional[list[int]] = key(None, "`[first, end)`: global ranks that hold the model; null: all")
    """Roles on disjoint ranks are updated at the same time."""
    optimizer: OptimizerConfig = group(OptimizerConfig, "fp32 master weights, sharded over data-parallel ranks")
    recompute: RecomputeConfig = group(RecomputeConfig, "activation recomputation: less memory, more compute")
    moe: MoEConfig = group(MoEConfig, "mixture-of-experts (MoE) models")
    router_replay: Literal["off", "rollout", "old_logprobs"] = key("off", "MoE: source of the policy's expert choices")
    """`off`: the router chooses in every pass. `rollout`: all passes replay the choices of the engine (R3).
    `old_logprobs`: updates replay the choices of the pass for old logprobs (R2). See [router
    replay](algorithms/router-replay.md)."""
    mtp: MTPConfig = group(MTPConfig, "multi-token prediction (MTP) layers")
    indexer: Literal["frozen", "warm_up", "sparse"] = key(
        "frozen", "training of the indexers of sparse attention", is_fixed=True
    )
    """`warm_up`: `algorithm.kind: sft` only; attention is dense, and only the indexers learn to predict its distribution.
    `sparse`: they learn it for the selected keys, in addition to the model's own update. See
    [sparse attention](algorithms/sparse-attention.md)."""
    vision: VisionConfig = group(VisionConfig, "vision tower")
    lora: ActorLoraConfig = group(ActorLoraConfig, "low-rank adapters")
    """See [adapters](algorithms/lora.md)."""
    freeze: list[str] = key([], "Hugging Face names, or patterns, of weights that are not trained", is_fixed=True)
    """For example `model.layers.0.*`. Frozen weights are saved as usual, and sent only to engines that lack them. Weights
    that Megatron stores in one tensor (q, k and v; gate and up) must be frozen together."""
    fp8: Optional[Literal["blockwise"]] = key(None, "FP8 matrix products, by Transformer Engine on Hopper GPUs")
    """`blockwise`: all passes of the policy and the reference, with the quantised weights that `rollout.quantization: fp8`
    sends. Checkpoints do not change. See [FP8](scale/low-precision.md#train-with-8-bit-products)."""
    megatron: Optional[dict[str, Any]] = key(None, "fields of Megatron-core's configuration classes, by name")
    """For example `{overlap_grad_reduce: true}`: fields of TransformerConfig, DistributedDataParallelConfig and
    OptimizerConfig. Fields that other keys set are rejected. The reference uses the same TransformerConfig fields. See
    [performance](scale/tuning.md#megatrons-own-settings)."""
    offload: Offload = key("auto", "parts of the model that leave the device while engines or other models use it")
    """`auto`: as much as `rlhf-mcore plan` finds necessary; nothing on a CPU. `state`: gradients are freed, and the
    optimizer state is on the host except during an update. `always`: also the weights, between passes. Results do not
    change. See [memory](scale/memory.md#what-leaves-the-device-and-when)."""


class CriticConfig(Group):
    """The value model."""

    path: Optional[str] = key(None, "language model, or `*ForTokenClassification` directory with one label")
    """The new value head of a language model starts at zero. `null`: `model.path`."""
    dtype: Optional[Dtype] = key(None, "data type of weights and activations; null: `model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "independent of the actor's, over `critic.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`; null: all")
    optimizer: OptimizerConfig = group(lambda: OptimizerConfig(lr=1e-5), "independent of the actor's")
    recompute: RecomputeConfig = group(RecomputeConfig, "activation recomputation")
    moe: MoEConfig = group(MoEConfig, "mixture-of-experts (MoE) models")
    lora: LoraConfig = group(LoraConfig, "adapters of the critic; the value head is trained in full")
    """See [adapters](algorithms/lora.md)."""
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`")
    offload: Offload = key("auto", "as `actor.offload`")
    value_clip: Optional[PositiveFloat] = key(0.2, "value clipping of PPO: largest change; null: no clipping")
    """The loss of a value is the larger of its squared errors with and without clipping."""
    normalize_returns: bool = key(False, "predict returns in units of their running mean and standard deviation")
    """As in MAPPO, arXiv 2103.01955. Outliers beyond 100 deviations are clamped before they enter the statistics."""
    warmup_steps: NonNegativeInt = key(0, "number of first steps in which only the critic learns")
    minibatch_size: Optional[PositiveInt] = key(None, "prompts per update; null: `trainer.minibatch_size`")
    ppo_epochs: Optional[PositiveInt] = key(None, "passes over the responses of a step; null: `trainer.ppo_epochs`")


class ReferenceConfig(Group):
    """The frozen policy that the KL, or a loss over pairs, compares the actor with."""

    path: Optional[str] = key(None, "frozen policy; null: `model.path`")
    offload: FrozenOffload = key("auto", "offloading of the weights to the host")
    """`auto`: if a phase would not fit otherwise, as `rlhf-mcore plan` finds; never on a CPU. `always`: the weights are in
    host memory between uses. `by_layer`: also during a pass, which waits for the copies if it has few tokens. See
    [memory](scale/memory.md#what-leaves-the-device-and-when)."""
    refresh_steps: NonNegativeInt = key(0, "interval in steps at which the actor's weights are copied; 0: never")
    precompute: bool = key(False, "compute logprobs once, before training", only_with="algorithm.kind=dpo")
    """The reference is then freed. Otherwise it runs before each update and each evaluation."""


_SPREAD = "forward_kl or reverse_kl or jsd"  # divergences over distributions


class TeacherConfig(Group):
    """A policy from which a student learns, token by token."""

    path: Optional[str] = key(None, "the teacher model; its tokenizer must equal the tokenizer of `model.path`")
    sources: Optional[dict[str, str]] = key(None, "directory per data source: `{math: models/A, code: models/B}`")
    """`teacher.path` teaches all other sources. All teachers share layout, precision and offloading."""
    weights: Literal["path", "actor", "average"] = key("path", "weights of the teacher", is_fixed=True)
    """`path`: the frozen weights of `teacher.path`. `actor`: the policy itself, before the step's updates; requires
    `teacher.context`. `average`: a running average of the policy, in fp32 and in its layout, stored in checkpoints."""
    decay: Decay = key(0.99, "share of the old average that remains per step", only_with="teacher.weights=average")
    context: Optional[str] = key(None, "`path/to/file.py:function` that returns the teacher's prompts")
    """`function(prompt, ground_truth, extra_info, data_source)` returns messages or a text, such as the prompt with
    information that the student lacks. `null`: the teacher reads the student's prompts. See
    [distillation](algorithms/distillation.md#another-prompt)."""
    divergence: Literal["k1", "forward_kl", "reverse_kl", "jsd"] = key("k1", "minimised divergence from the teacher")
    """`k1`: reverse KL, estimated at the sampled token and added to its advantage. `forward_kl`, `reverse_kl` and `jsd`
    (generalised Jensen-Shannon) compare distributions, and are added to the loss. See
    [divergences](algorithms/distillation.md#divergences)."""
    beta: Annotated[float, Gt(0), Lt(1)] = key(0.5, "weight of the teacher in the mixture", only_with=".divergence=jsd")
    top_k: PositiveInt = key(64, "most probable tokens of a teacher's distribution", only_with=f".divergence={_SPREAD}")
    """All other tokens count as one event. A value of the vocabulary size is exact."""
    coef: PositiveFloat = key(1.0, "weight of the teacher, in the advantages or in the loss")
    dtype: Optional[Dtype] = key(None, "data type of weights and activations; null: `model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "independent of the actor's, over `teacher.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`; null: all")
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`; only fields of TransformerConfig")
    offload: FrozenOffload = key("auto", "as `reference.offload`")


class RewardModelConfig(Group):
    """A reward model. Its score is added to the score of the rules or the function."""

    path: Optional[str] = key(None, "`*ForSequenceClassification` directory with one label and the policy's tokenizer")
    """`reward.rules=[]` disables the rules."""
    weight: float = key(1.0, "weight of its score in the sum")
    dtype: Optional[Dtype] = key(None, "data type of weights and activations; null: `model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "independent of the actor's, over `reward.model.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`; null: all")
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`; only fields of TransformerConfig")
    offload: FrozenOffload = key("auto", "as `reference.offload`")
