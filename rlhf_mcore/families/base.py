"""What a model family declares, without torch: how config.json becomes a geometry, what is refused, where Megatron holds its tensors.

A rule names a Megatron parameter (``{i}`` is the layer's number over the whole model, ``{k}`` that of an expert on its rank), how
tensor parallelism splits it, and the Hugging Face tensors that it holds with their full shapes in symbols (``{e}`` is the expert's
number over the whole layer). A parameter that no rule names is an error, so nothing can be left behind silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from rlhf_mcore.families.sizes import dense_layers, head_dim, max_positions, num_experts, num_kv_heads, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.types import ModelGeometry


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic dimension of a tensor."""

    name: str
    of: Callable[[ModelGeometry], int]


ONE = Dim("one", lambda g: 1)
HIDDEN = Dim("hidden", lambda g: g.hidden_size)
QUERIES = Dim("queries", lambda g: g.num_heads * g.head_dim)
KV = Dim("kv", lambda g: g.num_kv_heads * g.head_dim)
HEAD_DIM = Dim("head_dim", lambda g: g.head_dim)
FFN = Dim("ffn", lambda g: g.ffn_size)
VOCAB = Dim("vocab", lambda g: g.vocab_size)
EXPERTS = Dim("experts", lambda g: g.num_experts)
EXPERT_FFN = Dim("expert_ffn", lambda g: g.expert_ffn_size)
SHARED_FFN = Dim("shared_ffn", lambda g: g.shared_expert_ffn_size)

# How tensor-parallel ranks hold a parameter: whole; equal runs of rows of each of its tensors, one below the other; equal runs of
# columns; equal runs of rows of the padded vocabulary; an equal run of the rows of queries, keys and values interleaved by group.
Kind = Literal["replicated", "column_parallel", "row_parallel", "vocab_parallel", "qkv"]
Layers = Literal["all", "dense", "moe"]  # that have a parameter
Spec = Literal["any", "local", "te"]  # layer specs that have it under a name: both, the local one, Transformer Engine's


@dataclass(frozen=True, slots=True)
class Rule:
    """Where one Megatron parameter's elements are among Hugging Face tensors.

    ``in_memory``: the name of the same rows in a live transformers model, where it differs from that of files (since version 5 the
    experts of a layer are one stack).
    """

    mcore: str
    kind: Kind
    tensors: Mapping[str, tuple[Dim, ...]]
    layers: Layers = "all"
    spec: Spec = "any"
    in_memory: str = ""

    def shapes(self, geometry: ModelGeometry, layer: int = 0, expert: int = 0) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of its Hugging Face tensors in one layer, for one expert."""
        return {
            name.format(i=layer, e=expert): tuple(dim.of(geometry) for dim in dims)
            for name, dims in self.tensors.items()
        }


_MEGATRON, _LAYER = "decoder.layers.{i}.", "model.layers.{i}."
_INPUT_NORM = {_LAYER + "input_layernorm.weight": (HIDDEN,)}
_MLP_NORM = {_LAYER + "post_attention_layernorm.weight": (HIDDEN,)}
_ATTENTION, _QKV = _LAYER + "self_attn.", {"q": QUERIES, "k": KV, "v": KV}


def gated_mlp(
    linear: str,
    block: str,
    ffn: Dim,
    layers: Layers,
    spec: Spec = "any",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Rule, Rule]:
    """Rules of Megatron's two layers ``linear`` (``{n}`` is 1 or 2), which hold the matrices gate, up and down of a module."""
    gate, up, down = (f"{_LAYER}{block}.{name}.weight" for name in names)
    first, second = (_MEGATRON + linear.replace("{n}", n) for n in "12")
    return (
        Rule(first, "column_parallel", {gate: (ffn, HIDDEN), up: (ffn, HIDDEN)}, layers, spec),
        Rule(second, "row_parallel", {down: (HIDDEN, ffn)}, layers, spec),
    )


DECODER = (
    Rule("embedding.word_embeddings.weight", "vocab_parallel", {"model.embed_tokens.weight": (VOCAB, HIDDEN)}),
    Rule(_MEGATRON + "input_layernorm.weight", "replicated", _INPUT_NORM, spec="local"),
    Rule(_MEGATRON + "self_attention.linear_qkv.layer_norm_weight", "replicated", _INPUT_NORM, spec="te"),
    Rule(
        _MEGATRON + "self_attention.linear_qkv.weight",
        "qkv",
        {f"{_ATTENTION}{x}_proj.weight": (rows, HIDDEN) for x, rows in _QKV.items()},
    ),
    Rule(
        _MEGATRON + "self_attention.linear_proj.weight",
        "row_parallel",
        {_ATTENTION + "o_proj.weight": (HIDDEN, QUERIES)},
    ),
    Rule(_MEGATRON + "pre_mlp_layernorm.weight", "replicated", _MLP_NORM, "dense", "local"),
    # The norm before a mixture stands alone: there is no single linear layer to fuse it with.
    Rule(_MEGATRON + "pre_mlp_layernorm.weight", "replicated", _MLP_NORM, "moe"),
    Rule(_MEGATRON + "mlp.linear_fc1.layer_norm_weight", "replicated", _MLP_NORM, "dense", "te"),
    *gated_mlp("mlp.linear_fc{n}.weight", "mlp", FFN, "dense"),
    Rule("decoder.final_layernorm.weight", "replicated", {"model.norm.weight": (HIDDEN,)}),
)
QKV_BIAS = (
    Rule(
        _MEGATRON + "self_attention.linear_qkv.bias",
        "qkv",
        {f"{_ATTENTION}{x}_proj.bias": (rows,) for x, rows in _QKV.items()},
    ),
)
QK_NORM = tuple(
    Rule(f"{_MEGATRON}self_attention.{x}_layernorm.weight", "replicated", {f"{_ATTENTION}{x}_norm.weight": (HEAD_DIM,)})
    for x in "qk"
)


def experts(block: str, *names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """A mixture of experts: its router, and its experts as modules one after the other or as one grouped matrix product.

    ``names``: of the matrices gate, up and down in files, if they are not the usual ones.
    """
    hf, router = block + ".experts.{e}", {f"{_LAYER}{block}.gate.weight": (EXPERTS, HIDDEN)}
    local = gated_mlp("mlp.experts.local_experts.{k}.linear_fc{n}.weight", hf, EXPERT_FFN, "moe", "local", *names)
    first, second = gated_mlp("mlp.experts.linear_fc{n}.weight{k}", hf, EXPERT_FFN, "moe", "te", *names)
    return (
        Rule(_MEGATRON + "mlp.router.weight", "replicated", router, "moe", in_memory="mlp.gate.weight"),
        *local,
        replace(first, in_memory="mlp.experts.gate_up_proj"),
        replace(second, in_memory="mlp.experts.down_proj"),
    )


def shared_expert(block: str, gate: str) -> tuple[Rule, ...]:
    """The expert that sees every token beside a mixture, and the gate that its output is multiplied with."""
    shared = "mlp.shared_experts."
    return (
        *gated_mlp(shared + "linear_fc{n}.weight", block, SHARED_FFN, "moe"),
        Rule(_MEGATRON + shared + "gate_weight", "replicated", {f"{_LAYER}{gate}.weight": (ONE, HIDDEN)}, "moe"),
    )


@dataclass(frozen=True, slots=True)
class Mixture:
    """How config.json describes a mixture of experts: keys, and what transformers takes where they are absent."""

    ffn_key: str  # of an expert's intermediate size
    top_k: int
    has_dense_layers: bool = False  # given by decoder_sparse_step and mlp_only_layers
    always_renormalises: bool = False  # otherwise norm_topk_prob decides
    shared_ffn: int = 0  # intermediate size of the shared expert, where its key is absent; 0: a family without one

    def renormalises(self, hf_config: Fields) -> bool:
        """Whether the weights of a token's experts add up to one (the softmax is then over these experts only)."""
        return hf_config.flag("norm_topk_prob", default=False) or self.always_renormalises


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    ``architecture`` is how the names of its Hugging Face architectures begin. ``megatron``: settings that are not Megatron's defaults,
    by the names that TransformerConfig and the arguments of a Megatron-LM checkpoint share. ``head_dim``: where config.json has none
    (None: the hidden size over the number of heads). ``flags``: the only supported values of flags in config.json, which are also
    their defaults.

    A window of attention is refused where it is active: ``window_switch`` is the key that decides, beside ``sliding_window`` itself
    (``default_window`` where that is absent).
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    megatron: Mapping[str, bool] = field(default_factory=dict)
    head_dim: int | None = None
    mixture: Mixture | None = None
    flags: Mapping[str, bool] = field(default_factory=dict)
    window_switch: Literal["sliding_window", "use_sliding_window", "max_window_layers"] = "max_window_layers"
    default_window: int = 0

    def layer_rules(self, *, is_moe: bool, fused: bool = False) -> list[Rule]:
        """Rules of the parameters of one layer; ``fused`` as Transformer Engine's layer spec names them."""
        kinds, specs = ("all", "moe" if is_moe else "dense"), ("any", "te" if fused else "local")
        return [rule for rule in self.rules if "{i}" in rule.mcore and rule.layers in kinds and rule.spec in specs]

    def geometry(self, hf_config: Fields, head: str = "lm") -> ModelGeometry:
        """The sizes in a config.json of this family, under one kind of head.

        Raises:
            ConfigError: a size is absent or cannot be.
        """
        found = ModelGeometry(
            family=self.name,
            num_layers=size(hf_config, "num_hidden_layers"),
            hidden_size=size(hf_config, "hidden_size"),
            num_heads=size(hf_config, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf_config),
            head_dim=head_dim(hf_config, self.head_dim),
            ffn_size=size(hf_config, "intermediate_size"),
            vocab_size=size(hf_config, "vocab_size"),
            tied_embeddings=hf_config.flag("tie_word_embeddings", default=False) and head == "lm",
            head=head,
            max_positions=max_positions(hf_config),
        )
        if (mixture := self.mixture) is None:
            return found
        shared = size(hf_config, "shared_expert_intermediate_size", mixture.shared_ffn) if mixture.shared_ffn else 0
        return replace(
            found,
            num_experts=num_experts(hf_config),
            expert_ffn_size=size(hf_config, mixture.ffn_key),
            shared_expert_ffn_size=shared,
            experts_per_token=size(hf_config, "num_experts_per_tok", mixture.top_k),
            dense_layers=dense_layers(hf_config) if mixture.has_dense_layers else (),
        )

    def megatron_settings(self, hf_config: Fields) -> dict[str, bool]:
        """``megatron``, and what of it depends on a config.json."""
        if self.mixture is None:
            return dict(self.megatron)
        # Renormalised weights of the top k are the softmax over these k alone.
        return {**self.megatron, "moe_router_pre_softmax": not self.mixture.renormalises(hf_config)}

    def problems(self, hf_config: Fields, architecture: str) -> Iterator[str]:
        """What of a config.json this family does not support.

        Raises:
            ConfigError: a size is absent or cannot be.
        """
        for key, supported in self.flags.items():
            if hf_config.flag(key, default=supported) != supported:
                asked = f"{key}=false" if supported else key
                yield f"{asked} is not supported for {architecture}; use another model"
        window = self._active_window(hf_config)
        if window is not None:
            yield f"{architecture} with an active sliding_window {window} is not supported; use another model"
        if (mixture := self.mixture) is None:
            return
        top_k, found = size(hf_config, "num_experts_per_tok", mixture.top_k), num_experts(hf_config)
        renormalises = mixture.renormalises(hf_config)
        if top_k > found:
            yield (f"num_experts_per_tok={top_k} is not between 1 and num_experts={found}; export the model again")
        if top_k == 1 and renormalises:
            yield "num_experts_per_tok=1 with weights that add up to one cannot be learned; use another model"
        shared = hf_config.integer("shared_expert_intermediate_size", default=0)
        if shared and not mixture.shared_ffn:
            yield "shared experts (shared_expert_intermediate_size) are not supported; use another model"

    def _active_window(self, hf_config: Fields) -> int | None:
        """The sliding window if some layer of the model really uses it."""
        absent = self.default_window if "sliding_window" not in hf_config.content else 0  # null: no window
        window = hf_config.integer("sliding_window", default=absent)
        if not window or window >= hf_config.integer("max_position_embeddings", default=window + 1):
            return None
        if self.window_switch == "sliding_window":
            return window
        if not hf_config.flag("use_sliding_window", default=False):
            return None
        if self.window_switch == "use_sliding_window":
            return window
        first = hf_config.integer("max_window_layers", default=28)  # transformers' default for Qwen2 and Qwen3
        listed = "sliding_attention" in hf_config.texts("layer_types", default=())
        return window if listed or first < size(hf_config, "num_hidden_layers") else None
