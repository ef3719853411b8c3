"""Towers that read images, from config.json: their sizes, their tensors, and how positions of images rotate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rlhf_mcore.families.base import Dim, Rule
from rlhf_mcore.families.sizes import head_dim, rotary, size
from rlhf_mcore.foreign import Fields
from rlhf_mcore.geometry import ModelGeometry

MAX_PATCHES = 16_384  # that a tower reads at a time, or those of one image
TOWER = "vision_tower."  # how the names of its tensors begin in a model of ours
Tensors = dict[str, tuple[int, ...]]
MAX_WIDTH, MAX_DEPTH, MAX_EDGE = 2**18, 1024, 512
_SHARE = "partial_rotary_factor"


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """A tower that reads images: patches become features, which stand in the places of tokens."""

    image_token_id: int  # of these tokens
    hidden_size: int
    ffn_size: int
    depth: int
    patch_size: int  # pixels of an edge
    temporal_patch_size: int
    channels: int
    merge_size: int  # so many patches of a row, in so many rows, are one token
    # Pairs of channels of a head that rotate by time, by row and by column; empty: tokens of images rotate as others do
    sections: tuple[int, ...]
    positions: int = 0  # that have a learned embedding
    deepstack: int = 0  # so many layers of the decoder add features of earlier layers of the tower to what they return

    def tokens(self, grid: Sequence[int]) -> int:
        """Count the tokens of an image of ``grid`` (time, rows, columns) patches."""
        return grid[0] * grid[1] * grid[2] // self.merge_size**2


@dataclass(frozen=True, slots=True)
class Vision:
    """A tower beside a language model.

    ``tensors`` lists names and shapes, of sizes and the hidden size of the decoder. ``prefix`` is before their names in files.
    ``interleaved``: channels of a head take turns in rotating by time, row and column; else the sections are one behind the other.
    ``head_dim``: as the family's. ``rotates``: so much of a head, and ``sections``, where config.json does not say it. ``merger`` is
    in the names of what makes tokens of patches. ``attends_within``: all tokens of an image attend to each other.
    """

    tensors: Callable[[VisionSizes, int], Tensors]
    prefix: str
    interleaved: bool = False
    head_dim: int | None = None
    rotates: float = 1.0
    sections: tuple[int, ...] = ()
    merger: str = "merger"
    attends_within: bool = False

    def text(self, hf_config: Fields) -> Fields:
        """Return the part of a config.json that describes the language model: older ones have it at the top."""
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
        """Yield what of a config.json is not supported."""
        sizes, text = self.sizes(hf_config)["vision"], self.text(hf_config)
        share = text.number(_SHARE, 0.0, 1.0, default=self.rotates)
        share = rotary(text).number(_SHARE, 0.0, 1.0, default=share)
        pairs = int(head_dim(text, self.head_dim) * share) // 2
        if len(sizes.sections) != 3 or min(sizes.sections) < 0 or sum(sizes.sections) != pairs:
            given = list(sizes.sections)[:8]
            yield f"mrope_section={given} is no division of {pairs} pairs of channels into three; export the model again"
        out = hf_config.object("vision_config").integer(
            "out_hidden_size", 1, MAX_WIDTH, default=size(text, "hidden_size")
        )
        if out != size(text, "hidden_size"):
            yield f"vision_config.out_hidden_size={out} is not hidden_size={size(text, 'hidden_size')}; export the model again"

    def axes(self, sections: tuple[int, ...]) -> list[int]:
        """List by which of time (0), row (1) and column (2) each pair of channels of a head rotates."""
        if not self.interleaved:
            return [axis for axis, count in enumerate(sections) for _ in range(count)]
        axes = [0] * sum(sections)
        for axis in (1, 2):
            for number in range(sections[axis]):
                axes[3 * number + axis] = axis
        return axes

    def rules(self, geometry: ModelGeometry) -> tuple[Rule, ...]:
        """List rules of the tensors of the tower; none of a geometry without."""
        return _rules(self, geometry.vision, geometry.hidden_size) if geometry.vision is not None else ()

    def frozen(self, geometry: ModelGeometry, train: str) -> list[str]:
        """List the tensors of files that ``train`` ("none", "merger" or "all" of the tower) leaves as they are."""
        names = [name for rule in self.rules(geometry) for name in rule.tensors]
        return [] if train == "all" else [name for name in names if train == "none" or self.merger not in name]


@cache
def _rules(vision: Vision, sizes: VisionSizes, hidden_size: int) -> tuple[Rule, ...]:
    return tuple(
        Rule(TOWER + name, "replicated", {vision.prefix + name: tuple(map(_fixed, shape))})
        for name, shape in vision.tensors(sizes, hidden_size).items()
    )


def _fixed(number: int) -> Dim:
    return Dim(str(number), lambda _: number)


def within(rules: tuple[Rule, ...], inner: str) -> tuple[Rule, ...]:
    """Return rules of a language model whose tensors files have under ``inner`` in the place of ``model.``."""

    def moved(tensors: Mapping[str, tuple[Dim, ...]]) -> dict[str, tuple[Dim, ...]]:
        return {inner + name.removeprefix("model."): dims for name, dims in tensors.items()}

    return tuple(replace(rule, tensors=moved(rule.tensors)) for rule in rules)


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
    """List the tensors of Qwen2.5-VL's tower: norms without biases, gated MLPs."""
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
