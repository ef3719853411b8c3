"""Describe the quantised formats in which models are published. No torch needed.

A quantised matrix is stored as several tensors: its values, their scales, and in some formats zero points and the
matrix's shape. A scale belongs to a block of values. ``quantization_config`` of config.json names the format.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlhf_mcore.foreign import Fields

Shape = tuple[int, ...]
Block = tuple[int, int]  # rows and columns of a matrix that share a scale
WHOLE = 1 << 40  # rows or columns: more than any matrix has
GROUP = 32  # mxfp4 values that share an exponent
_WORD_BITS = 32
_COMPRESSED = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision")
# Scales of activations and of the KV cache. Loading ignores them.
_UNUSED = (".input_scale", ".activation_scale", ".input_zero_point", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class Parts:
    """Names of the tensors that store one matrix. ``shape`` and ``zeros`` are empty if the format has none."""

    values: str
    scales: str
    shape: str = ""
    zeros: str = ""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """A published format.

    ``blocks``: the blocks that config.json allows. ``bits``: the numbers of bits of packed values.
    """

    method: str  # quant_method of quantization_config: mxfp4, fp8, or compressed-tensors
    blocks: tuple[Block, ...] = ()
    bits: tuple[int, ...] = ()

    def matrices(self, names: Collection[str]) -> dict[str, Parts]:
        """Return the quantised matrices among a directory's tensors, by their Hugging Face names."""
        found: dict[str, Parts] = {}
        scales = {"mxfp4": "_scales", "fp8": "_scale_inv"}.get(self.method, "_scale")
        for name in names:
            matrix = name.removesuffix(scales)
            if matrix == name:
                continue
            if self.method == "mxfp4" and matrix + "_blocks" in names:
                found[matrix] = Parts(matrix + "_blocks", name)
            elif matrix + "_packed" in names:
                zeros = matrix + "_zero_point"
                found[matrix] = Parts(matrix + "_packed", name, matrix + "_shape", zeros if zeros in names else "")
            elif matrix in names:
                zeros = matrix + "_zero_point"
                found[matrix] = Parts(matrix, name, zeros=zeros if zeros in names else "")
        return found

    def weights(self, names: Collection[str]) -> set[str]:
        """Return the Hugging Face names of the weights that a directory's tensors store."""
        matrices = self.matrices(names)
        parts = {
            part for matrix in matrices.values() for part in (matrix.values, matrix.scales, matrix.shape, matrix.zeros)
        }
        return {name for name in {*names} - parts if not name.endswith(_UNUSED)} | matrices.keys()

    def part_shapes(self, parts: Parts, shape: Shape) -> dict[str, list[Shape]]:
        """Return the shapes that the values and scales of a matrix of ``shape`` may have."""
        if self.method == "mxfp4":
            *outer, rows, columns = shape
            scales = (*outer, columns, rows // GROUP)
            return {parts.values: [(*scales, GROUP // 2)], parts.scales: [scales]}
        values = [shape]
        if parts.shape:
            values = [(*shape[:-1], ceil_div(shape[-1], values_per_word(bits))) for bits in self.bits]
        blocks = [tuple(map(ceil_div, shape, block)) for block in self.blocks]
        return {parts.values: values, parts.scales: [*blocks, *([(), (1,)] if (1, 1) in blocks else [])]}

    def block(self, shape: Shape, scales: Shape) -> Block | None:
        """Return the block of a matrix with these scales, or None if no allowed block fits."""
        counts = scales if len(scales) == 2 else (1, 1)
        return next((block for block in self.blocks if tuple(map(ceil_div, shape, block)) == counts), None)


def ceil_div(count: int, size: int) -> int:
    """Return the number of groups of ``size`` that contain ``count``."""
    return -(-count // size)


def values_per_word(bits: int) -> int:
    """Return how many packed values an int32 contains."""
    return _WORD_BITS // bits


def read_stored_format(hf_config: Fields) -> StoredFormat | None:
    """Return the format of a directory's quantised weights, or None if they are not quantised.

    Raises:
        ConfigError: the format is not supported, or a field is missing or invalid.
    """
    described = _description(hf_config)
    if described is None:
        return None
    method = described.text("quant_method", ("mxfp4", "fp8", "compressed-tensors"))
    if method == "mxfp4":
        return StoredFormat(method)
    if method == "fp8":
        size = described.integers("weight_block_size", minimum=1, default=[WHOLE, WHOLE])
        if len(size) != 2:
            raise described.wrong("weight_block_size", "two numbers")
        return StoredFormat(method, ((size[0], size[1]),))
    described.text("format", _COMPRESSED)
    described.text("quantization_status", ("compressed",), default="compressed")
    for part in ("sparsity_config", "transform_config"):
        changes = described.object(part, default=None)
        if changes is not None and changes.content not in ({}, {"format": "dense"}, {"config_groups": {}}):
            raise described.wrong(part, "empty (sparse and rotated weights are not supported)")
    groups = described.object("config_groups")
    read = [_read_group(groups.object(name).object("weights")) for name in groups]
    return StoredFormat(
        method, tuple(dict.fromkeys(block for block, _ in read)), tuple(dict.fromkeys(bits for _, bits in read))
    )


def _description(hf_config: Fields) -> Fields | None:
    """Return ``quantization_config``. Models with images may have it in ``text_config``."""
    described = hf_config.object("quantization_config", default=None)
    if described is None and (text := hf_config.object("text_config", default=None)) is not None:
        described = text.object("quantization_config", default=None)
    if described is None:
        return None
    return Fields(described.content, hf_config.where, "use the unquantised model", "quantization_config.")


def _read_group(weights: Fields) -> tuple[Block, int]:
    """Read the block and the number of bits in a config group of compressed-tensors."""
    bits = weights.integer("num_bits", minimum=1, maximum=8)
    if weights.text("type", ("int", "float"), default="int") == "float" and bits != 8:
        raise weights.wrong("num_bits", "8 for floating-point weights")
    weights.text("actorder", ("static", "weight"), default="static")  # columns in another order have an index more
    strategy = weights.text("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        return (1, weights.integer("group_size", minimum=1)), bits
    if strategy == "block":
        size = weights.integers("block_structure", minimum=1)
        if len(size) != 2:
            raise weights.wrong("block_structure", "two numbers")
        return (size[0], size[1]), bits
    return ((1, WHOLE) if strategy == "channel" else (WHOLE, WHOLE)), bits
