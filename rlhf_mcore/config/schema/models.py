"""Groups of the models: where they are from, how they are cut, and how those that learn are updated."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, FINITE, FROM_0_TO_1, Range, group, key, one_of

_PARTS = Range(1, 4096)  # of a model: layers, heads and experts are fewer
_BETA = Range(0, 1, open_high=True)
_DTYPES = one_of(auto="fp32 on a CPU, bf16 on CUDA", fp32="", bf16="", fp16="")
_OFFLOADS = one_of(
    auto="as much as `rlhf-mcore plan` finds necessary, on a CPU nothing",
    never="",
    state="gradients and the optimizer's state, except in an update",
    always="these, and the weights between passes",
)
_OFFLOAD = "what leaves the device while others need it, when engines and models share it"
_OFFLOADS_FROZEN = one_of(
    auto="if a phase would not fit otherwise, as `rlhf-mcore plan` finds; on a CPU never",
    never="",
    always="its weights are in host memory between uses",
    by_layer="also in a pass, in which at most two layers are on the device",
)
_BY_LAYER = (
    "With `by_layer` each microbatch copies the layers again, each while the layer before computes. A pass over few tokens "
    "waits for them."
)
_RANKS = "`[first, end)`: the ranks of the world that hold it"


class LayoutConfig(Group):
    """Set how a trained model is cut. The data-parallel size follows from the world size."""

    tp: int = key(1, "tensor-parallel size", _PARTS)
    pp: int = key(1, "pipeline stages", _PARTS)
    vpp: Optional[int] = key(
        None, "model chunks per stage (interleaved schedule)", Range(2, 1024), null="no interleaving"
    )
    layers_per_stage: Optional[list[int]] = key(
        None,
        "layers of each stage, as `[3, 5]`; with `vpp` of each chunk, in the order of the network",
        null="equally many",
        more="For models whose layers `pp` (times `vpp`) does not divide, or to leave room beside the embeddings.",
    )
    cp: int = key(
        1,
        "context-parallel size: the tokens of every sequence are shared by so many ranks",
        _PARTS,
        more="For long sequences: a rank has 1/`cp` of the activations of a microbatch, whose tokens are counted over all of them. "
        "A sequence is padded to a multiple of 2 · `cp`.",
    )
    ep: int = key(
        1,
        "expert-parallel size: the experts of a layer are distributed over so many ranks of a pipeline stage",
        _PARTS,
        more="`ep` · `etp` divides the ranks of a stage, `ep` the number of experts.",
    )
    etp: Optional[int] = key(
        None, "tensor-parallel size of an expert", _PARTS, null="`tp`", more="With `ep=1` it must be `tp`."
    )
    sequence_parallel: bool = key(
        False,
        "needs `tp` of 2 or more; mixture-of-experts models with such a `tp` need it",
        more="Shares the activations outside of attention and MLP among tensor-parallel ranks.",
    )


class ModelConfig(Group):
    """The model that everything starts from."""

    path: str = key(
        "???",
        "a directory in Hugging Face format: `config.json`, tokenizer, safetensors; or an id of the hub, `ORG/NAME`",
        more="See [Hub ids](guide/data.md#hub-ids). "
        "The headers of the weights are compared with `config.json` (embedding, first and last layer) before any process "
        "has started.",
    )
    tokenizer_path: Optional[str] = key(None, "directory of the tokenizer", null="`model.path`")
    allow_other_tokenizer: bool = key(
        False,
        "allow a `tokenizer_path` whose tokens are not those of `model.path`'s own tokenizer",
        more="Otherwise refused, for the model would read noise.",
    )
    attention: str = key(
        "auto",
        "with `rollout.engine: hf` only",
        one_of(auto="as transformers decides", eager="", sdpa="", flash_attention_2="CUDA, the package flash-attn"),
    )
    dtype: str = key("auto", "", _DTYPES, more="Master weights are fp32 always.", is_fixed=True)
    layer_spec: str = key(
        "auto", "", one_of(auto="Transformer Engine where it is installed, else local", te="", local="")
    )


class ScheduleConfig(Group):
    """Learning-rate schedule, counted in optimizer updates."""

    name: str = key("constant", "decay to `min_lr` after warm-up", one_of("constant", "linear", "cosine"))
    warmup: float = key(
        0.0,
        "linear warm-up: below 1 a share of `total_updates`, from 1 on a number of updates; 0: none",
        AT_LEAST_0,
        more="It is rounded up to whole updates.",
    )
    total_updates: Optional[int] = key(
        None, "updates until `min_lr` is reached", AT_LEAST_1, null="as many as the run makes"
    )
    min_lr: float = key(0.0, "learning rate at the end of the decay", AT_LEAST_0)


class OptimizerConfig(Group):
    """fp32 master weights and moments, sharded over data-parallel ranks."""

    name: str = key(
        "adamw",
        "",
        one_of(
            adamw="",
            muon="Muon for the matrices of the layers, AdamW for the rest",
            sgd="with momentum",
        ),
        more="Muon orthogonalises the momentum of each of Hugging Face's matrices (queries, keys and values apart), whole in every "
        "layout; its updates are as large as AdamW's ([arXiv 2502.16982](https://arxiv.org/abs/2502.16982)), so `lr` and "
        "`weight_decay` are of the same size. Both have one moment where AdamW has two.",
        is_fixed=True,
    )
    momentum: float = key(0.95, "`muon`, `sgd`: decay of the momentum; of `muon` it is Nesterov's", _BETA)
    lr: float = key(1e-6, "peak learning rate", AT_LEAST_0)
    beta1: float = key(0.9, "decay of the first moment", _BETA)
    beta2: float = key(0.999, "decay of the second moment", _BETA)
    eps: float = key(1e-8, "added to the denominator of an update", ABOVE_0)
    weight_decay: float = key(0.0, "decoupled weight decay", AT_LEAST_0)
    clip_grad: float = key(1.0, "largest norm of the gradient over the whole model; 0: not clipped", AT_LEAST_0)
    schedule: ScheduleConfig = group(ScheduleConfig, "counted in optimizer updates")


class RecomputeConfig(Group):
    """Activation recomputation."""

    granularity: str = key(
        "off",
        "activations computed again in the backward pass",
        one_of(
            "off",
            selective="the parts named by `modules`",
            full="whole layers, in groups of `num_layers` (Megatron's method uniform)",
            block="whole layers, the first `num_layers` of a stage (Megatron's method block)",
        ),
    )
    num_layers: int = key(1, "with `full` and `block`: number of layers", AT_LEAST_1)
    modules: list[str] = key(
        ["core_attn"],
        "with `selective`: the parts of a layer whose activations are computed again",
        more="`core_attn`, `mlp`, `moe` (a whole layer of experts), `moe_act` (what is between an expert's two products), "
        "`shared_experts`, `layernorm` and `mla_up_proj`; `moe_act` and `layernorm` with Transformer Engine only.",
    )

    @property
    def whole_layers(self) -> bool:
        """Return whether whole layers are computed again."""
        return self.granularity in ("full", "block")


class MoEConfig(Group):
    """Training of mixture-of-experts models."""

    aux_loss_coef: float = key(
        0.0,
        "mixture-of-experts models: weight of the load-balancing loss, summed over layers; 0: off",
        AT_LEAST_0,
        more="The loss is that of Switch Transformers, 1 per layer at perfect balance. It is reported as `actor/load_balance` "
        "and is not part of `loss/total`.",
    )
    expert_bias_rate: float = key(
        0.0,
        "models whose router has a bias per expert (DeepSeek-V3): how far an update moves it; 0: it stays as it is",
        FROM_0_TO_1,
        more="Balancing without a loss (arXiv 2408.15664): after each update the bias of an expert that got fewer tokens than "
        "the mean goes up by so much, that of one that got more goes down. DeepSeek-V3 was trained with 0.001.",
    )


class VisionConfig(Group):
    """The tower of a model that reads images (Qwen2.5-VL, Qwen3-VL)."""

    train: str = key(
        "none",
        "what of the tower learns",
        one_of(
            none="nothing; engines are sent it once",
            merger="what makes tokens of patches, at the end of the tower and for DeepStack",
            all="all of it",
        ),
        more="What does not learn has no gradient and no optimizer state. The tower reads an image of an update once, and once more "
        "where it learns, with the gradients that all its sequences have together. See [images](guide/images.md).",
        is_fixed=True,
    )


class MTPConfig(Group):
    """Layers that predict tokens after the next one (DeepSeek-V3, GLM-4.5)."""

    mode: str = key(
        "keep",
        "what is done with the MTP layers of `model.path`",
        one_of(
            keep="not trained; checkpoints hold them as they are",
            train="they learn the responses; their loss changes nothing else",
            joint="with `algorithm.kind: sft`: all of the model learns from their loss too",
        ),
        more="Their loss is the negative log-likelihood of the tokens of responses, each with the weight that it has in the loss of "
        "the model, predicted one token earlier. It is reported as `actor/mtp_loss` and is not part of `loss/total`. With `train` "
        "hidden states, embedding and output layer are taken as they are, and the gradient of MTP layers is clipped by its own norm: "
        "the rest of the model gets the same update as with `keep`. MTP layers take part in no load balancing.",
        is_fixed=True,
    )
    loss_coef: float = key(
        0.1,
        "`joint`: factor of the loss of MTP layers, which is a mean over them",
        ABOVE_0,
        more="Megatron's `mtp_loss_scaling_factor`.",
        only_with="actor.mtp.mode=joint",
    )


class LoraConfig(Group):
    """Low-rank adapters in the place of the weights themselves."""

    rank: Optional[int] = key(
        None,
        "train adapters of this rank, and freeze the weights",
        AT_LEAST_1,
        null="all weights are trained",
        is_fixed=True,
    )
    alpha: Optional[float] = key(
        None,
        "factor of what an adapter adds, divided by `rank`",
        ABOVE_0,
        null="2 · `rank`",
        is_fixed=True,
    )
    dropout: float = key(0.0, "share of an adapter's inputs that is dropped in training", Range(0, 1, open_high=True))
    targets: list[str] = key(
        ["all-linear"],
        "linear layers that get an adapter: `all-linear`, last parts of names (`q_proj`), or patterns of whole names (`*.layers.0.*`)",
        more="As PEFT's `target_modules`. `all-linear` is every linear layer but the output layer and the router; `embed_tokens` "
        "and `lm_head`, beside it, are the embedding and the output layer.",
        is_fixed=True,
    )
    init: str = key(
        "gaussian",
        "how adapters begin; without an effect, so that a run begins with the model",
        one_of(
            gaussian="A as PEFT draws it by default, B at zero",
            pissa="with the principal singular vectors of the weights; what is saved has twice the rank",
        ),
        is_fixed=True,
    )
    use_rslora: bool = key(False, "divide `alpha` by the root of `rank`", is_fixed=True)
    use_dora: bool = key(
        False, "train a magnitude for each output too, and A and B for directions alone (DoRA)", is_fixed=True
    )
    path: Optional[str] = key(None, "a directory of PEFT whose adapters are where training begins", null="new ones")


class ActorLoraConfig(LoraConfig):
    """Those of the policy, which engines have to get."""

    sync: str = key(
        "auto",
        "how the engines get what was learned",
        one_of(
            auto="`adapter` where the engine can",
            merge="whole weights, with the adapters added",
            adapter="A and B alone",
        ),
    )


class ActorConfig(Group):
    """The policy being trained."""

    layout: LayoutConfig = group(
        LayoutConfig, "how it is cut; the data-parallel size is what the world size leaves over: world_size / (tp * pp)"
    )
    ranks: Optional[list[int]] = key(
        None, _RANKS, null="all", more="Roles on disjoint ranks are updated at the same time."
    )
    optimizer: OptimizerConfig = group(OptimizerConfig, "fp32 master weights, sharded over data-parallel ranks")
    recompute: RecomputeConfig = group(RecomputeConfig, "compute instead of activation memory")
    moe: MoEConfig = group(MoEConfig)
    router_replay: str = key(
        "off",
        "mixture-of-experts models: whose choice of experts the passes of the policy replay",
        one_of(
            off="the router's own, in every pass",
            rollout="the engine's, which drew the response, in all passes (R3)",
            old_logprobs="that of the pass for old logprobs, in the updates (R2)",
        ),
        more="The router still learns: weights of experts are its scores at their places. See "
        "[router replay](algorithms/router-replay.md).",
    )
    mtp: MTPConfig = group(MTPConfig)
    vision: VisionConfig = group(VisionConfig)
    lora: ActorLoraConfig = group(ActorLoraConfig, "low-rank adapters", "See [adapters](algorithms/lora.md).")
    freeze: list[str] = key(
        [],
        "Hugging Face names, or patterns as `model.layers.0.*`, of weights that are not trained",
        more="They have no gradient and no optimizer state, are saved as ever, and travel to the engines only where these have none. "
        "What Megatron has in one tensor (q, k and v; gate and up) is frozen together.",
        is_fixed=True,
    )
    fp8: Optional[str] = key(
        None,
        "matrix products of layers in 8 bits, by Transformer Engine on Hopper GPUs",
        one_of(blockwise="with weights as `rollout.quantization: fp8` sends them, to the bit, in all passes"),
        null="in `model.dtype`",
        more="Inputs and gradients have a scale for 128 values. Weights, masters and what is saved stay as they are. The reference "
        "policy computes as the actor; a critic, a reward model and teachers do not. See [8 "
        "bits](scale/low-precision.md#train-with-8-bit-products).",
    )
    megatron: Optional[dict[str, Any]] = key(
        None,
        "fields of Megatron-core's own configuration classes, as `{overlap_grad_reduce: true}`",
        null="none",
        more="Of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig of the installed Megatron-core, by their names; "
        "names and types are checked, and fields that other keys set are refused. The reference policy has the same ones of "
        "TransformerConfig. See [performance](scale/tuning.md#megatrons-own-settings).",
    )
    offload: str = key(
        "auto",
        _OFFLOAD,
        _OFFLOADS,
        more="It moves to pinned host memory that is allocated once; gradients are freed. Results are the same, bit for bit.",
    )


class CriticConfig(Group):
    """The value model of PPO."""

    path: Optional[str] = key(
        None,
        "a language model, whose value head begins at zero, or a `*ForTokenClassification` directory with one label",
        null="`model.path`",
    )
    dtype: Optional[str] = key(None, "", _DTYPES, null="`model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "its own, over `critic.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`", null="all")
    optimizer: OptimizerConfig = group(lambda: OptimizerConfig(lr=1e-5), "its own")
    recompute: RecomputeConfig = group(RecomputeConfig)
    moe: MoEConfig = group(MoEConfig)
    lora: LoraConfig = group(
        LoraConfig, "adapters of its own; the value head is trained whole", "See [adapters](algorithms/lora.md)."
    )
    megatron: Optional[dict[str, Any]] = key(None, "as `actor.megatron`", null="none")
    offload: str = key("auto", "as `actor.offload`", _OFFLOADS)
    value_clip: Optional[float] = key(
        0.2,
        "how far a value may move from the one before the update until its error counts from there",
        ABOVE_0,
        null="not clipped",
    )
    normalize_returns: bool = key(
        False,
        "predict returns in units of their running mean and deviation",
        more="MAPPO, arXiv 2103.01955; a return further away than 100 of them counts as that far.",
    )
    warmup_steps: int = key(0, "steps at the start in which only the critic learns", AT_LEAST_0)
    minibatch_size: Optional[int] = key(None, "prompts per update", AT_LEAST_1, null="`trainer.minibatch_size`")
    ppo_epochs: Optional[int] = key(None, "passes over a step's responses", AT_LEAST_1, null="`trainer.ppo_epochs`")


class ReferenceConfig(Group):
    """The frozen policy that the KL, or a loss over pairs, compares with."""

    path: Optional[str] = key(None, "the policy that the KL, or a loss over pairs, compares with", null="`model.path`")
    offload: str = key("auto", "whether its weights leave the device", _OFFLOADS_FROZEN, more=_BY_LAYER)
    refresh_steps: int = key(0, "copy the actor's weights every so many steps; 0: never", AT_LEAST_0)
    precompute: bool = key(
        False,
        "run it over all pairs once, before training, and let it go",
        more="Else it runs before each update and each evaluation.",
        only_with="algorithm.kind=dpo",
    )


class TeacherConfig(Group):
    """A policy that a student learns from, token by token."""

    path: Optional[str] = key(
        None,
        "the teacher, with the tokenizer of `model.path`",
        null="none",
        more="Any model family. See [distillation](algorithms/distillation.md).",
    )
    sources: Optional[dict[str, str]] = key(
        None,
        "directories of teachers of data sources, by name, as `{math: models/A, code: models/B}`",
        null="none",
        more="`teacher.path` teaches all other sources. They share its layout, precision and offload.",
    )
    weights: str = key(
        "path",
        "",
        one_of(
            path="those of `teacher.path`, frozen",
            actor="the policy itself, as it is before a step's updates; with `teacher.context`",
            average="a running average of the policy, in fp32 and in its layout; part of checkpoints",
        ),
        is_fixed=True,
    )
    decay: float = key(
        0.99,
        "share of the average that a step leaves",
        Range(0, 1, open_high=True),
        only_with="teacher.weights=average",
    )
    context: Optional[str] = key(
        None,
        "`path/to/file.py:function` that gives the teacher prompts of its own",
        null="it reads the student's",
        more="`function(prompt, ground_truth, extra_info, data_source)` returns messages or a text: the prompt with what the student "
        "does not know. See [distillation](algorithms/distillation.md#another-prompt).",
    )
    divergence: str = key(
        "k1",
        "what is made small",
        one_of(
            k1="reverse KL, estimated at the drawn token: `coef` times (the teacher's logprob - the policy's) is its advantage",
            forward_kl="the sum of t log(t / p) over a distribution, a term of the loss as those that follow",
            reverse_kl="the sum of p log(p / t)",
            jsd="the generalised Jensen-Shannon divergence",
        ),
    )
    beta: float = key(
        0.5,
        "weight of the teacher in the mixture",
        Range(0, 1, open_low=True, open_high=True),
        only_with="teacher.divergence=jsd",
    )
    top_k: int = key(
        64,
        "tokens of the teacher's distributions, all others together are one more; as many as the vocabulary: all of it, exactly",
        AT_LEAST_1,
        only_with="teacher.divergence=forward_kl or reverse_kl or jsd",
    )
    coef: float = key(1.0, "weight of the teacher, in the advantages or in the loss", ABOVE_0)
    dtype: Optional[str] = key(None, "", _DTYPES, null="`model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "its own, over `teacher.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`", null="all")
    megatron: Optional[dict[str, Any]] = key(
        None, "as `actor.megatron`; fields of TransformerConfig alone", null="none"
    )
    offload: str = key("auto", "as `reference.offload`", _OFFLOADS_FROZEN)


class RewardModelConfig(Group):
    """A reward model; its score is added to that of the rules or the function."""

    path: Optional[str] = key(
        None,
        "a `*ForSequenceClassification` directory with one label, and the tokenizer of `model.path`",
        null="none",
        more="Its score of the whole response is added. `reward.rules=[]` leaves it alone.",
    )
    weight: float = key(1.0, "factor of its score", FINITE)
    dtype: Optional[str] = key(None, "", _DTYPES, null="`model.dtype`")
    layout: LayoutConfig = group(LayoutConfig, "its own, over `reward.model.ranks`")
    ranks: Optional[list[int]] = key(None, "as `actor.ranks`", null="all")
    megatron: Optional[dict[str, Any]] = key(
        None, "as `actor.megatron`; fields of TransformerConfig alone", null="none"
    )
    offload: str = key("auto", "as `reference.offload`", _OFFLOADS_FROZEN)
