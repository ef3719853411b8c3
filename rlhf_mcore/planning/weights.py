"""Bytes of a model's weights, gradients and optimizer state on a rank, exactly as Megatron allocates them.

With the distributed optimizer every model chunk has flat buffers for its parameters and for their fp32 gradients, experts under expert
parallelism have buffers of their own, and each data-parallel rank keeps masters and moments of an equal range of every bucket. Starts
of parameters are padded to 64 elements, ends of buckets to a multiple of 128 and of the data-parallel size; an embedding that two
pipeline stages share has a bucket of its own (megatron/core/distributed/param_and_grad_buffer.py).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import lcm, prod

from rlhf_mcore.bridge.map.rules import holds_matrices, is_padded, pieces
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


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The tensors of a layer, or one beside the layers. Sums over them are cached by the object, which is cached itself."""

    tensors: tuple[LocalTensor, ...]


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


def _frozen_bytes(role: PlannedRole, rank: int, names: frozenset[str] | None = None) -> int:
    """Count the bytes of weights on a rank that are in no buffer of Megatron's; ``names`` are these, None: all."""
    stage = role.layout.coordinates(rank)["pp"]
    return (
        0 if names == frozenset() else _stage_bytes(role.geometry, _one_replica(role.layout), stage, role.dtype, names)
    )


@lru_cache(maxsize=4096)
def _stage_bytes(
    geometry: ModelGeometry, layout: ParallelLayout, pp: int, dtype: str, names: frozenset[str] | None
) -> int:
    return sum(
        _part_bytes(part, dtype, names)
        for number in range(layout.vpp or 1)
        for part in _parts(geometry, layout, pp, number)
    )


def copies_in_8_bits(role: PlannedRole, rank: int, *, training: bool) -> int:
    """Count what products in 8 bits keep of a rank's matrices for a pass: each once, and transposed where there are gradients."""
    if not role.fp8 or rank not in role.layout.ranks:
        return 0
    chunks = range(role.layout.vpp or 1)
    parts = (
        part for n in chunks for part in _parts(role.geometry, role.layout, role.layout.coordinates(rank)["pp"], n)
    )
    return sum(map(_part_in_8_bits, parts)) * (1 + training)


def _num_moments(role: PlannedRole, numel: int, matrices: int) -> int:
    """Count the numbers that the optimizer keeps beside the masters of so many elements, some of which are in matrices."""
    return {"adamw": 2 * numel, "muon": 2 * numel - matrices, "sgd": numel}[role.optimizer]


def weights_of_pass(role: PlannedRole, rank: int) -> int:
    """Count the most bytes of weights at a time while a model runs. Where layers come one by one: two of them, and the rest."""
    weights = state_bytes(role, rank).weights
    if not role.by_layer or not weights:
        return weights
    geometry, layout = role.geometry, role.layout
    grid, pp = _Grid.of(layout), layout.coordinates(rank)["pp"]
    chunks = [
        [
            _part_bytes(_layer_part(geometry, layer, grid), role.dtype, None)
            for layer in layout.layers_of(geometry.num_layers, pp, number)
        ]
        for number in range(layout.vpp or 1)
    ]
    pairs = [sum(sizes[first : first + 2]) for sizes in chunks for first in range(len(sizes))]
    return weights - sum(map(sum, chunks)) + max(pairs, default=0)


@lru_cache(maxsize=4096)
def _buffers(
    geometry: ModelGeometry, layout: ParallelLayout, rank: int, frozen: frozenset[str]
) -> tuple[int, int, int]:
    """Count elements of a rank's flat buffers, of the parameters whose optimizer state it keeps, and of matrices among these."""
    place = layout.coordinates(rank)
    dp_rank, expert_dp_rank = place["dp"] * layout.cp + place["cp"], layout.expert_coordinates(rank)["edp"]
    shares = ((dp_rank, layout.dp * layout.cp), (expert_dp_rank, layout.expert_dp))
    numel = owned = matrices = 0
    for (index, size), buckets in zip(
        shares, _stage_buckets(geometry, _one_replica(layout), place["pp"], frozen), strict=True
    ):
        for bucket in buckets:
            length = _round_up(bucket.end, lcm(size, _BUCKET_END))
            share = length // size
            low, high = (bucket.before(border) for border in (index * share, (index + 1) * share))
            numel += length
            owned += high[0] - low[0]
            matrices += high[1] - low[1]
    return numel, owned, matrices


def _one_replica(layout: ParallelLayout) -> ParallelLayout:
    """Return the smallest layout whose ranks hold the same parts of a model: this is all that sizes of stages depend on."""
    experts = layout.expert_tp * layout.ep
    return replace(layout, world_size=lcm(layout.tp, experts) * layout.pp, cp=1, sequence_parallel=False, first_rank=0)


@dataclass(frozen=True, slots=True, eq=False)
class _Slots:
    """Tensors of a layer in a buffer, the last one first, as gradients come. Each starts at a multiple of 64 elements.

    ``elements`` and ``matrices`` are the numbers of elements in front of each tensor, in all tensors and in matrices.
    """

    starts: list[int]
    elements: list[int]
    matrices: list[int]
    tensors: list[LocalTensor]
    end: int  # of the last tensor
    extent: int  # the start of what comes next

    @classmethod
    def of(cls, tensors: Iterable[LocalTensor]) -> _Slots:
        starts, elements, matrices, ordered, end = [0], [0], [0], list(tensors)[::-1], 0
        for tensor in ordered:
            end = starts[-1] + tensor.numel
            starts.append(_round_up(end, _PARAMETER_START))
            elements.append(elements[-1] + tensor.numel)
            matrices.append(matrices[-1] + tensor.numel * tensor.is_matrix)
        return cls(starts, elements, matrices, ordered, end, starts[-1])

    def before(self, position: int) -> tuple[int, int]:
        """Count the elements of parameters in front of a position, and those of matrices."""
        number = bisect_right(self.starts, position) - 1
        if number == len(self.tensors):
            return self.elements[-1], self.matrices[-1]
        tensor = self.tensors[number]
        within = min(position - self.starts[number], tensor.numel)
        return self.elements[number] + within, self.matrices[number] + within * tensor.is_matrix


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """Layers in a buffer, with sums over those in front of each."""

    starts: list[int]
    elements: list[int]
    matrices: list[int]
    layers: list[_Slots]
    end: int

    @classmethod
    def of(cls, layers: list[_Slots]) -> _Bucket:
        starts = [0, *accumulate(layer.extent for layer in layers)]
        elements = [0, *accumulate(layer.elements[-1] for layer in layers)]
        matrices = [0, *accumulate(layer.matrices[-1] for layer in layers)]
        return cls(starts, elements, matrices, layers, starts[-2] + layers[-1].end)

    def before(self, position: int) -> tuple[int, int]:
        """Count the elements of parameters in front of a position, and those of matrices."""
        number = bisect_right(self.starts, position) - 1
        if number == len(self.layers):
            return self.elements[-1], self.matrices[-1]
        elements, matrices = self.layers[number].before(position - self.starts[number])
        return self.elements[number] + elements, self.matrices[number] + matrices


@lru_cache(maxsize=1024)
def _stage_buckets(
    geometry: ModelGeometry, layout: ParallelLayout, pp: int, frozen: frozenset[str]
) -> tuple[list[_Bucket], list[_Bucket]]:
    """Cut the buffers of a stage's chunks into buckets: of experts under expert parallelism apart, and of the rest.

    A bucket begins at a multiple of 128 elements, and so its places do not depend on those in front of it.
    """
    shares_embedding = (geometry.tied_embeddings or bool(geometry.mtp_layers)) and layout.pp > 1
    shared = ((_EMBEDDING, _OUTPUT) if geometry.tied_embeddings else (_EMBEDDING,)) if shares_embedding else ()
    rest, experts = list[_Bucket](), list[_Bucket]()
    for number in range(layout.vpp or 1):
        parts = _parts(geometry, layout, pp, number)
        rest += _cut(parts, frozen, shared, of_experts=False if layout.ep > 1 else None)
        if layout.ep > 1:
            experts += _cut(parts, frozen, shared, of_experts=True)
    return rest, experts


def _cut(
    parts: Sequence[_Part], frozen: frozenset[str], shared: Sequence[str], *, of_experts: bool | None
) -> Iterator[_Bucket]:
    """Cut one buffer into buckets: the last layer comes first. A tensor that two stages share is alone."""
    layers = list[_Slots]()
    for part in reversed(parts):
        slots = _slots(part, frozen, of_experts)
        if len(slots.tensors) == 1 and slots.tensors[0].name in shared:
            if layers:
                yield _Bucket.of(layers)
            layers = []
            yield _Bucket.of([slots])
        elif slots.tensors:
            layers.append(slots)
    if layers:
        yield _Bucket.of(layers)


@lru_cache(maxsize=1024)
def _slots(part: _Part, frozen: frozenset[str], of_experts: bool | None) -> _Slots:
    """Place the tensors of a layer that learn: experts, the others, or all."""
    return _Slots.of(
        tensor
        for tensor in part.tensors
        if tensor.trained and tensor.name not in frozen and of_experts in (None, is_expert(tensor.name))
    )


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def chunk_tensors(geometry: ModelGeometry, layout: ParallelLayout, pp: int) -> list[list[LocalTensor]]:
    """List the parameters of every model chunk of a pipeline rank, in Megatron's order. All tensor-parallel ranks hold equally many.

    Those of a layer are named after the first layer that has the same parameters.
    """
    return [
        [tensor for part in _parts(geometry, layout, pp, number) for tensor in part.tensors]
        for number in range(layout.vpp or 1)
    ]


def _parts(geometry: ModelGeometry, layout: ParallelLayout, pp: int, number: int) -> list[_Part]:
    """List the parameters of one model chunk layer by layer, and each one beside the layers."""
    grid = _Grid.of(layout)
    before, last = end_rules(geometry, tied_head=layout.pp > 1)  # two stages hold a tied embedding
    first = [rule for rule in before if not rule.mcore.startswith(TOWER)]
    parts = [_layer_part(geometry, layer, grid) for layer in layout.layers_of(geometry.num_layers, pp, number)]
    if (pp, number) == (0, 0):
        parts[:0] = [_end_part(geometry, rule.mcore, grid) for rule in first]
    if (pp, number) == (layout.pp - 1, (layout.vpp or 1) - 1):
        parts += [_end_part(geometry, rule.mcore, grid) for rule in last]
        if geometry.mtp_layers and layout.num_stages > 1:
            parts.append(_end_part(geometry, _EMBEDDING, grid))
        parts += [_layer_part(geometry, layer, grid) for layer in geometry.mtp_numbers]
    if (pp, number) == (0, 0):
        parts += [_end_part(geometry, rule.mcore, grid) for rule in before[len(first) :]]
    return parts


@dataclass(frozen=True, slots=True)
class _Grid:
    """Hold the numbers that a layer's tensors on a rank are sized by."""

    tp: int
    expert_tp: int
    ep: int

    @classmethod
    def of(cls, layout: ParallelLayout) -> _Grid:
        return cls(layout.tp, layout.expert_tp, layout.ep)


@lru_cache(maxsize=64)
def _first_alike(geometry: ModelGeometry) -> tuple[int, ...]:
    """Return for every layer, MTP layers too, the first one with the same parameters. Adapters may be of some layers only."""
    firsts: dict[object, int] = {}
    return tuple(firsts.setdefault(_parameters_of(geometry, layer), layer) for layer in _layers(geometry))


def _layers(geometry: ModelGeometry) -> range:
    return range(geometry.num_layers + geometry.mtp_layers)


def _parameters_of(geometry: ModelGeometry, layer: int) -> object:
    if geometry.adapter is None:
        return geometry.layer_kind(layer), layer in geometry.mtp_numbers
    return tuple((rule.mcore, *rule.tensors) for rule in layer_rules(geometry, layer))


def _layer_part(geometry: ModelGeometry, layer: int, grid: _Grid) -> _Part:
    return _part_of(geometry, _first_alike(geometry)[layer], grid)


@lru_cache(maxsize=1024)
def _part_of(geometry: ModelGeometry, layer: int, grid: _Grid) -> _Part:
    tensors = []
    for rule in layer_rules(geometry, layer):
        name = rule.mcore.format(i=layer, k=0)  # experts are alike
        numel, is_matrix = _numel(name, geometry, grid), holds_matrices(name, geometry)
        count = geometry.num_experts // grid.ep if "{k}" in rule.mcore else 1
        tensors += [LocalTensor(rule.mcore.format(i=layer, k=k), numel, rule.trained, is_matrix) for k in range(count)]
    return _Part(tuple(sorted(tensors, key=lambda tensor: _order(tensor.name))))


@lru_cache(maxsize=1024)
def _end_part(geometry: ModelGeometry, name: str, grid: _Grid) -> _Part:
    return _Part((LocalTensor(name, _numel(name, geometry, grid)),))


@lru_cache(maxsize=1024)
def _part_bytes(part: _Part, dtype: str, names: frozenset[str] | None) -> int:
    return sum(tensor.nbytes(dtype) for tensor in part.tensors if names is None or tensor.name in names)


@lru_cache(maxsize=1024)
def _part_in_8_bits(part: _Part) -> int:
    """Count the elements of matrices of linear layers, and a scale for each of their blocks."""
    names = (one for one in part.tensors if ".linear_" in one.name and one.name.endswith(".weight"))
    blocks = 128 * 128  # with a scale each
    return sum(one.numel + _FP32 * -(-one.numel // blocks) for one in names)


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
