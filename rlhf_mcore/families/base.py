"""What a model family declares, without torch: how config.json becomes a geometry, what is refused, where Megatron holds its tensors.

A rule names a Megatron parameter (``{i}`` is the layer's number over the whole model, ``{k}`` that of an expert on its rank), how
tensor parallelism splits it, and the Hugging Face tensors that it holds with their full shapes in symbols (``{e}`` is the expert's
number over the whole layer). A parameter that no rule names is an error, so nothing can be left behind silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from rlhf_mcore.families.refusals import rotation_problems, unsupported_keys, window_problems
from rlhf_mcore.families.sizes import (
    head_dim,
    latent_sizes,
    max_positions,
    num_kv_heads,
    rope_type,
    rotary,
    size,
)
from rlhf_mcore.foreign import Fields
from rlhf_mcore.types import ModelGeometry

if TYPE_CHECKING:
    from rlhf_mcore.families.delta import DeltaNet
    from rlhf_mcore.families.mixture import Mixture, SigmoidMixture
    from rlhf_mcore.families.windows import Windows


@dataclass(frozen=True, slots=True)
class Dim:
    """A symbolic dimension of a tensor."""

    name: str
    of: Callable[[ModelGeometry], int]


ONE = Dim("one", lambda g: 1)
HIDDEN = Dim("hidden", lambda g: g.hidden_size)
TWICE_HIDDEN = Dim("twice_hidden", lambda g: 2 * g.hidden_size)
HEADS = Dim("heads", lambda g: g.num_heads)
QUERIES = Dim("queries", lambda g: g.num_heads * g.head_dim)
KV = Dim("kv", lambda g: g.num_kv_heads * g.head_dim)
HEAD_DIM = Dim("head_dim", lambda g: g.head_dim)
# Where config.json decides whether queries, keys and values have biases, and their heads norms.
BIASED_QUERIES = Dim("biased_queries", lambda g: g.num_heads * g.head_dim if g.has_qkv_bias else 0)
BIASED_KV = Dim("biased_kv", lambda g: g.num_kv_heads * g.head_dim if g.has_qkv_bias else 0)
NORMED_HEAD_DIM = Dim("normed_head_dim", lambda g: g.head_dim if g.has_qk_norm else 0)
FFN = Dim("ffn", lambda g: g.ffn_size)
VOCAB = Dim("vocab", lambda g: g.vocab_size)
EXPERTS = Dim("experts", lambda g: g.num_experts)
EXPERT_FFN = Dim("expert_ffn", lambda g: g.expert_ffn_size)
EXPERT_GATE_UP = Dim("expert_gate_up", lambda g: 2 * g.expert_ffn_size)
SHARED_FFN = Dim("shared_ffn", lambda g: g.shared_expert_ffn_size)
# Of latent attention: what is projected down to, what is projected up to, and queries where they are projected at once.
Q_RANK = Dim("q_rank", lambda g: g.q_lora_rank)
KV_RANK = Dim("kv_rank", lambda g: g.kv_lora_rank)
KV_DOWN = Dim("kv_down", lambda g: g.kv_lora_rank + g.rope_head_dim)
KV_UP = Dim("kv_up", lambda g: g.num_heads * (g.head_dim - g.rope_head_dim + g.value_dim))
VALUES = Dim("values", lambda g: g.num_heads * g.value_dim)
DIRECT_QUERIES = Dim("direct_queries", lambda g: 0 if g.q_lora_rank else g.num_heads * g.head_dim)

# How tensor-parallel ranks hold a parameter: whole; equal runs of rows of each of its tensors, one below the other; equal runs of
# columns; equal runs of rows of the padded vocabulary; an equal run of the rows of queries, keys and values interleaved by group;
# the part of one expert, transposed, of tensors that have those of all; rows by heads of a gated delta net, of tensors that have them
# by kind, or its inputs by head of keys; queries and their gates by head, with keys and values, interleaved as "qkv".
Kind = Literal[
    "replicated",
    "column_parallel",
    "row_parallel",
    "vocab_parallel",
    "qkv",
    "stacked",
    "delta",
    "delta_by_head",
    "gated_qkv",
]
Layers = Literal["all", "dense", "moe", "attention", "delta", "mtp"]  # that have a parameter
Spec = Literal["any", "local", "te"]  # layer specs that have it under a name: both, the local one, Transformer Engine's


@dataclass(frozen=True, slots=True)
class Rule:
    """Where one Megatron parameter's elements are among Hugging Face tensors. Where a dimension is 0 there is no such parameter.

    ``trained``: false of a buffer, which no optimizer steps. ``in_memory``: the name of the same rows in a live transformers model,
    where it differs from that of files (since version 5 the experts of a layer are one stack).
    """

    mcore: str
    kind: Kind
    tensors: Mapping[str, tuple[Dim, ...]]
    layers: Layers = "all"
    spec: Spec = "any"
    in_memory: str = ""
    trained: bool = True

    def shapes(self, geometry: ModelGeometry, layer: int = 0, expert: int = 0) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of its Hugging Face tensors in one layer, for one expert."""
        return {
            name.format(i=layer, e=expert): tuple(dim.of(geometry) for dim in dims)
            for name, dims in self.tensors.items()
        }

    def numel(self, geometry: ModelGeometry) -> int:
        """Elements in one layer, of one expert."""
        return sum(map(prod, self.shapes(geometry).values())) // (geometry.num_experts if self.kind == "stacked" else 1)

    def exists(self, geometry: ModelGeometry) -> bool:
        """Whether the layers of a model have this parameter."""
        return all(dim.of(geometry) for dims in self.tensors.values() for dim in dims)


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


_OUTSIDE = (
    Rule("embedding.word_embeddings.weight", "vocab_parallel", {"model.embed_tokens.weight": (VOCAB, HIDDEN)}),
    Rule("decoder.final_layernorm.weight", "replicated", {"model.norm.weight": (HIDDEN,)}),
)
# Norms of what comes out of attention and of the MLP, where a family has them.
OUTPUT_NORMS = (
    Rule(
        _MEGATRON + "self_attn_bda.norm.weight", "replicated", {_LAYER + "post_attention_layernorm.weight": (HIDDEN,)}
    ),
    Rule(_MEGATRON + "mlp_bda.norm.weight", "replicated", {_LAYER + "post_feedforward_layernorm.weight": (HIDDEN,)}),
)
_MLP = (
    Rule(_MEGATRON + "pre_mlp_layernorm.weight", "replicated", _MLP_NORM, "dense", "local"),
    # The norm before a mixture stands alone: there is no single linear layer to fuse it with.
    Rule(_MEGATRON + "pre_mlp_layernorm.weight", "replicated", _MLP_NORM, "moe"),
    Rule(_MEGATRON + "mlp.linear_fc1.layer_norm_weight", "replicated", _MLP_NORM, "dense", "te"),
    *gated_mlp("mlp.linear_fc{n}.weight", "mlp", FFN, "dense"),
)
DECODER = (
    _OUTSIDE[0],
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
    *_MLP,
    _OUTSIDE[1],
)
_INPUT_NORMS = (*_INPUT_NORM, *_MLP_NORM)
# With norms of outputs alone, and with both.
POST_NORM_DECODER = (*(rule for rule in DECODER if not set(rule.tensors) & set(_INPUT_NORMS)), *OUTPUT_NORMS)
SANDWICH_DECODER = (
    *(
        replace(rule, tensors={_LAYER + "pre_feedforward_layernorm.weight": (HIDDEN,)})
        if rule.tensors == _MLP_NORM
        else rule
        for rule in DECODER
    ),
    *OUTPUT_NORMS,
)


def _latent(module: str, kind: Kind, name: str, *dims: Dim, spec: Spec = "any") -> Rule:
    return Rule(f"{_MEGATRON}self_attention.{module}", kind, {f"{_ATTENTION}{name}.weight": dims}, spec=spec)


# Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): queries (or not) and keys and values by way of a latent.
LATENT_DECODER = (
    _OUTSIDE[0],
    Rule(_MEGATRON + "input_layernorm.weight", "replicated", _INPUT_NORM),
    _latent("linear_q_proj.weight", "column_parallel", "q_proj", DIRECT_QUERIES, HIDDEN),
    _latent("linear_q_down_proj.weight", "replicated", "q_a_proj", Q_RANK, HIDDEN),
    _latent("q_layernorm.weight", "replicated", "q_a_layernorm", Q_RANK, spec="local"),
    _latent("linear_q_up_proj.layer_norm_weight", "replicated", "q_a_layernorm", Q_RANK, spec="te"),
    _latent("linear_q_up_proj.weight", "column_parallel", "q_b_proj", QUERIES, Q_RANK),
    _latent("linear_kv_down_proj.weight", "replicated", "kv_a_proj_with_mqa", KV_DOWN, HIDDEN),
    _latent("kv_layernorm.weight", "replicated", "kv_a_layernorm", KV_RANK, spec="local"),
    _latent("linear_kv_up_proj.layer_norm_weight", "replicated", "kv_a_layernorm", KV_RANK, spec="te"),
    _latent("linear_kv_up_proj.weight", "column_parallel", "kv_b_proj", KV_UP, KV_RANK),
    _latent("linear_proj.weight", "row_parallel", "o_proj", HIDDEN, VALUES),
    *_MLP,
    _OUTSIDE[1],
)


def _qkv_bias(queries: Dim, keys: Dim) -> tuple[Rule, ...]:
    """Biases of queries, keys and values."""
    rows = {"q": queries, "k": keys, "v": keys}
    tensors = {f"{_ATTENTION}{x}_proj.bias": (size,) for x, size in rows.items()}
    return (Rule(_MEGATRON + "self_attention.linear_qkv.bias", "qkv", tensors),)


QKV_BIAS, OPTIONAL_QKV_BIAS = _qkv_bias(QUERIES, KV), _qkv_bias(BIASED_QUERIES, BIASED_KV)


def qk_norm(queries: Dim, keys: Dim | None = None) -> tuple[Rule, ...]:
    """Norms of queries and of keys (as large, if nothing else is given)."""
    return tuple(
        Rule(f"{_MEGATRON}self_attention.{x}_layernorm.weight", "replicated", {f"{_ATTENTION}{x}_norm.weight": (size,)})
        for x, size in (("q", queries), ("k", keys or queries))
    )


QK_NORM = qk_norm(HEAD_DIM)


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


def stacked_experts() -> tuple[Rule, ...]:
    """A mixture in which all parts have biases, and files have the experts of a layer in one tensor, with columns for outputs."""
    router, block = _MEGATRON + "mlp.router.", _LAYER + "mlp.experts."
    layers = (("1", "gate_up_proj", HIDDEN, EXPERT_GATE_UP), ("2", "down_proj", EXPERT_FFN, HIDDEN))
    names: tuple[tuple[Spec, str], ...] = (
        ("local", "local_experts.{k}.linear_fc{n}.{part}"),
        ("te", "linear_fc{n}.{part}{k}"),
    )
    return (
        Rule(router + "weight", "replicated", {_LAYER + "mlp.router.weight": (EXPERTS, HIDDEN)}, "moe"),
        Rule(router + "bias", "replicated", {_LAYER + "mlp.router.bias": (EXPERTS,)}, "moe"),
        *(
            Rule(
                _MEGATRON + "mlp.experts." + name.replace("{n}", n).replace("{part}", part),
                "stacked",
                {block + hf + suffix: (EXPERTS, *dims)},
                "moe",
                spec,
            )
            for spec, name in names
            for n, hf, inputs, outputs in layers
            for part, suffix, dims in (("weight", "", (inputs, outputs)), ("bias", "_bias", (outputs,)))
        ),
    )


SINKS = (
    Rule(
        _MEGATRON + "self_attention.core_attention.softmax_offset", "column_parallel", {_ATTENTION + "sinks": (HEADS,)}
    ),
)
OUTPUT_BIAS = (
    Rule(_MEGATRON + "self_attention.linear_proj.bias", "replicated", {_ATTENTION + "o_proj.bias": (HIDDEN,)}),
)
# Beside those of a layer of its kind, what an MTP layer has. Its embedding and output layer are those of the model.
MTP = (
    Rule(_MEGATRON + "enorm.weight", "replicated", {_LAYER + "enorm.weight": (HIDDEN,)}, "mtp"),
    Rule(_MEGATRON + "hnorm.weight", "replicated", {_LAYER + "hnorm.weight": (HIDDEN,)}, "mtp"),
    Rule(_MEGATRON + "eh_proj.weight", "column_parallel", {_LAYER + "eh_proj.weight": (HIDDEN, TWICE_HIDDEN)}, "mtp"),
    Rule(_MEGATRON + "final_layernorm.weight", "replicated", {_LAYER + "shared_head.norm.weight": (HIDDEN,)}, "mtp"),
)
EXPERT_BIAS = (
    Rule(
        _MEGATRON + "mlp.router.expert_bias",
        "replicated",
        {_LAYER + "mlp.gate.e_score_correction_bias": (EXPERTS,)},
        "moe",
        trained=False,
    ),
)


def shared_expert(block: str, gate: str = "") -> tuple[Rule, ...]:
    """The expert that sees every token beside a mixture, and the gate that its output is multiplied with, if there is one."""
    shared = "mlp.shared_experts."
    mlp = gated_mlp(shared + "linear_fc{n}.weight", block, SHARED_FFN, "moe")
    names = {f"{_LAYER}{gate}.weight": (ONE, HIDDEN)}
    return (*mlp, Rule(_MEGATRON + shared + "gate_weight", "replicated", names, "moe")) if gate else mlp


# Of DeepSeek-V3 and its cousins.
SIGMOID_EXPERTS = experts("mlp") + EXPERT_BIAS + shared_expert("mlp.shared_experts") + MTP


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    ``architecture`` is how the names of its Hugging Face architectures begin. ``megatron``: settings that are not Megatron's defaults,
    by the names that TransformerConfig and the arguments of a Megatron-LM checkpoint share. ``head_dim``: where config.json has none
    (None: the hidden size over the number of heads). ``latent``: attention is multi-head latent attention. ``flags`` and ``numbers``:
    the only supported values of keys in config.json, which are also their defaults. ``texts``: the only supported values of keys that
    an engine reads otherwise where they are absent, so that they have to be there. ``qk_norm_key``: the flag that decides whether
    there are norms of query and key heads, where not all models of the family have them; ``qkv_bias_key``: the same of biases of
    queries, keys and values. ``rotates_partly``: partial_rotary_factor decides how much of a head rotates. ``norm_of_projections``:
    a norm of heads is of all of them together. ``norms``: of what goes into attention and MLP of a layer, of what comes out, or of
    both.

    ``activation`` of the MLP, as config.json names it. ``tied``: whether the embedding is the output layer too, where config.json does
    not decide it. ``scales_embeddings``: by the root of the hidden size. ``absent``: keys that are refused where they have a value.
    ``settings``: what else Megatron needs to know of a config.json. ``dequantised``: ways in which stored experts may be quantised.

    ``vllm_imports``: a package that vLLM's module of the model needs and vLLM itself does not.
    ``delta``: layers with a gated delta net. ``windows``: layers that attend to some tokens only. Without, a window is refused where
    it is active: ``window_switch`` is the key that decides, beside ``sliding_window`` itself (``default_window`` where that is
    absent).
    """

    name: str
    architecture: str
    rules: tuple[Rule, ...]
    megatron: Mapping[str, Any] = field(default_factory=dict)
    head_dim: int | None = None
    latent: bool = False
    mixture: Mixture | SigmoidMixture | None = None
    flags: Mapping[str, bool] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    qk_norm_key: str = ""
    qkv_bias_key: str = ""
    rotates_partly: bool = False
    norm_of_projections: bool = False
    norms: Literal["inputs", "outputs", "both"] = "inputs"
    activation: str = "silu"
    tied: bool = False
    scales_embeddings: bool = False
    absent: tuple[str, ...] = ()
    settings: Callable[[Fields], Mapping[str, Any]] | None = None
    dequantised: tuple[Literal["mxfp4"], ...] = ()
    windows: Windows | None = None
    delta: DeltaNet | None = None
    vllm_imports: str = ""
    window_switch: Literal["sliding_window", "use_sliding_window", "max_window_layers"] = "max_window_layers"
    default_window: int = 0

    @property
    def has_stacked_experts(self) -> bool:
        """Whether files have the experts of a layer in one tensor; their gates and linear parts then take turns."""
        return any(rule.kind == "stacked" for rule in self.rules)

    def layer_rules(self, geometry: ModelGeometry, layer: int, *, fused: bool = False) -> list[Rule]:
        """Rules of the parameters of one layer of a model; ``fused`` as Transformer Engine's layer spec names them."""
        is_moe, is_delta = geometry.layer_kind(layer)
        kinds = ["all", "moe" if is_moe else "dense", "delta" if is_delta else "attention"]
        if layer >= geometry.num_layers:
            kinds.append("mtp")
        specs = ("any", "te" if fused else "local")
        return [
            rule
            for rule in self.rules
            if "{i}" in rule.mcore and rule.layers in kinds and rule.spec in specs and rule.exists(geometry)
        ]

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
            num_kv_heads=size(hf_config, "num_attention_heads") if self.latent else num_kv_heads(hf_config),
            head_dim=0 if self.latent else head_dim(hf_config, self.head_dim),
            ffn_size=size(hf_config, "intermediate_size", default=self._absent_ffn(hf_config)),
            vocab_size=size(hf_config, "vocab_size"),
            tied_embeddings=hf_config.flag("tie_word_embeddings", default=self.tied) and head == "lm",
            head=head,
            max_positions=max_positions(hf_config, is_stretched=self.windows is not None),
            has_qk_norm=self._has_qk_norm(hf_config),
            has_qkv_bias=self._has_qkv_bias(hf_config),
        )
        if self.latent:
            found = replace(found, **latent_sizes(hf_config))
        for part in (self.windows, self.delta):
            if part is not None:
                found = replace(found, **part.sizes(hf_config))
        return found if self.mixture is None else replace(found, **self.mixture.sizes(hf_config))

    def megatron_settings(self, hf_config: Fields) -> dict[str, Any]:
        """``megatron``, and what of it depends on a config.json."""
        found: dict[str, Any] = dict(self.megatron)
        if self.qk_norm_key:
            found["qk_layernorm"] = self._has_qk_norm(hf_config)
        if self.qkv_bias_key:
            found["add_qkv_bias"] = self._has_qkv_bias(hf_config)
        if self.mixture is not None:
            found |= self.mixture.settings(hf_config)
        for part in (self.windows, self.delta):
            if part is not None:
                found |= part.settings(hf_config)
        if self.settings is not None:
            found |= self.settings(hf_config)
        if self.latent:
            sizes, rope, is_yarn = latent_sizes(hf_config), rotary(hf_config), rope_type(hf_config) == "yarn"
            found |= {
                "multi_latent_attention": True,
                "q_lora_rank": sizes["q_lora_rank"] or None,
                "kv_lora_rank": sizes["kv_lora_rank"],
                "qk_head_dim": sizes["head_dim"] - sizes["rope_head_dim"],
                "qk_pos_emb_head_dim": sizes["rope_head_dim"],
                "v_head_dim": sizes["value_head_dim"],
                "qk_layernorm": True,
                "rope_type": "yarn" if is_yarn else "rope",
                "rotary_scaling_factor": rope.number("factor", default=1.0) if is_yarn else 1.0,
                "mscale": rope.number("mscale", default=1.0),
                "mscale_all_dim": rope.number("mscale_all_dim", default=0.0),
            }
        return found

    def problems(self, hf_config: Fields, architecture: str) -> Iterator[str]:
        """What of a config.json this family does not support.

        Raises:
            ConfigError: a size is absent or cannot be.
        """
        yield from rotation_problems(self, hf_config, architecture)
        yield from unsupported_keys(self, hf_config, architecture)
        if self.windows is not None:
            yield from self.windows.problems(hf_config)
        else:
            yield from window_problems(self, hf_config, architecture)
        for part in (self.mixture, self.delta):
            if part is not None:
                yield from part.problems(hf_config)

    def _absent_ffn(self, hf_config: Fields) -> int | None:
        """Of a family whose layers all have experts, and whose config.json has no size of another MLP."""
        replaces = self.mixture is not None and self.mixture.replaces_mlp
        return size(hf_config, "moe_intermediate_size") if replaces else None

    def _has_qk_norm(self, hf_config: Fields) -> bool:
        return bool(self.qk_norm_key) and hf_config.flag(self.qk_norm_key, default=False)

    def _has_qkv_bias(self, hf_config: Fields) -> bool:
        return bool(self.qkv_bias_key) and hf_config.flag(self.qkv_bias_key, default=False)
