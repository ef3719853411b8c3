"""Groups of the models: their source, their layout, and the training of actor and critic."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FINITE, FROM_0_TO_1, Range, group, key, one_of

_PARTS = Range(1, 4096)  # sizes of a layout; models have fewer layers, heads and experts
_BETA = Range(0, 1, open_high=True)
_DTYPES = one_of(auto="fp32 on a CPU, bf16 on CUDA", fp32="", bf16="", fp16="")
_OFFLOADS = one_of(
    auto="as much as `rlhf-mcore plan` finds necessary; nothing on a CPU",
    never="",
    state="gradients are freed, and the optimizer state is on the host except during an update",
    always="as `state`, and the weights are on the host between passes",
)
_OFFLOAD = "parts of the model that leave the device while engines or other models use it"
_OFFLOADS_FROZEN = one_of(
    auto="if a phase would not fit otherwise, as `rlhf-mcore plan` finds; never on a CPU",
    never="",
    always="the weights are in host memory between uses",
    by_layer="also during a pass; at most two layers are on the device",
)
_BY_LAYER = (
    "With `by_layer` each microbatch copies the layers again. The next layer is copied while one computes. A pass "
    "over few tokens waits for the copies."
)
_RANKS = "`[first, end)`: global ranks that hold the model"


class LayoutConfig(Group):
    """Set how a trained model is split over ranks. The data-parallel size follows from the world size."""

    tp: int = key(1, "tensor-parallel size", _PARTS)
    pp: int = key(1, "pipeline-parallel size (number of stages)", _PARTS)
    vpp: Optional[int] = key(
        None,
        "virtual pipeline size: model chunks per stage (interleaved schedule)",
        Range(2, 1024),
        null="no interleaving",
    )
    layers_per_stage: Optional[list[int]] = key(
        None,
        "number of layers per stage, such as `[3, 5]`; with `vpp` per chunk, in network order",
        null="equal numbers",
        more="Use it if `pp` (times `vpp`) does not divide the layers, or to leave memory for the embeddings.",
    )
    cp: int = key(
        1,
        "context-parallel size: number of ranks that split the tokens of each sequence",
        _PARTS,
        more="Use it for long sequences. A rank holds 1/`cp` of the activations of a microbatch; microbatch limits count the "
        "tokens of all these ranks. Sequences are padded to a multiple of 2 · `cp`.",
    )
    ep: int = key(
        1,
        "expert-parallel size: number of ranks of a pipeline stage that split the experts of a layer",
        _PARTS,
        more="`ep` · `etp` must divide the ranks of a stage, and `ep` the number of experts.",
    )
    etp: Optional[int] = key(
        None, "tensor-parallel size of an expert", _PARTS, null="`tp`", more="With `ep=1` it must equal `tp`."
    )
    sequence_parallel: bool = key(
        False,
        "split activations outside attention and MLP over the tensor-parallel ranks",
        more="It requires `tp` of at least 2. MoE models with such a `tp` require it.",
    )


class ModelConfig(Group):
    """The model that training starts from."""

    path: str = key(
        "???",
        "directory in Hugging Face format (`config.json`, tokenizer, safetensors), or a Hub id, `ORG/NAME`",
        more="See [Hub ids](guide/data.md#hub-ids). Before any process starts, the headers of the weights (embedding, first "
        "and last layer) are compared with `config.json`.",
    )
    tokenizer_path: Optional[str] = key(None, "directory of the tokenizer", null="`model.path`")
    allow_other_tokenizer: bool = key(
        False,
        "allow a `tokenizer_path` whose tokens differ from the tokenizer in `model.path`",
        more="Otherwise such a tokenizer is rejected, because the model would read wrong tokens.",
    )
    attention: str = key(
        "auto",
        "attention implementation; `rollout.engine: hf` only",
        one_of(
            auto="the default of transformers",
            eager="",
            sdpa="",
            flash_attention_2="CUDA; needs the package flash-attn",
        ),
    )
    dtype: str = key(
        "auto", "data type of weights and activations", _DTYPES, more="Master weights are always fp32.", is_fixed=True
    )
    layer_spec: str = key(
        "auto",
        "implementation of Megatron's layers",
        one_of(auto="Transformer Engine if it is installed, else local", te="", local=""),
    )


class ScheduleConfig(Group):
    """Learning-rate schedule, counted in optimizer updates."""

    name: str = key(
        "constant", "decay of the learning rate to `min_lr` after warm-up", one_of("constant", "linear", "cosine")
    )
    warmup: float = key(
        0.0,
        "length of the linear warm-up: a share of `total_updates` if below 1, else a number of updates; 0: none",
        AT_LEAST_0,
        more="It is rounded up to whole updates.",
    )
    total_updates: Optional[int] = key(
        None, "optimizer updates until `min_lr` is reached", AT_LEAST_1, null="the number of updates of the run"
    )
    min_lr: float = key(0.0, "learning rate at the end of the decay", AT_LEAST_0)


class OptimizerConfig(Group):
    """fp32 master weights and moments, sharded over data-parallel ranks."""

    name: str = key(
        "adamw",
        "optimizer",
        one_of(
            adamw="",
            muon="Muon for the matrices of the layers, AdamW for all other weights",
            sgd="with momentum",
        ),
        more="Muon orthogonalises the whole momentum of each Hugging Face matrix (queries, keys and values separately) in "
        "every layout. Its updates are as large as AdamW's ([arXiv 2502.16982](https://arxiv.org/abs/2502.16982)), so "
        "`lr` and `weight_decay` can stay the same. Muon and SGD store one moment, AdamW stores two.",
        is_fixed=True,
    )
    momentum: float = key(0.95, "`muon`, `sgd`: decay of the momentum; `muon` uses Nesterov momentum", _BETA)
    lr: float = key(1e-6, "peak learning rate", AT_LEAST_0)
    beta1: float = key(0.9, "decay of the first moment", _BETA)
    beta2: float = key(0.999, "decay of the second moment", _BETA)
    eps: float = key(1e-8, "added to the denominator of an update", ABOVE_0)
    weight_decay: float = key(0.0, "decoupled weight decay", AT_LEAST_0)
    clip_grad: float = key(1.0, "maximum norm of the gradient of the whole model; 0: no clipping", AT_LEAST_0)
    schedule: ScheduleConfig = group(ScheduleConfig, "counted in optimizer updates")


class RecomputeConfig(Group):
    """Activation recomputation."""

    granularity: str = key(
        "off",
        "activations that are recomputed in the backward pass",
        one_of(
            "off",
            selective="the parts of a layer that `modules` names",
            full="all layers, in groups of `num_layers` (Megatron's method uniform)",
            block="the first `num_layers` layers of a stage (Megatron's method block)",
        ),
    )
    num_layers: int = key(1, "`full`: layers per group; `block`: layers of a stage", AT_LEAST_1)
    modules: list[str] = key(
        ["core_attn"],
        "`selective`: parts of a layer whose activations are recomputed",
        more="`core_attn`, `mlp`, `moe` (a whole MoE layer), `moe_act` (the activation between an expert's two products), "
        "`shared_experts`, `layernorm` and `mla_up_proj`. `moe_act` and `layernorm` require Transformer Engine.",
    )

    @property
    def whole_layers(self) -> bool:
        """Whether whole layers are recomputed."""
        return self.granularity in ("full", "block")


class MoEConfig(Group):
    """Training of mixture-of-experts models."""

    aux_loss_coef: float = key(
        0.0,
        "MoE models: weight of the load-balancing loss, summed over layers; 0: off",
        AT_LEAST_0,
        more="The loss is the Switch Transformers loss, which is 1 per layer at perfect balance. It is reported as "
        "`actor/load_balance`; `loss/total` does not include it.",
    )
    expert_bias_rate: float = key(
        0.0,
        "models with a router bias per expert (DeepSeek-V3): change of a bias per update; 0: the biases are frozen",
        FROM_0_TO_1,
        more="Balances experts without a loss (arXiv 2408.15664). After each update this rate is added to the bias of experts "
        "that received fewer tokens than the mean, and subtracted for experts that received more. DeepSeek-V3 was "
        "trained with 0.001.",
    )


class VisionConfig(Group):
    """The vision tower of a model that reads images (Qwen2.5-VL, Qwen3-VL)."""

    train: str = key(
        "none",
        "trained part of the vision tower",
        one_of(
            none="nothing; engines receive it once",
            merger="the mergers, which turn patches into tokens, at the end of the tower and for DeepStack",
            all="the whole tower",
        ),
        more="Frozen parts have no gradient and no optimizer state. An update passes each image through the tower once. A "
        "trained part needs a second pass, with the summed gradients of all sequences that contain the image. See "
        "[images](guide/images.md).",
        is_fixed=True,
    )


class MTPConfig(Group):
    """MTP layers: layers that predict tokens after the next one (DeepSeek-V3, GLM-4.5)."""

    mode: str = key(
        "keep",
        "training of the MTP layers of `model.path`",
        one_of(
            keep="not trained; checkpoints contain them unchanged",
            train="they learn to predict the responses; their loss trains no other weights",
            joint="`algorithm.kind: sft` only: their loss trains the whole model",
        ),
        more="Their loss is the negative log-likelihood of response tokens, each with its weight in the model's loss, "
        "predicted one token earlier. It is reported as `actor/mtp_loss`; `loss/total` does not include it. With "
        "`train`, hidden states, embedding and output layer are constants, and the gradient of MTP layers is clipped by "
        "its own norm, so the rest of the model gets the same update as with `keep`. MTP layers are not load-balanced.",
        is_fixed=True,
    )
    loss_coef: float = key(
        0.1,
        "`joint`: factor of the MTP loss, which is the mean over the MTP layers",
        ABOVE_0,
        more="As Megatron's `mtp_loss_scaling_factor`.",
        only_with="actor.mtp.mode=joint",
    )


class LoraConfig(Group):
    """Low-rank adapters, trained instead of the weights."""

    rank: Optional[int] = key(
        None,
        "rank of the adapters; the weights are frozen",
        AT_LEAST_1,
        null="all weights are trained, without adapters",
        is_fixed=True,
    )
    alpha: Optional[float] = key(
        None,
        "scale of an adapter's output, divided by `rank`",
        ABOVE_0,
        null="2 · `rank`",
        is_fixed=True,
    )
    dropout: float = key(
        0.0, "share of an adapter's inputs that is dropped during training", Range(0, 1, open_high=True)
    )
    targets: list[str] = key(
        ["all-linear"],
        "linear layers with an adapter: `all-linear`, last parts of names (`q_proj`), or patterns of whole names "
        "(`*.layers.0.*`)",
        more="As PEFT's `target_modules`. `all-linear` means every linear layer except the output layer and the router. Add "
        "`embed_tokens` and `lm_head` for the embedding and the output layer.",
        is_fixed=True,
    )
    init: str = key(
        "gaussian",
        "initial values of adapters; with all of them the run starts with the output of the model",
        one_of(
            gaussian="A is initialised as in PEFT, B is zero",
            pissa="the principal singular vectors of the weights; saved adapters have twice the rank",
        ),
        is_fixed=True,
    )
    use_rslora: bool = key(False, "divide `alpha` by the square root of `rank` instead of `rank`", is_fixed=True)
    use_dora: bool = key(
        False, "also train a magnitude per output; A and B then learn only the direction (DoRA)", is_fixed=True
    )
    path: Optional[str] = key(None, "PEFT directory with initial adapters", null="new adapters")


class ActorLoraConfig(LoraConfig):
    """Adapters of the policy, which are also sent to the engines."""

    sync: str = key(
        "auto",
        "weights that engines receive",
        one_of(
            auto="`adapter` if the engine supports it, else `merge`",
            merge="whole weights, with the adapters added",
            adapter="only A and B",
        ),
    )


class ActorConfig(Group):
    """The policy being trained."""

    layout: LayoutConfig = group(LayoutConfig, "parallel layout; the data-parallel size is world_size / (tp * pp * cp)")
    ranks: Optional[list[int]] = key(
        None, _RANKS, null="all", more="Roles on disjoint ranks are updated at the same time."
    )
    optimizer: OptimizerConfig = group(OptimizerConfig, "fp32 master weights, sharded over data-parallel ranks")
    recompute: RecomputeConfig = group(RecomputeConfig, "activation recomputation: less memory, more compute")
    moe: MoEConfig = group(MoEConfig, help="mixture-of-experts (MoE) models")
    router_replay: str = key(
        "off",
        "MoE models: source of the expert choices in the policy's passes",
        one_of(
            off="the router chooses in every pass",
            rollout="all passes replay the choices of the engine that sampled the response (R3)",
            old_logprobs="updates replay the choices of the pass for old logprobs (R2)",
        ),
        more="The router still learns, because the weights of the chosen experts are its own scores. See [router "
        "replay](algorithms/router-replay.md).",
    )
    mtp: MTPConfig = group(MTPConfig, help="multi-token prediction (MTP) layers")
    vision: VisionConfig = group(VisionConfig, help="vision tower")
    lora: ActorLoraConfig = group(ActorLoraConfig, "low-rank adapters", "See [adapters](algorithms/lora.md).")
    freeze: list[str] = key(
        [],
        "Hugging Face names, or patterns such as `model.layers.0.*`, of weights that are not trained",
        more="Frozen weights have no gradient and no optimizer state. They are saved as usual, and sent only to engines that "
        "lack them. Weights that Megatron stores in one tensor (q, k and v; gate and up) must be frozen together.",
        is_fixed=True,
    )
    fp8: Optional[str] = key(
        None,
        "FP8 matrix products in the layers, by Transformer Engine on Hopper GPUs",
        one_of(
            blockwise="all passes use the same quantised weights, bit for bit, as `rollout.quantization: fp8` sends"
        ),
        null="products in `model.dtype`",
        more="Inputs and gradients have one scale per 128 values. Weights, master weights and checkpoints do not change. The "
        "reference policy computes in FP8 too; a critic, a reward model and teachers do not. See "
        "[FP8](scale/low-precision.md#train-with-8-bit-products).",
    )
    megatron: Optional[dict[str, Any]] = key(
        None,
        "fields of Megatron-core's configuration classes, such as `{overlap_grad_reduce: true}`",
        null="none",
        more="Fields of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig of the installed Megatron-core, "
        "by name. Names and types are checked, and fields that other keys set are rejected. The reference policy uses "
        "the same TransformerConfig fields. See [performance](scale/tuning.md#megatrons-own-settings).",
    )
    offload: str = key(
        "auto",
        _OFFLOAD,
        _OFFLOADS,
        more="Weights and optimizer state move to pinned host memory that is allocated once; gradients are freed. Results are "
        "the same, bit for bit.",
    )


class CriticConfig(Group):
    """The value model."""

    path: Optional[str] = key(
        None,
        "a language model, whose new value head starts at zero, or a `*ForTokenClassification` directory with one label",
        null="`model.path`",
    )
    dtype: Optional[str] = key(None, "data type of weights and activations", _DTYPES, null="`model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "independent of the actor's, over `critic.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`", null="all")
    optimizer: OptimizerConfig = group(lambda: OptimizerConfig(lr=1e-5), "independent of the actor's")
    recompute: RecomputeConfig = group(RecomputeConfig)
    moe: MoEConfig = group(MoEConfig)
    lora: LoraConfig = group(
        LoraConfig, "adapters of the critic; the value head is trained in full", "See [adapters](algorithms/lora.md)."
    )
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`", null="none")
    offload: str = key("auto", "as `actor.offload`", _OFFLOADS)
    value_clip: Optional[float] = key(
        0.2,
        "value clipping range of PPO: largest change of a value from its value before the update",
        ABOVE_0,
        null="no clipping",
        more="The loss of a value is the larger of its squared errors with and without clipping.",
    )
    normalize_returns: bool = key(
        False,
        "predict returns in units of their running mean and standard deviation",
        more="As in MAPPO, arXiv 2103.01955. Outliers beyond 100 deviations are clamped before they enter the statistics.",
    )
    warmup_steps: int = key(0, "number of first steps in which only the critic learns", AT_LEAST_0)
    minibatch_size: Optional[int] = key(
        None, "prompts per update of the critic", AT_LEAST_1, null="`trainer.minibatch_size`"
    )
    ppo_epochs: Optional[int] = key(
        None, "passes of the critic over the responses of a step", AT_LEAST_1, null="`trainer.ppo_epochs`"
    )


class ReferenceConfig(Group):
    """The frozen policy that the KL, or a loss over pairs, compares the actor with."""

    path: Optional[str] = key(
        None, "frozen policy that the KL, or a loss over pairs, compares the actor with", null="`model.path`"
    )
    offload: str = key("auto", "offloading of the weights to the host", _OFFLOADS_FROZEN, more=_BY_LAYER)
    refresh_steps: int = key(0, "interval in steps at which the actor's weights are copied; 0: never", AT_LEAST_0)
    precompute: bool = key(
        False,
        "compute the logprobs of all pairs once before training, then free the reference",
        more="Otherwise the reference runs before each update and each evaluation.",
        only_with="algorithm.kind=dpo",
    )


class TeacherConfig(Group):
    """A policy from which a student learns, token by token."""

    path: Optional[str] = key(
        None,
        "the teacher model; its tokenizer must equal the tokenizer of `model.path`",
        null="none",
        more="Any model family. See [distillation](algorithms/distillation.md).",
    )
    sources: Optional[dict[str, str]] = key(
        None,
        "teacher directory per data source, such as `{math: models/A, code: models/B}`",
        null="none",
        more="`teacher.path` teaches all other sources. All teachers share layout, precision and offloading.",
    )
    weights: str = key(
        "path",
        "weights of the teacher",
        one_of(
            path="the frozen weights of `teacher.path`",
            actor="the policy itself, before the step's updates; requires `teacher.context`",
            average="a running average of the policy, in fp32 and in its layout, stored in checkpoints",
        ),
        is_fixed=True,
    )
    decay: float = key(
        0.99,
        "decay of the running average per step: the share of the old average that remains",
        Range(0, 1, open_high=True),
        only_with="teacher.weights=average",
    )
    context: Optional[str] = key(
        None,
        "`path/to/file.py:function` that returns the teacher's prompts",
        null="the teacher reads the student's prompts",
        more="`function(prompt, ground_truth, extra_info, data_source)` returns messages or a text, such as the prompt with "
        "information that the student lacks. See [distillation](algorithms/distillation.md#another-prompt).",
    )
    divergence: str = key(
        "k1",
        "divergence from the teacher that training minimises; t and p are the probabilities of teacher and policy",
        one_of(
            k1="reverse KL, estimated at the sampled token: `coef` · (log t - log p) is added to its advantage",
            forward_kl="Σ t log(t / p) over the distribution, added to the loss, as the following values",
            reverse_kl="Σ p log(p / t)",
            jsd="generalised Jensen-Shannon divergence",
        ),
    )
    beta: float = key(
        0.5,
        "`jsd`: weight of the teacher in the mixture distribution",
        Range(0, 1, open_low=True, open_high=True),
        only_with="teacher.divergence=jsd",
    )
    top_k: int = key(
        64,
        "number of most probable tokens in the teacher's distributions; all other tokens count as one event",
        AT_LEAST_1,
        only_with="teacher.divergence=forward_kl or reverse_kl or jsd",
        more="A value of the vocabulary size is exact.",
    )
    coef: float = key(1.0, "weight of the teacher, in the advantages or in the loss", ABOVE_0)
    dtype: Optional[str] = key(None, "data type of weights and activations", _DTYPES, null="`model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "independent of the actor's, over `teacher.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`", null="all")
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`; only fields of TransformerConfig", null="none")
    offload: str = key("auto", "as `reference.offload`", _OFFLOADS_FROZEN)


class RewardModelConfig(Group):
    """A reward model. Its score is added to the score of the rules or the function."""

    path: Optional[str] = key(
        None,
        "a `*ForSequenceClassification` directory with one label, and the tokenizer of `model.path`",
        null="none",
        more="Its score of the whole response is added to the score of the rules; `reward.rules=[]` disables the rules.",
    )
    weight: float = key(1.0, "weight of its score in the sum", FINITE)
    dtype: Optional[str] = key(None, "data type of weights and activations", _DTYPES, null="`model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "independent of the actor's, over `reward.model.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`", null="all")
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`; only fields of TransformerConfig", null="none")
    offload: str = key("auto", "as `reference.offload`", _OFFLOADS_FROZEN)
