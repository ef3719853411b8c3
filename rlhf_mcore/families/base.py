"""Declare a model family without torch: the geometry from config.json, unsupported values, and Megatron's tensors.

A rule names a Megatron parameter, its tensor-parallel split, and its Hugging Face tensors with full shapes in
symbols. In names, ``{i}`` is the layer's number in the whole model, ``{k}`` an expert's number on its rank, and
``{e}`` an expert's number in the whole layer. A parameter without a rule is an error, so no parameter is left out
silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from rlhf_mcore.families.refusals import rotation_problems, unsupported_keys, window_problems
from rlhf_mcore.families.sizes import head_dim, max_positions, num_kv_heads, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry

if TYPE_CHECKING:
    from rlhf_mcore.families.beside_mlp import MixtureBesideMLP
    from rlhf_mcore.families.delta import DeltaNet
    from rlhf_mcore.families.latent import Latent
    from rlhf_mcore.families.mixture import Mixture, SigmoidMixture
    from rlhf_mcore.families.one_block import OneBlock
    from rlhf_mcore.families.vision import Vision
    from rlhf_mcore.families.windows import Windows


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic dimension of a tensor."""

    name: str
    of: Callable[[ModelGeometry], int]


def _grouped_sizes_of(g: ModelGeometry) -> GroupedSizes:
    assert isinstance(g.attention, GroupedSizes)
    return g.attention


ONE = Dim("one", lambda g: 1)
HIDDEN = Dim("hidden", lambda g: g.hidden_size)
TWICE_HIDDEN = Dim("twice_hidden", lambda g: 2 * g.hidden_size)
HEADS = Dim("heads", lambda g: g.num_heads)
QUERIES = Dim("queries", lambda g: g.num_heads * g.head_dim)
KV = Dim("kv", lambda g: g.num_kv_heads * g.head_dim)
HEAD_DIM = Dim("head_dim", lambda g: g.head_dim)
# For families in which config.json decides on biases of queries, keys and values, and on norms of heads.
BIASED_QUERIES = Dim("biased_queries", lambda g: g.num_heads * g.head_dim if _grouped_sizes_of(g).has_qkv_bias else 0)
BIASED_KV = Dim("biased_kv", lambda g: g.num_kv_heads * g.head_dim if _grouped_sizes_of(g).has_qkv_bias else 0)
NORMED_HEAD_DIM = Dim("normed_head_dim", lambda g: g.head_dim if _grouped_sizes_of(g).has_qk_norm else 0)
FFN = Dim("ffn", lambda g: g.ffn_size)
VOCAB = Dim("vocab", lambda g: g.vocab_size)

# How tensor-parallel ranks split a parameter.
Kind = Literal[
    "replicated",  # whole on every rank
    "column_parallel",  # equal runs of rows of each Hugging Face tensor, stacked
    "row_parallel",  # equal runs of columns
    "vocab_parallel",  # equal runs of rows of the padded vocabulary
    "qkv",  # an equal run of the rows of queries, keys and values, interleaved by group
    "wide_qkv",  # the same for wide heads; values may be missing
    "stacked",  # one expert's part, transposed, of a tensor with all experts
    "stacked_halves",  # equal runs of rows of gate and up of one expert, of a tensor with all experts
    "stacked_columns",  # equal runs of columns of one expert, of a tensor with all experts
    "delta",  # rows of a gated delta net by head; files group them by kind
    "delta_by_head",  # the same rows; files group the inputs by key head
    "state_space",  # rows of a state-space layer by head and group; files group them by kind
    "gated_qkv",  # like "qkv", but queries and gates alternate per head in files
    "joined_qkv",  # like "qkv", but files stack queries, keys and values in one tensor
    "halves",  # like "column_parallel", but files stack the two matrices in one tensor
    "transposed",  # whole on every rank, transposed
    "vocab_columns",  # equal runs of columns of the padded vocabulary, transposed
]
Layers = Literal[
    "all", "dense", "moe", "attention", "wide", "delta", "state_space", "indexed", "mtp"
]  # layers that have the parameter
Spec = Literal["any", "local", "te"]  # layer specs with this name; "te": Transformer Engine's


@dataclass(frozen=True, slots=True)
class Rule:
    """Place the elements of a Megatron parameter in Hugging Face tensors.

    If a dimension is 0, the parameter does not exist.

    ``trained``: False, or a function that returns it, if no optimizer updates the parameter. ``in_memory``: the name
    of the same rows in a live transformers model, if it differs from the name in files. Since version 5 transformers
    stacks a layer's experts.
    """

    mcore: str
    kind: Kind
    tensors: Mapping[str, tuple[Dim, ...]]
    layers: Layers = "all"
    spec: Spec = "any"
    in_memory: str = ""
    trained: bool | Callable[[ModelGeometry], bool] = True

    def is_trained(self, geometry: ModelGeometry) -> bool:
        """Return whether an optimizer can update the parameter."""
        return self.trained if isinstance(self.trained, bool) else self.trained(geometry)

    def shapes(self, geometry: ModelGeometry, layer: int = 0, expert: int = 0) -> dict[str, tuple[int, ...]]:
        """Return names and full shapes of the rule's Hugging Face tensors in one layer, for one expert."""
        return {
            name.format(i=layer, e=expert): tuple(dim.of(geometry) for dim in dims)
            for name, dims in self.tensors.items()
        }

    def numel(self, geometry: ModelGeometry) -> int:
        """Return the number of elements in one layer, for one expert."""
        return sum(map(prod, self.shapes(geometry).values())) // (geometry.num_experts if self.is_stacked else 1)

    @property
    def is_stacked(self) -> bool:
        """Return whether each tensor in files contains all experts of a layer."""
        return self.kind.startswith("stacked")

    def exists(self, geometry: ModelGeometry) -> bool:
        """Return whether the layers of a model have this parameter."""
        return all(dim.of(geometry) for dims in self.tensors.values() for dim in dims)


MEGATRON_LAYER, HF_LAYER = "decoder.layers.{i}.", "model.layers.{i}."
INPUT_NORM = {HF_LAYER + "input_layernorm.weight": (HIDDEN,)}
_MLP_NORM = {HF_LAYER + "post_attention_layernorm.weight": (HIDDEN,)}
ATTENTION, _QKV = HF_LAYER + "self_attn.", {"q": QUERIES, "k": KV, "v": KV}


def gated_mlp(
    linear: str,
    block: str,
    ffn: Dim,
    layers: Layers,
    spec: Spec = "any",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Rule, Rule]:
    """Return the rules of Megatron's two layers ``linear`` (``{n}`` is 1 or 2), which hold gate, up and down matrices."""
    gate, up, down = (f"{HF_LAYER}{block}.{name}.weight" for name in names)
    first, second = (MEGATRON_LAYER + linear.replace("{n}", n) for n in "12")
    return (
        Rule(first, "column_parallel", {gate: (ffn, HIDDEN), up: (ffn, HIDDEN)}, layers, spec),
        Rule(second, "row_parallel", {down: (HIDDEN, ffn)}, layers, spec),
    )


OUTSIDE = (
    Rule("embedding.word_embeddings.weight", "vocab_parallel", {"model.embed_tokens.weight": (VOCAB, HIDDEN)}),
    Rule("decoder.final_layernorm.weight", "replicated", {"model.norm.weight": (HIDDEN,)}),
)
# Norms of the outputs of attention and MLP, for families that have them.
OUTPUT_NORMS = (
    Rule(
        MEGATRON_LAYER + "self_attn_bda.norm.weight",
        "replicated",
        {HF_LAYER + "post_attention_layernorm.weight": (HIDDEN,)},
    ),
    Rule(
        MEGATRON_LAYER + "mlp_bda.norm.weight",
        "replicated",
        {HF_LAYER + "post_feedforward_layernorm.weight": (HIDDEN,)},
    ),
)
MLP = (
    Rule(MEGATRON_LAYER + "pre_mlp_layernorm.weight", "replicated", _MLP_NORM, "dense", "local"),
    # The norm before MoE layers is separate, because there is no single linear layer to fuse it with.
    Rule(MEGATRON_LAYER + "pre_mlp_layernorm.weight", "replicated", _MLP_NORM, "moe"),
    Rule(MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight", "replicated", _MLP_NORM, "dense", "te"),
    *gated_mlp("mlp.linear_fc{n}.weight", "mlp", FFN, "dense"),
)
DECODER = (
    OUTSIDE[0],
    Rule(MEGATRON_LAYER + "input_layernorm.weight", "replicated", INPUT_NORM, spec="local"),
    Rule(MEGATRON_LAYER + "self_attention.linear_qkv.layer_norm_weight", "replicated", INPUT_NORM, spec="te"),
    Rule(
        MEGATRON_LAYER + "self_attention.linear_qkv.weight",
        "qkv",
        {f"{ATTENTION}{x}_proj.weight": (rows, HIDDEN) for x, rows in _QKV.items()},
    ),
    Rule(
        MEGATRON_LAYER + "self_attention.linear_proj.weight",
        "row_parallel",
        {ATTENTION + "o_proj.weight": (HIDDEN, QUERIES)},
    ),
    *MLP,
    OUTSIDE[1],
)
_INPUT_NORMS = (*INPUT_NORM, *_MLP_NORM)
# Decoders with norms of outputs only, and with norms of inputs and outputs.
POST_NORM_DECODER = (*(rule for rule in DECODER if not set(rule.tensors) & set(_INPUT_NORMS)), *OUTPUT_NORMS)
SANDWICH_DECODER = (
    *(
        replace(rule, tensors={HF_LAYER + "pre_feedforward_layernorm.weight": (HIDDEN,)})
        if rule.tensors == _MLP_NORM
        else rule
        for rule in DECODER
    ),
    *OUTPUT_NORMS,
)


def _qkv_bias(queries: Dim, keys: Dim) -> tuple[Rule, ...]:
    """Return the rules for biases of queries, keys and values."""
    rows = {"q": queries, "k": keys, "v": keys}
    tensors = {f"{ATTENTION}{x}_proj.bias": (size,) for x, size in rows.items()}
    return (Rule(MEGATRON_LAYER + "self_attention.linear_qkv.bias", "qkv", tensors),)


QKV_BIAS, OPTIONAL_QKV_BIAS = _qkv_bias(QUERIES, KV), _qkv_bias(BIASED_QUERIES, BIASED_KV)


def qk_norm(queries: Dim, keys: Dim | None = None) -> tuple[Rule, ...]:
    """Return the rules for norms of queries and keys. ``keys`` defaults to the size of queries."""
    return tuple(
        Rule(
            f"{MEGATRON_LAYER}self_attention.{x}_layernorm.weight",
            "replicated",
            {f"{ATTENTION}{x}_norm.weight": (size,)},
        )
        for x, size in (("q", queries), ("k", keys or queries))
    )


QK_NORM = qk_norm(HEAD_DIM)


SINKS = (
    Rule(
        MEGATRON_LAYER + "self_attention.core_attention.softmax_offset",
        "column_parallel",
        {ATTENTION + "sinks": (HEADS,)},
    ),
)
OUTPUT_BIAS = (
    Rule(MEGATRON_LAYER + "self_attention.linear_proj.bias", "replicated", {ATTENTION + "o_proj.bias": (HIDDEN,)}),
)


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: reading its config.json, rejecting unsupported values, and the places of its tensors."""

    name: str  # transformers' ``model_type``, and the module's name
    architecture: str  # prefix of its Hugging Face architectures
    rules: tuple[Rule, ...]

    # Optional parts.
    latent: Latent | None = None  # multi-head latent attention instead of grouped heads
    windows: Windows | None = None  # layers with sliding-window attention
    delta: DeltaNet | None = None  # layers with a gated delta net
    one_block: OneBlock | None = None  # one block per layer, some of them state spaces
    mixture: Mixture | SigmoidMixture | MixtureBesideMLP | None = None
    experts_beside_mlp: bool = False  # layers with experts have an MLP too; both have norms of input and output
    vision: Vision | None = None  # a tower; config.json has its sizes in a separate section

    # Attention and norms.
    head_dim: int | None = None  # default without head_dim in config.json; None: hidden size / number of heads
    repeats_heads: bool = False  # without num_key_value_heads in config.json, every query head has a key head
    # config.json's flag for norms of query and key heads, if it varies between models
    qk_norm_key: str = ""
    qkv_bias_key: str = ""  # config.json's flag for biases of queries, keys and values
    qkv_bias: bool = False  # default of this flag
    norm_of_projections: bool = False  # one norm over all heads together
    rotates: bool = True  # rotary embeddings
    rotates_partly: bool = False  # partial_rotary_factor sets the rotated share of a head
    rotates_proportionally: bool = False  # the same for rope type "proportional": other channels have frequency 0
    norm_of_values: bool = False  # each head's values are normalised without a weight
    norms: Literal["inputs", "outputs", "both"] = "inputs"  # around attention and MLP
    layer_type: str = "full_attention"  # the only kind in config.json's layer_types, without windows or a delta net
    scales_layers: bool = False  # files contain a factor for each layer's output

    # The rest of a decoder.
    activation: str = "silu"  # activation of the MLP, named as in config.json
    tied: bool = False  # default without tie_word_embeddings in config.json: the embedding is the output layer
    scales_embeddings: bool = False  # by the square root of the hidden size
    logit_cap_key: str = ""  # config.json's key for a bound c of logits z: c tanh(z / c)
    norm_eps_key: str = "rms_norm_eps"  # config.json's epsilon of norms

    # Megatron settings that differ from its defaults, in names shared by TransformerConfig and Megatron-LM's
    # arguments.
    megatron: Mapping[str, Any] = field(default_factory=dict)
    settings: Callable[[Fields], Mapping[str, Any]] | None = None  # the settings that depend on config.json

    # Unsupported values. For these keys of config.json, only the given value is supported. It is also the default.
    flags: Mapping[str, bool] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    # Required keys with their only value, because transformers or engines use another default.
    stated: Mapping[str, str | bool | int] = field(default_factory=dict)
    absent: tuple[str, ...] = ()  # keys that must have no value
    # Without ``windows``: the key that activates sliding_window, and the default of sliding_window.
    window_switch: Literal["sliding_window", "use_sliding_window", "max_window_layers"] = "max_window_layers"
    default_window: int = 0
    # Keys that are changed before transformers computes, because it deviates from the published model and from vLLM.
    of_transformers: Mapping[str, float] = field(default_factory=dict)

    @property
    def parts(self) -> list[Latent | Windows | DeltaNet | OneBlock | Mixture | SigmoidMixture | MixtureBesideMLP]:
        """List the family's parts. Each part reads sizes, Megatron's settings and unsupported values from config.json."""
        return [
            part for part in (self.latent, self.windows, self.delta, self.one_block, self.mixture) if part is not None
        ]

    @property
    def has_gates(self) -> bool:
        """Return whether MLPs and experts multiply their activation by a linear part."""
        return bool(self.megatron.get("gated_linear_unit", True))

    @property
    def has_stacked_experts(self) -> bool:
        """Return whether files stack a layer's experts in one tensor. Gate and up rows alternate in it."""
        return any(rule.kind == "stacked" for rule in self.rules)

    def layer_rules(self, geometry: ModelGeometry, layer: int, *, fused: bool = False) -> list[Rule]:
        """List the rules of one layer of a model. ``fused`` selects the names of Transformer Engine's layer spec."""
        kinds = ["all", *geometry.layer_kind(layer)]
        if layer >= geometry.num_layers:
            kinds.append("mtp")
        specs = ("any", "te" if fused else "local")
        return [
            rule
            for rule in self.rules
            if "{i}" in rule.mcore and rule.layers in kinds and rule.spec in specs and rule.exists(geometry)
        ]

    def geometry(self, hf_config: Fields, head: str = "lm") -> ModelGeometry:
        """Read the sizes in a config.json of this family, for one kind of head.

        Raises:
            ConfigError: a size is missing or invalid.
        """
        sections = [hf_config, *([self.text(hf_config)] if self.vision is not None and self.vision.ties_inside else [])]
        tied = any(section.flag("tie_word_embeddings", default=self.tied) for section in sections)
        vision = self.vision.sizes(hf_config) if self.vision is not None else {}
        hf_config = self.text(hf_config)
        sizes: dict[str, Any] = {} if self.latent is not None else {"attention": self._grouped_sizes(hf_config)}
        for part in self.parts:
            sizes |= part.sizes(hf_config)
        return ModelGeometry(
            family=self.name,
            num_layers=size(hf_config, "num_hidden_layers"),
            hidden_size=size(hf_config, "hidden_size"),
            ffn_size=size(hf_config, "intermediate_size", default=self._absent_ffn(hf_config)),
            vocab_size=size(hf_config, "vocab_size"),
            tied_embeddings=tied and head == "lm",
            head=head,
            max_positions=max_positions(hf_config, is_stretched=self.windows is not None),
            **sizes,
            **vision,
        )

    def text(self, hf_config: Fields) -> Fields:
        """Return the section of a config.json that describes the language model."""
        if self.one_block is not None:
            return self.one_block.with_number(hf_config)
        return hf_config if self.vision is None else self.vision.text(hf_config)

    def megatron_settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return ``megatron``, and the settings that depend on config.json."""
        settings, hf_config = dict(self.megatron), self.text(hf_config)
        if self.qk_norm_key:
            settings["qk_layernorm"] = self._has_qk_norm(hf_config)
        if self.qkv_bias_key:
            settings["add_qkv_bias"] = self._has_qkv_bias(hf_config)
        for part in self.parts:
            settings |= part.settings(hf_config)
        if self.settings is not None:
            settings |= self.settings(hf_config)
        return settings

    def problems(self, hf_config: Fields, architecture: str) -> Iterator[str]:
        """Yield the parts of a config.json that this family does not support.

        Raises:
            ConfigError: a size is missing or invalid.
        """
        if self.vision is not None:
            yield from self.vision.problems(hf_config)
        hf_config = self.text(hf_config)
        if self.settings is not None:
            self.settings(hf_config)
        yield from rotation_problems(self, hf_config, architecture)
        yield from unsupported_keys(self, hf_config, architecture)
        if self.windows is None:
            yield from window_problems(self, hf_config, architecture)
        for part in self.parts:
            yield from part.problems(hf_config)

    def _grouped_sizes(self, hf_config: Fields) -> GroupedSizes:
        return GroupedSizes(
            num_heads=size(hf_config, "num_attention_heads"),
            num_kv_heads=num_kv_heads(hf_config, may_be_absent=self.repeats_heads),
            head_dim=head_dim(hf_config, self.head_dim),
            has_qk_norm=self._has_qk_norm(hf_config),
            has_qkv_bias=self._has_qkv_bias(hf_config),
        )

    def _absent_ffn(self, hf_config: Fields) -> int | None:
        """Return the MLP size of a family with experts in all layers and no such size in config.json."""
        replaces = self.mixture is not None and self.mixture.replaces_mlp
        return size(hf_config, "moe_intermediate_size") if replaces else None

    def _has_qk_norm(self, hf_config: Fields) -> bool:
        return bool(self.qk_norm_key) and hf_config.flag(self.qk_norm_key, default=False)

    def _has_qkv_bias(self, hf_config: Fields) -> bool:
        return bool(self.qkv_bias_key) and hf_config.flag(self.qkv_bias_key, default=self.qkv_bias)
