"""Define 8-bit weights (``rollout.quantization``): the quantised tensors of a model, and their scales.

No torch needed.

Matrices of attention, MLPs and experts are quantised. Embeddings, norms, routers, biases and the output layer are
not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlhf_mcore.families import FAMILIES
from rlhf_mcore.geometry import GroupedSizes, ModelGeometry

_MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn|mlp|block_sparse_moe)\.(.+\.)?(\w+_proj|w[123])\.weight")
_WHOLE_ROW = 1 << 40  # columns: more than any tensor has


@dataclass(frozen=True, slots=True)
class Quantisation:
    """A quantisation format: each block of ``block`` = (rows, columns) has one fp32 scale.

    ``suffix`` is appended to a Hugging Face tensor's name to get the name of its scales.
    """

    name: str  # in rollout.quantization
    dtype: str
    block: tuple[int, int]
    suffix: str
    of_training: bool = False  # computed like Transformer Engine, which uses it for training (``actor.fp8``)

    def applies(self, name: str) -> bool:
        """Return whether a Hugging Face tensor is quantised."""
        return _MATRIX.fullmatch(name) is not None

    def blocks(self, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return start and shape, in blocks, of the blocks that a rectangle of a tensor intersects."""
        first = tuple([begin // size for begin, size in zip(start, self.block, strict=True)])
        ends = [-(-(begin + n) // size) for begin, n, size in zip(start, shape, self.block, strict=True)]
        return first, tuple([end - low for end, low in zip(ends, first, strict=True)])

    def with_scales(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of a model's tensors, each followed by its scales."""
        every: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            every[name] = shape
            if self.applies(name):
                every[name + self.suffix] = self.blocks((0, 0), shape)[1]
        return every


QUANTISATIONS = {
    "fp8": Quantisation("fp8", "float8_e4m3fn", (128, 128), "_scale_inv"),
    "int8": Quantisation("int8", "int8", (1, _WHOLE_ROW), "_scale"),
}
FP8_OF_TRAINING = "fp8 of training"  # the name of fp8 computed like Transformer Engine


def quantisation(name: str) -> Quantisation:
    """Return a format by its name in the bridge: a key of ``QUANTISATIONS``, or ``FP8_OF_TRAINING``."""
    return replace(QUANTISATIONS["fp8"], of_training=True) if name == FP8_OF_TRAINING else QUANTISATIONS[name]


def quantisation_problems(geometry: ModelGeometry) -> Iterator[str]:
    """Name the parts of a model for which quantisation is not supported."""
    if FAMILIES[geometry.family].has_stacked_experts:
        yield "experts in one tensor per layer"
    if geometry.vision is not None:
        yield "a tower for images"
    if not isinstance(geometry.attention, GroupedSizes):
        yield "latent attention"
    if geometry.wide is not None:
        yield "two kinds of attention heads"
    if geometry.recurrent_part is not None:
        yield geometry.recurrent_part


def cut_problems(
    geometry: ModelGeometry, tp: int, dp: int = 1, ep: int = 1, *, etp: int | None = None
) -> Iterator[str]:
    """Yield the 128x128 blocks that a layout of engines or models would cut, or that two matrices of a layer would share.

    Pipeline stages hold whole matrices. With ``ep`` an expert is whole; without it, all ranks split the expert.
    With ``etp``, ``etp`` ranks split it. vLLM rejects such blocks (``validate_fp8_block_shape`` and
    ``validate_fp8_block_shape_moe`` in its ``fp8_utils``).
    """
    attention, experts = geometry.attention, geometry.experts
    queries, heads = geometry.num_heads * geometry.head_dim // tp, max(geometry.num_kv_heads // tp, 1)
    parts = {"queries": queries, "keys": heads * geometry.head_dim}
    if tp > 1:
        parts |= {
            "values": heads * attention.value_dim,
            "inputs of o_proj": geometry.num_heads * attention.value_dim // tp,
        }
    if geometry.has_dense_mlp:
        parts["rows of gate_proj"] = geometry.ffn_size // tp
    if experts is not None:
        parts["rows of an expert's gate_proj"] = experts.ffn_size // (etp or (1 if ep > 1 else tp * dp))
        if experts.shared_ffn_size:
            parts["rows of the shared expert's gate_proj"] = experts.shared_ffn_size // tp
    for what, count in parts.items():
        if count % 128:
            yield f"{what}: {count} on a rank, not a multiple of 128"
