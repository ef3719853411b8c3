"""Layers of Gemma 4 that attend to all tokens: their heads differ from the heads of layers with sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhf_mcore.families.base import ATTENTION, HF_LAYER, HIDDEN, MEGATRON_LAYER, ONE, Dim, Rule, qk_norm
from rlhf_mcore.families.sizes import MAX_SIZES, scaling, size
from rlhf_mcore.families.windows import Windows
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry, WideSizes


def _heads(g: ModelGeometry) -> GroupedSizes:
    assert g.wide is not None
    return g.wide.heads


def _values(g: ModelGeometry, *, projected: bool) -> int:
    assert g.wide is not None
    return 0 if g.wide.keys_are_values == projected else _heads(g).num_kv_heads * _heads(g).head_dim


QUERIES = Dim("wide_queries", lambda g: _heads(g).num_heads * _heads(g).head_dim)
KEYS = Dim("wide_keys", lambda g: _heads(g).num_kv_heads * _heads(g).head_dim)
HEAD_DIM = Dim("wide_head_dim", lambda g: _heads(g).head_dim)
VALUES = Dim("wide_values", lambda g: _values(g, projected=True))  # 0: the layers have no projection of values
KEYS_AND_VALUES = Dim("wide_keys_and_values", lambda g: _values(g, projected=False))  # 0: they have one


def _qkv(**rows: Dim) -> Rule:
    name = MEGATRON_LAYER + "self_attention.linear_qkv.weight"
    return Rule(name, "wide_qkv", {f"{ATTENTION}{x}_proj.weight": (size, HIDDEN) for x, size in rows.items()}, "wide")


_OUTPUT = {ATTENTION + "o_proj.weight": (HIDDEN, QUERIES)}
WIDE_HEADS = (
    _qkv(q=QUERIES, k=KEYS, v=VALUES),
    _qkv(q=QUERIES, k=KEYS_AND_VALUES),
    Rule(MEGATRON_LAYER + "self_attention.linear_proj.weight", "row_parallel", _OUTPUT, "wide"),
    *(replace(rule, layers="wide") for rule in qk_norm(HEAD_DIM)),
)

_SCALE = {HF_LAYER + "layer_scalar": (ONE,)}
LAYER_SCALE = (Rule(MEGATRON_LAYER + "mlp_bda.scale", "replicated", _SCALE, trained=False),)


def with_wide_heads(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Restrict a decoder's rules of heads to layers with usual heads, and add the rules of wide heads."""
    wide = {rule.mcore for rule in WIDE_HEADS}
    return (*(replace(rule, layers="attention") if rule.mcore in wide else rule for rule in rules), *WIDE_HEADS)


def _own_sizes(hf_config: Fields) -> dict[int, Fields] | None:
    """Return the sizes that layers do not share, by layer. transformers pads their numbers with zeros."""
    if (given := hf_config.object("per_layer_config", default=None)) is None:
        return None
    return {int(key): given.object(key) for key in given if key.isascii() and key.isdigit() and len(key) < 5}


_USUAL_ROPE = {"sliding_attention": "default", "full_attention": "proportional"}


@dataclass(frozen=True, slots=True)
class WindowsAndWideHeads(Windows):
    """Sliding windows in most layers, and wide heads in the others.

    config.json has the sizes of wide heads as ``global_head_dim`` and ``num_global_key_value_heads``, or for each
    layer in ``per_layer_config``, as transformers saves them. The last layer must attend to all tokens.
    """

    head_dim: int = 512  # default of ``global_head_dim``

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        kinds = self._kinds(hf_config)
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
        keys_are_values = hf_config.flag("attention_k_eq_v", default=False)
        groups = "num_global_key_value_heads"
        usual = size(hf_config, "num_key_value_heads")
        dim = hf_config.integer("global_head_dim", 2, MAX_SIZES["head_dim"], default=self.head_dim)
        kv_heads = hf_config.integer(groups, 1, usual, default=usual) if keys_are_values else usual
        if layers and (own := _own_sizes(hf_config)) is not None:
            if layers[0] not in own:
                raise hf_config.wrong("per_layer_config", "sizes of every layer with full_attention")
            dim = own[layers[0]].integer("head_dim", 2, MAX_SIZES["head_dim"])
            kv_heads = own[layers[0]].integer("num_key_value_heads", 1, usual, default=usual)
        heads = GroupedSizes(size(hf_config, "num_attention_heads"), kv_heads, dim)
        return {**Windows.sizes(self, hf_config), "wide": WideSizes(layers, heads, keys_are_values)}

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        yield from Windows.problems(self, hf_config)
        wide: WideSizes = self.sizes(hf_config)["wide"]
        if not wide.layers or wide.layers[-1] != size(hf_config, "num_hidden_layers") - 1:
            yield "layer_types does not end with full_attention, as transformers requires; export the model again"
        if wide.heads.head_dim % 2 or wide.heads.num_heads % wide.heads.num_kv_heads:
            shown = f"global_head_dim={wide.heads.head_dim}, num_global_key_value_heads={wide.heads.num_kv_heads}"
            needed = f"the first must be even, and the second a divisor of num_attention_heads={wide.heads.num_heads}"
            yield f"{shown}: {needed}; export the model again"
        if (own := _own_sizes(hf_config)) is not None:
            known = [sizes.content for sizes in own.values()]
            is_alike = tuple(sorted(own)) == wide.layers and all(sizes == known[0] for sizes in known)
            if not (is_alike and set(known[0]) <= {"head_dim", "num_key_value_heads"}):
                only = "head_dim and num_key_value_heads only, the same for all layers with full_attention"
                yield f"per_layer_config must have {only}, and no other layers; use another model"
        rotated_whole = [hf_config]
        if (ropes := hf_config.object("rope_parameters", default=None)) is not None:
            for kind, usual in _USUAL_ROPE.items():
                rope = ropes.object(kind)
                if (given := scaling(rope)) != usual or rope.number("factor", default=1.0) != 1.0:
                    yield f"rope_parameters: {kind} with rope type {given!r} or a factor is not supported; use another model"
            rotated_whole.append(ropes.object("sliding_attention"))
        if any(fields.number("partial_rotary_factor", default=1.0) != 1.0 for fields in rotated_whole):
            yield "partial_rotary_factor is supported for full_attention only, in rope_parameters; use another model"
        if hf_config.text("use_bidirectional_attention", default="vision") != "vision":
            yield "use_bidirectional_attention is supported for vision tokens only; use another model"

    def _usual_kinds(self, hf_config: Fields) -> list[str]:
        kinds = Windows._usual_kinds(self, hf_config)
        return [*kinds[:-1], "full_attention"]
