"""Read towers for images from config.json: their sizes, their tensors, and the rotation of image positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlhf_mcore.families.base import Dim, Rule
from rlhf_mcore.families.sizes import head_dim, rotary, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ModelGeometry, VisionSizes

MAX_PATCHES = 16_384  # limit for one call of a tower, and for one image
TOWER = "vision_tower."  # prefix of its tensors in our models
Tensors = dict[str, tuple[int, ...]]
MAX_WIDTH, MAX_DEPTH, MAX_EDGE = 2**18, 1024, 512
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class Vision:
    """A tower next to a language model.

    ``tensors`` lists names and shapes, for given sizes and the decoder's hidden size. ``prefix`` is the prefix of
    their names in files. ``interleaved``: channels of a head alternate between rotation by time, row and column;
    otherwise the sections are consecutive. ``head_dim``: the family's head size. ``rotates`` is the default for
    the rotated share of a head, and ``sections`` the default for the sections, if config.json does not define
    them. ``merger`` occurs in the names of the modules that convert patches to tokens. ``attends_within``: all
    tokens of an image attend to each other. ``ties_inside``: transformers also reads tie_word_embeddings of the
    language model's section. ``stated``: required keys of the tower, for which transformers has other defaults.
    """

    tensors: Callable[[VisionSizes, int], Tensors]
    prefix: str
    interleaved: bool = False
    head_dim: int | None = None
    rotates: float = 1.0
    sections: tuple[int, ...] = ()
    merger: str = "merger"
    attends_within: bool = False
    ties_inside: bool = False
    stated: tuple[str, ...] = ()

    def text(self, hf_config: Fields) -> Fields:
        """Return the section of a config.json that describes the language model. Older files have it at the top level."""
        return hf_config.object("text_config", default=None) or hf_config

    def sizes(self, hf_config: Fields) -> dict[str, Any]:
        """Return fields of a geometry."""
        tower, text = hf_config.object("vision_config"), self.text(hf_config)
        deepstack = tower.integers("deepstack_visual_indexes", default=())
        return {
            "vision": VisionSizes(
                image_token_id=hf_config.integer("image_token_id", 0, size(text, "vocab_size") - 1),
                hidden_size=tower.integer("hidden_size", 1, MAX_WIDTH),
                ffn_size=tower.integer("intermediate_size", 1, MAX_WIDTH),
                depth=tower.integer("depth", 1, MAX_DEPTH),
                patch_size=tower.integer("patch_size", 1, MAX_EDGE),
                temporal_patch_size=tower.integer("temporal_patch_size", 1, MAX_EDGE, default=2),
                channels=tower.integer("in_channels", 1, MAX_EDGE, default=3),
                merge_size=tower.integer("spatial_merge_size", 1, MAX_EDGE, default=2),
                sections=tuple(rotary(text).integers("mrope_section", default=self.sections)),
                positions=tower.integer("num_position_embeddings", 0, MAX_WIDTH, default=0),
                deepstack=len(deepstack),
            )
        }

    def problems(self, hf_config: Fields) -> Iterator[str]:
        """Yield the unsupported parts of a config.json."""
        sizes, text = self.sizes(hf_config)["vision"], self.text(hf_config)
        share = text.number(_SHARE, 0.0, 1.0, default=self.rotates)
        share = rotary(text).number(_SHARE, 0.0, 1.0, default=share)
        pairs = int(head_dim(text, self.head_dim) * share) // 2
        if len(sizes.sections) != 3 or min(sizes.sections) < 0 or sum(sizes.sections) != pairs:
            given = list(sizes.sections)[:8]
            yield f"mrope_section={given} does not divide {pairs} pairs of channels into three; export the model again"
        for key in self.stated:
            if hf_config.object("vision_config").content.get(key) is None:
                yield f"vision_config has no {key}; export the model again"
        out = hf_config.object("vision_config").integer("out_hidden_size", 1, MAX_WIDTH, default=3584)
        if out != size(text, "hidden_size"):
            yield f"vision_config.out_hidden_size={out} is not hidden_size={size(text, 'hidden_size')}; export the model again"

    def axes(self, sections: tuple[int, ...]) -> list[int]:
        """Return, for each channel pair of a head, its rotation axis: time (0), row (1) or column (2)."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(sections) for _ in range(count)]
        axes = [0] * sum(sections)
        for axis in (1, 2):
            for number in range(sections[axis]):
                axes[3 * number + axis] = axis
        return axes

    def rules(self, geometry: ModelGeometry) -> tuple[Rule, ...]:
        """List the rules of the tower's tensors. Return an empty tuple for a geometry without a tower."""
        return _rules(self, geometry.vision, geometry.hidden_size) if geometry.vision is not None else ()

    def frozen(self, geometry: ModelGeometry, train: str) -> list[str]:
        """List the tensors in files that ``train`` ("none", "merger" or "all" of the tower) keeps unchanged."""
        names = [name for rule in self.rules(geometry) for name in rule.tensors]
        return [] if train == "all" else [name for name in names if train == "none" or self.merger not in name]


@cache
def _rules(vision: Vision, sizes: VisionSizes, hidden_size: int) -> tuple[Rule, ...]:
    return tuple(
        Rule(TOWER + name, "replicated", {vision.prefix + name: tuple(map(_fixed_dim, shape))})
        for name, shape in vision.tensors(sizes, hidden_size).items()
    )


def _fixed_dim(number: int) -> Dim:
    return Dim(str(number), lambda _: number)


def within(rules: tuple[Rule, ...], inner: str) -> tuple[Rule, ...]:
    """Return rules of a language model whose tensors in files have the prefix ``inner`` instead of ``model.``."""

    def rename(tensors: Mapping[str, tuple[Dim, ...]]) -> dict[str, tuple[Dim, ...]]:
        return {inner + name.removeprefix("model."): dims for name, dims in tensors.items()}

    return tuple(replace(rule, tensors=rename(rule.tensors)) for rule in rules)


def linear(name: str, outputs: int, inputs: int) -> Tensors:
    """List weight and bias of a linear layer."""
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def norm(name: str, width: int) -> Tensors:
    """List weight and bias of a norm."""
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _patches(v: VisionSizes) -> Tensors:
    return {"patch_embed.proj.weight": (v.hidden_size, v.channels, v.temporal_patch_size, v.patch_size, v.patch_size)}


def _attention(block: str, width: int) -> Tensors:
    return linear(block + "attn.qkv", 3 * width, width) | linear(block + "attn.proj", width, width)


def gated_tower(v: VisionSizes, hidden_size: int) -> Tensors:
    """List the tensors of Qwen2.5-VL's tower: norms without biases, and gated MLPs."""
    width, merged, tensors = v.hidden_size, v.hidden_size * v.merge_size**2, _patches(v)
    for layer in range(v.depth):
        block = f"blocks.{layer}."
        tensors |= {f"{block}norm1.weight": (width,), f"{block}norm2.weight": (width,)} | _attention(block, width)
        tensors |= linear(block + "mlp.gate_proj", v.ffn_size, width) | linear(block + "mlp.up_proj", v.ffn_size, width)
        tensors |= linear(block + "mlp.down_proj", width, v.ffn_size)
    tensors |= {"merger.ln_q.weight": (width,)}
    return tensors | linear("merger.mlp.0", merged, merged) | linear("merger.mlp.2", hidden_size, merged)


def plain_tower(v: VisionSizes, hidden_size: int) -> Tensors:
    """List the tensors of Qwen3-VL's tower: learned positions, and a merger for every level of DeepStack."""
    width, merged = v.hidden_size, v.hidden_size * v.merge_size**2
    tensors = _patches(v) | {"patch_embed.proj.bias": (width,), "pos_embed.weight": (v.positions, width)}
    for layer in range(v.depth):
        block = f"blocks.{layer}."
        tensors |= norm(block + "norm1", width) | norm(block + "norm2", width) | _attention(block, width)
        tensors |= linear(block + "mlp.linear_fc1", v.ffn_size, width) | linear(
            block + "mlp.linear_fc2", width, v.ffn_size
        )
    for merger, normed in (
        ("merger.", width),
        *((f"deepstack_merger_list.{level}.", merged) for level in range(v.deepstack)),
    ):
        tensors |= norm(merger + "norm", normed) | linear(merger + "linear_fc1", merged, merged)
        tensors |= linear(merger + "linear_fc2", hidden_size, merged)
    return tensors
