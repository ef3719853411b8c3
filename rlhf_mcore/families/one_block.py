"""Read from config.json the block of each layer, for models with one block per layer: a state space, attention, or an MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rlhf_mcore.families.base import DECODER, HIDDEN, ONE, Dim, Kind, Layers, Rule
from rlhf_mcore.families.mixture import SigmoidMixture, expert_bias, experts, shared_expert
from rlhf_mcore.families.sizes import size
from rlhf_mcore.foreign import Fields, shorten
from rlhf_mcore.geometry import Block, ModelGeometry, SpaceSizes

_LETTERS: dict[str, Block] = {"M": "state_space", "*": "attention", "-": "dense", "E": "moe"}
_BLOCKS: dict[str, Block] = {
    "linear_attention": "state_space",
    "mamba": "state_space",  # a name in older files, like "attention"
    "full_attention": "attention",
    "attention": "attention",
    "mlp": "dense",
    "moe": "moe",
}
_LISTS, _PATTERN = ("layers_block_type", "layer_types"), "hybrid_override_pattern"

# The only supported values.
FLAGS = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"), False),
    **dict.fromkeys(("use_conv_bias", "norm_topk_prob"), True),
}
# Older names of keys, which transformers prefers.
_OLD = ("n_groups", "d_conv", "expand", "dt_min", "dt_max", "dt_limit", "dt_init_floor", "conv_bias", "chunk_size")
OLD_KEYS = tuple(f"mamba_{name}" for name in _OLD)


class OneBlock:
    """The block of each layer, and the sizes of its state spaces."""

    __slots__ = ()

    def with_number(self, hf_config: Fields) -> Fields:
        """Add the number of layers, which transformers does not save."""
        content = {**hf_config.content, "num_hidden_layers": len(self._blocks(hf_config)) or None}
        return Fields(content, hf_config.where, hf_config.remedy)

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        space = SpaceSizes(
            heads=size(hf_config, "mamba_num_heads", 128),
            head_dim=size(hf_config, "mamba_head_dim", 64),
            groups=size(hf_config, "n_groups", 8),
            state_dim=size(hf_config, "ssm_state_size", 128),
            kernel=size(hf_config, "conv_kernel", 4),
        )
        blocks = self._blocks(hf_config)
        return {"blocks": blocks, "space": space if "state_space" in blocks else None}

    def settings(self, hf_config: Fields) -> dict[str, Any]:
        """Return Megatron's settings."""
        space = self.sizes(hf_config)["space"]
        if space is None:
            return {}
        return {
            "mamba_num_heads": space.heads,
            "mamba_head_dim": space.head_dim,
            "mamba_num_groups": space.groups,
            "mamba_state_dim": space.state_dim,
            "linear_conv_kernel_dim": space.kernel,
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        sizes = self.sizes(hf_config)
        if "attention" not in sizes["blocks"]:
            yield "config.json lists no layer with attention, which is not supported; use another model"
        if (space := sizes["space"]) is not None and space.heads % space.groups:
            yield f"mamba_num_heads={space.heads} is not a multiple of n_groups={space.groups}; export the model again"
        for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
            if (activation := hf_config.text(key, default=only)) != only:
                yield f"{key} {shorten(activation)!r} is not supported, only {only!r}; use another model"
        if _is_limited(limit := hf_config.content.get("time_step_limit")):
            yield f"time_step_limit={shorten(limit)} is not supported, because engines do not limit time steps; remove it"

    @staticmethod
    def _blocks(hf_config: Fields) -> tuple[Block, ...]:
        """Return the block of each layer. transformers reads the pattern if there is no list."""
        key = next((name for name in _LISTS if name in hf_config), _PATTERN)
        known, names = (_LETTERS, hf_config.text(key)) if key == _PATTERN else (_BLOCKS, hf_config.texts(key))
        if unknown := set(names) - set(known):
            raise hf_config.wrong(key, f"made of {', '.join(known)} only ({shorten(min(unknown))})")
        return tuple(known[name] for name in names)


def _is_limited(limit: Any) -> bool:
    """Return whether config.json limits time steps. ``limit``: the lowest and the highest; JSON has no infinite number."""
    if limit is None:
        return False
    if not isinstance(limit, list | tuple) or len(limit) != 2:
        return True
    low, high = limit
    return bool(low != 0 or not (isinstance(high, dict) or (isinstance(high, int | float) and high >= 1e20)))


class BlockMixture(SigmoidMixture):
    """``SigmoidMixture`` in the layers whose block is experts. The shared expert has a separate size."""

    __slots__ = ()

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry. Return {} without such layers."""
        if "moe" not in OneBlock().sizes(hf_config)["blocks"]:
            return {}
        experts = SigmoidMixture.sizes(self, Fields({**hf_config.content, **_ALL}, hf_config.where, hf_config.remedy))
        shared = size(hf_config, "moe_shared_expert_intermediate_size", 7688)
        return {"experts": replace(experts["experts"], shared_ffn_size=shared)}

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        if self.sizes(hf_config):
            yield from SigmoidMixture.problems(self, hf_config)


_ALL = {"first_k_dense_replace": 0, "n_shared_experts": 1}


def _space(g: ModelGeometry) -> SpaceSizes:
    assert g.space is not None
    return g.space


PROJECTED = Dim("space_projected", lambda g: sum(_space(g).projection_sizes))
CONVOLVED = Dim("space_convolved", lambda g: sum(_space(g).conv_sizes))
INNER = Dim("space_inner", lambda g: _space(g).inner)
SPACE_HEADS = Dim("space_heads", lambda g: _space(g).heads)
KERNEL = Dim("space_kernel", lambda g: _space(g).kernel)

_MEGATRON, _BACKBONE = "decoder.layers.{i}.", "backbone.layers.{i}."
# The names of files, by the usual names in them.
_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
    ".input_layernorm.": ".norm.",
    ".post_attention_layernorm.": ".norm.",
}


def _in_one_block(rule: Rule) -> Rule:
    """Rename a rule's tensors, and drop the gate of an MLP. Rules of all layers become rules of attention."""
    tensors = {}
    for name, dims in rule.tensors.items():
        for usual, own in _NAMES.items():
            name = name.replace(usual, own)
        if "gate_proj" not in name:
            tensors[name] = dims
    layers: Layers = "attention" if rule.layers == "all" and "{i}" in rule.mcore else rule.layers
    return replace(rule, tensors=tensors, layers=layers, in_memory="")


def _space_rule(mcore: str, kind: Kind, *dims: Dim) -> Rule:
    return Rule(f"{_MEGATRON}self_attention.{mcore}", kind, {f"{_BACKBONE}mixer.{mcore}": dims}, "state_space")


_USUAL = DECODER + experts("mlp") + expert_bias("mlp.gate") + shared_expert("mlp.shared_experts")
ONE_BLOCK_DECODER = (
    *map(_in_one_block, _USUAL),
    Rule(_MEGATRON + "input_layernorm.weight", "replicated", {_BACKBONE + "norm.weight": (HIDDEN,)}, "state_space"),
    _space_rule("in_proj.weight", "state_space", PROJECTED, HIDDEN),
    _space_rule("conv1d.weight", "state_space", CONVOLVED, ONE, KERNEL),
    _space_rule("conv1d.bias", "state_space", CONVOLVED),
    _space_rule("dt_bias", "column_parallel", SPACE_HEADS),
    _space_rule("A_log", "column_parallel", SPACE_HEADS),
    _space_rule("D", "column_parallel", SPACE_HEADS),
    _space_rule("norm.weight", "column_parallel", INNER),
    _space_rule("out_proj.weight", "row_parallel", HIDDEN, INNER),
)
