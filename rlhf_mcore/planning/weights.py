"""Bytes of a model's weights, gradients and optimizer state on a rank, exactly as Megatron allocates them.

With the distributed optimizer every model chunk has flat buffers for its parameters and for their fp32 gradients, experts under expert
parallelism have buffers of their own, and each data-parallel rank keeps masters and moments of an equal range of every bucket. Starts
of parameters are padded to 64 elements, ends of buckets to a multiple of 128 and of the data-parallel size; an embedding that two
pipeline stages share has a bucket of its own (megatron/core/distributed/param_and_grad_buffer.py).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod

from rlhf_mcore.bridge.map.rules import holds_matrices, is_padded, layer_names, pieces
from rlhf_mcore.families import end_rules, layer_rules
from rlhf_mcore.families.vision import TOWER
from rlhf_mcore.geometry import AdapterSizes, ModelGeometry, Shard
from rlhf_mcore.parallel.layout import ParallelLayout, is_expert
from rlhf_mcore.planning.counts import num_parameters
from rlhf_mcore.planning.inputs import PlannedRole

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_FP32 = 4
_NO_LAYER = AdapterSizes(1, 1.0, ())  # adapters of none, beside which a head is trained whole
_PARAMETER_START, _BUCKET_END = 64, 128
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# Modules of a layer in the order in which Megatron makes them.
_MODULES = (
    "enorm",
    "hnorm",
    "eh_proj",
    "input_layernorm",
    "core_attention",
    "linear_proj",
    "linear_qkv",
    "dt_bias",
    "A_log",
    "in_proj",
    "conv1d",
    "out_norm",
    "out_proj",
    "linear_q_proj",
    "linear_q_down",
    "linear_q_up",
    "linear_kv_down",
    "linear_kv_up",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "self_attn_bda",
    "pre_mlp",
    "router",
    "local_experts",
    "shared_experts",
    "fc1",
    "fc2",
    "mlp_bda",
    "final_layernorm",
)


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of a rank and its number of elements, padding of the vocabulary included. ``trained``: it is no buffer."""

    name: str
    numel: int
    trained: bool = True
    is_matrix: bool = False  # of which Muon keeps one moment

    def nbytes(self, dtype: str) -> int:
        """Count the bytes in a model of ``dtype``; buffers are fp32 in all."""
        return self.numel * (BYTES[dtype] if self.trained else _FP32)


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Hold the bytes that a model takes on one rank all the time. ``masters`` and ``moments`` are those of the rank's shard."""

    weights: int
    gradients: int = 0
    masters: int = 0
    moments: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments


def state_bytes(role: PlannedRole, rank: int) -> StateBytes:
    """Count the exact bytes on a rank; nothing on one that holds no part of the model."""
    if rank not in role.layout.ranks:
        return StateBytes(0)
    if role.adapters is not None:
        learned = state_bytes(replace(role, geometry=role.adapters, adapters=None), rank)
        # A head that is trained whole is in the buffers alone.
        whole = _frozen_bytes(replace(role, geometry=replace(role.adapters, adapter=_NO_LAYER)), rank)
        return replace(learned, weights=learned.weights + _frozen_bytes(role, rank) - whole)
    if role.trained:
        numel, owned, matrices = _buffers(role.geometry, role.layout, rank, role.frozen)
        still = _frozen_bytes(role, rank, role.frozen)
        masters = 0 if role.dtype == "fp32" else _FP32 * owned  # fp32 weights are their own masters
        moments = _FP32 * _num_moments(role, owned, matrices)
        return StateBytes(BYTES[role.dtype] * numel + still, _FP32 * numel, masters, moments)
    return StateBytes(_frozen_bytes(role, rank))


def _frozen_bytes(role: PlannedRole, rank: int, names: Collection[str] | None = None) -> int:
    """Count the bytes of weights on a rank that are in no buffer of Megatron's; ``names`` are these, None: all."""
    chunks = chunk_tensors(role.geometry, role.layout, role.layout.coordinates(rank)["pp"])
    return sum(one.nbytes(role.dtype) for chunk in chunks for one in chunk if names is None or one.name in names)


def copies_in_8_bits(role: PlannedRole, rank: int, *, training: bool) -> int:
    """Count what products in 8 bits keep of a rank's matrices for a pass: each once, and transposed where there are gradients."""
    if not role.fp8 or rank not in role.layout.ranks:
        return 0
    chunks = chunk_tensors(role.geometry, role.layout, role.layout.coordinates(rank)["pp"])
    names = (one for chunk in chunks for one in chunk if ".linear_" in one.name and one.name.endswith(".weight"))
    blocks = 128 * 128  # with a scale each
    return sum(one.numel + _FP32 * -(-one.numel // blocks) for one in names) * (1 + training)


def _num_moments(role: PlannedRole, numel: int, matrices: int) -> int:
    """Count the numbers that the optimizer keeps beside the masters of so many elements, some of which are in matrices."""
    return {"adamw": 2 * numel, "muon": 2 * numel - matrices, "sgd": numel}[role.optimizer]


def weights_of_pass(role: PlannedRole, rank: int) -> int:
    """Count the most bytes of weights at a time while a model runs. Where layers come one by one: two of them, and the rest."""
    weights = state_bytes(role, rank).weights
    if not role.by_layer or not weights:
        return weights
    geometry, layout = role.geometry, role.layout
    grid, pp = _Grid(layout.tp, layout.expert_tp, layout.ep), layout.coordinates(rank)["pp"]
    chunks = [
        [
            sum(tensor.nbytes(role.dtype) for tensor in _layer_tensors(geometry, geometry.layer_kind(layer), grid))
            for layer in layout.layers_of(geometry.num_layers, pp, number)
        ]
        for number in range(layout.vpp or 1)
    ]
    pairs = [sum(sizes[first : first + 2]) for sizes in chunks for first in range(len(sizes))]
    return weights - sum(map(sum, chunks)) + max(pairs, default=0)


@lru_cache(maxsize=1024)
def _buffers(
    geometry: ModelGeometry, layout: ParallelLayout, rank: int, frozen: frozenset[str]
) -> tuple[int, int, int]:
    """Count elements of a rank's flat buffers, of the parameters whose optimizer state it keeps, and of matrices among these."""
    place = layout.coordinates(rank)
    dp_rank, expert_dp_rank = place["dp"] * layout.cp + place["cp"], layout.expert_coordinates(rank)["edp"]
    numel = owned = matrices = 0
    shares_embedding = (geometry.tied_embeddings or bool(geometry.mtp_layers)) and layout.pp > 1
    shared = (_EMBEDDING, _OUTPUT) if geometry.tied_embeddings else (_EMBEDDING,)
    for tensors_of_chunk in chunk_tensors(geometry, layout, place["pp"]):
        chunk = [tensor for tensor in tensors_of_chunk if tensor.trained and tensor.name not in frozen]
        apart = [tensor for tensor in chunk if layout.ep > 1 and is_expert(tensor.name)]
        rest = [tensor for tensor in chunk if not (layout.ep > 1 and is_expert(tensor.name))]
        for tensors, index, size in ((rest, dp_rank, layout.dp * layout.cp), (apart, expert_dp_rank, layout.expert_dp)):
            buckets = list(_buckets(tensors, size, shared if shares_embedding else ()))
            numel += sum(end - start for start, end, _ in buckets)
            owned += sum(_owned_elements(bucket, index, size) for bucket in buckets)
            matrices += sum(
                _owned_elements((start, end, [one for one in ranges if one[2]]), index, size)
                for start, end, ranges in buckets
            )
    return numel, owned, matrices


# Start and end in the buffer; of its parameters start, end, and whether they are matrices.
_Bucket = tuple[int, int, list[tuple[int, int, bool]]]


def _buckets(tensors: Sequence[LocalTensor], dp_size: int, shared: Sequence[str]) -> Iterator[_Bucket]:
    """Cut one buffer into buckets: the last parameter comes first, as gradients do."""
    unit, start, ranges = lcm(dp_size, _BUCKET_END), 0, list[tuple[int, int, bool]]()
    for tensor in reversed(tensors):
        alone = tensor.name in shared
        if alone and ranges:
            end = _round_up(_round_up(ranges[-1][1], _PARAMETER_START), unit)
            yield start, end, ranges
            start, ranges = end, []
        first = _round_up(ranges[-1][1], _PARAMETER_START) if ranges else start
        ranges.append((first, first + tensor.numel, tensor.is_matrix))
        if alone:
            end = _round_up(ranges[-1][1], unit)
            yield start, end, ranges
            start, ranges = end, []
    if ranges:
        yield start, _round_up(ranges[-1][1], unit), ranges


def _owned_elements(bucket: _Bucket, index: int, dp_size: int) -> int:
    """Count elements of parameters in the range of a bucket whose state one data-parallel rank keeps."""
    start, end, ranges = bucket
    share = (end - start) // dp_size
    low, high = start + index * share, start + (index + 1) * share
    return sum(max(0, min(b, high) - max(a, low)) for a, b, _ in ranges)


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def chunk_tensors(geometry: ModelGeometry, layout: ParallelLayout, pp: int) -> list[list[LocalTensor]]:
    """List the parameters of every model chunk of a pipeline rank, in Megatron's order. All tensor-parallel ranks hold equally many.

    Those of a layer are named after the first layer of its kind.
    """
    grid = _Grid(layout.tp, layout.expert_tp, layout.ep)
    before, last = end_rules(geometry, tied_head=layout.pp > 1)  # two stages hold a tied embedding
    first = [rule for rule in before if not rule.mcore.startswith(TOWER)]
    end = (layout.pp - 1, (layout.vpp or 1) - 1)
    chunks = []
    for number in range(layout.vpp or 1):
        layers = layout.layers_of(geometry.num_layers, pp, number)
        if geometry.adapter is not None:  # layers of one kind may have different ones
            tensors = [tensor for layer in layers for tensor in _tensors_of(geometry, layer, grid)]
        else:
            tensors = [
                tensor for layer in layers for tensor in _layer_tensors(geometry, geometry.layer_kind(layer), grid)
            ]
        if (pp, number) == (0, 0):
            tensors[:0] = [LocalTensor(rule.mcore, _numel(rule.mcore, geometry, grid)) for rule in first]
        if (pp, number) == end:
            tensors += [LocalTensor(rule.mcore, _numel(rule.mcore, geometry, grid)) for rule in last]
            if geometry.mtp_layers and layout.num_stages > 1:
                tensors.append(LocalTensor(_EMBEDDING, _numel(_EMBEDDING, geometry, grid)))
            tensors += [tensor for layer in geometry.mtp_numbers for tensor in _tensors_of(geometry, layer, grid)]
        if (pp, number) == (0, 0):
            tensors += [LocalTensor(rule.mcore, _numel(rule.mcore, geometry, grid)) for rule in before[len(first) :]]
        chunks.append(tensors)
    return chunks


@dataclass(frozen=True, slots=True)
class _Grid:
    """Hold the numbers that a layer's tensors on a rank are sized by."""

    tp: int
    expert_tp: int
    ep: int


@lru_cache(maxsize=1024)
def _layer_tensors(geometry: ModelGeometry, kind: tuple[bool, bool], grid: _Grid) -> tuple[LocalTensor, ...]:
    layer = next(layer for layer in range(geometry.num_layers) if geometry.layer_kind(layer) == kind)
    return _tensors_of(geometry, layer, grid)


def _tensors_of(geometry: ModelGeometry, layer: int, grid: _Grid) -> tuple[LocalTensor, ...]:
    names = sorted(layer_names(geometry, layer, geometry.num_experts // grid.ep), key=_order)
    rules = layer_rules(geometry, layer)
    buffers = {rule.mcore.format(i=layer, k=0) for rule in rules if not rule.trained}
    return tuple(
        LocalTensor(name, _numel(name, geometry, grid), name not in buffers, holds_matrices(name, geometry))
        for name in names
    )


def _order(name: str) -> tuple[int, int]:
    module = next(number for number, part in enumerate(_MODULES) if part in name)
    expert = re.search(r"(?<=local_experts\.)\d+", name)
    return module, int(expert.group()) if expert else 0


def _numel(name: str, geometry: ModelGeometry, grid: _Grid) -> int:
    if is_padded(name, geometry):
        width = geometry.hidden_size if geometry.adapter is None else geometry.adapter.rank
        return geometry.padded_vocab(grid.tp) // grid.tp * width
    shard = Shard(0, grid.expert_tp, 0, grid.ep) if is_expert(name) else Shard(0, grid.tp)
    return sum(prod(piece.shape) for piece in pieces(name, geometry, shard))


def checkpoint_bytes(role: PlannedRole) -> int:
    """Sum the bytes of a checkpoint of a trained role: weights, moments, and masters of 16-bit weights; buffers in fp32.

    Of a role with adapters only these are saved.
    """
    geometry = role.adapters or role.geometry
    buffers, matrices = _buffers_and_matrices(geometry)
    still = sum(rule.numel(geometry) for rule in end_rules(geometry)[0] if rule.mcore in role.frozen)
    trained = num_parameters(geometry) - buffers - still
    masters = 0 if role.dtype == "fp32" else _FP32
    return (
        trained * (BYTES[role.dtype] + masters)
        + _FP32 * (_num_moments(role, trained, matrices) + buffers)
        + BYTES[role.dtype] * still
    )


@lru_cache(maxsize=64)
def _buffers_and_matrices(geometry: ModelGeometry) -> tuple[int, int]:
    """Count the elements of all layers that are buffers, and those that are matrices of trained weights."""
    buffers = matrices = 0
    for layer in range(geometry.num_layers + geometry.mtp_layers):
        for rule in layer_rules(geometry, layer):
            numel = (geometry.num_experts if "{k}" in rule.mcore else 1) * rule.numel(geometry)
            buffers += numel * (not rule.trained)
            matrices += numel * (rule.trained and holds_matrices(rule.mcore.format(i=layer, k=0), geometry))
    return buffers, matrices
