"""Map Megatron's parameters to Hugging Face tensors: family rules and the geometry of each kind of split.

Pure Python: imports neither torch nor megatron nor vllm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import accumulate

from rlhf_mcore.bridge.map.pieces import Piece, contiguous_strides
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES, HEADS, Shapes, embedding_name, end_rules, hf_shapes, layer_rules
from rlhf_mcore.families.adapters import (
    A,
    B,
    M,
    adapter_rules,
    base_name,
    hf_module,
    hf_name,
    is_trained_whole,
    whole_rules,
)
from rlhf_mcore.families.base import Rule
from rlhf_mcore.families.mtp import EMBEDDING, EMBEDDING_COPY
from rlhf_mcore.geometry import LatentSizes, LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.layout import is_expert


def layer_names(geometry: ModelGeometry, layer: int, num_experts: int, fused: bool = False) -> Iterator[str]:
    """Yield the names of Megatron's parameters in one layer, for a rank with ``num_experts`` local experts.

    ``fused`` selects the names of Transformer Engine's layers: norms inside linear layers, and experts as one
    grouped product.
    """
    for rule in layer_rules(geometry, layer, fused=fused):
        yield from (rule.mcore.format(i=layer, k=k) for k in range(num_experts if "{k}" in rule.mcore else 1))


def parameter_names(geometry: ModelGeometry) -> list[str]:
    """List Megatron's parameter names of a whole model on one rank, in network order.

    The names are the names of Transformer Engine's layers.
    """
    first, last = end_rules(geometry)
    layers = (layer_names(geometry, layer, geometry.num_experts, True) for layer in range(geometry.num_layers))
    return [
        *(rule.mcore for rule in first),
        *(name for names in layers for name in names),
        *(rule.mcore for rule in last),
    ]


def in_memory(name: str, geometry: ModelGeometry) -> str | None:
    """Find the Megatron parameter for a tensor whose name in transformers' memory differs from its name in files.

    transformers uses such names since version 5. The result contains ``{k}`` if the tensor stacks one matrix per
    expert. Return None if the name is not an in-memory name of this family.
    """
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        for rule in FAMILIES[geometry.family].rules:
            if rule.in_memory == match.group(2):
                return rule.mcore.replace("{i}", match.group(1))
    return None


def pieces(name: str, geometry: ModelGeometry, shard: Shard) -> list[Piece]:
    """Describe the contents of a rank's Megatron parameter, in coordinates of Hugging Face tensors.

    Adapters are described in coordinates of PEFT's tensors.

    Raises:
        KeyError: the family has no rule for this parameter.
    """
    rule, layer, local_expert = find_rule(geometry, name)
    expert = shard.expert_rank * (geometry.num_experts // shard.expert_size) + local_expert
    shapes = rule.shapes(geometry, layer, expert)
    if geometry.adapter is not None and ".lora_a" not in rule.mcore and rule.kind not in _PLAIN_SPLITS:
        return _rows_of_weight(name, shapes, geometry, shard)
    if geometry.tied_embeddings and "lm_head.weight" in shapes:
        shapes = {embedding_name(geometry): shapes["lm_head.weight"]}
    if rule.is_stacked:
        return [piece for name, shape in shapes.items() for piece in _STACKS[rule.kind](name, shape, expert, shard)]
    return list(_SPLITS[rule.kind](shapes, geometry, shard))


def _rows_of_weight(name: str, shapes: Shapes, geometry: ModelGeometry, shard: Shard) -> list[Piece]:
    """Describe a rank's part of adapters' Bs, or of DoRA magnitudes.

    The rank holds the same rows as of the weight, in the same order.
    """
    whole, side = base_name(name)
    weight = pieces(whole, replace(geometry, adapter=None), shard)
    rows, described = 0, []
    for piece in sorted(weight, key=lambda piece: piece.offset):
        b = hf_name(piece.hf_name.removesuffix(".weight"), side)
        if b in shapes:
            described.append(_rows(b, shapes[b], piece.start[0], piece.shape[0], rows))
            rows += piece.shape[0]
    return described


def part_of(parameters: Iterable[LocalParameter], geometry: ModelGeometry, part: ModelGeometry) -> list[LocalParameter]:
    """Select the parameters that belong to ``part``, a smaller model (for example the model without its MTP layers)."""
    shapes = hf_shapes(part)
    return [p for p in parameters if all(piece.hf_name in shapes for piece in pieces(p.name, geometry, p.shard))]


@dataclass(frozen=True, slots=True)
class RowRun:
    """A run of ``count`` equal rows: from ``row`` in a Megatron tensor, and from ``hf_row`` in a Hugging Face tensor."""

    hf_name: str
    hf_row: int
    row: int
    count: int


def row_runs(parameter: str, geometry: ModelGeometry) -> tuple[list[RowRun], tuple[int, ...]]:
    """Describe the rows of a whole Megatron parameter in order, and return its shape without padding.

    If files store all experts in one tensor, each expert is one row in another form (``files/formats/tiles.py``).

    Raises:
        KeyError: the family has no such parameter.
        ConfigError: the parameter's rows are not rows of Hugging Face tensors.
    """
    attention = geometry.attention
    own = {
        "tower": geometry.vision is not None,
        "two kinds of attention heads": geometry.wide is not None,
        "indexers": isinstance(attention, LatentSizes) and attention.indexer is not None,
    }
    if (part := next((name for name, is_there in own.items() if is_there), geometry.recurrent_part)) is not None:
        raise ConfigError(
            f"{geometry.family}: Megatron's formats of its {part} are not supported; convert from or to hf only"
        )
    parts = pieces(parameter, geometry, Shard(0, 1))
    if find_rule(geometry, parameter)[0].kind == "stacked":
        (piece,) = parts
        return [RowRun(piece.hf_name, piece.start[0], 0, 1)], piece.shape[:0:-1]
    width = parts[0].shape[1:]
    runs = []
    for piece in parts:
        # On one rank no tensor is split by columns, so every piece consists of whole rows.
        assert piece.shape[1:] == width and not any(piece.start[1:]), parameter
        runs.append(RowRun(piece.hf_name, piece.start[0], piece.offset // piece.strides[0], piece.shape[0]))
    runs.sort(key=lambda run: run.row)
    return runs, (sum(run.count for run in runs), *width)


def holds_matrices(parameter: str, geometry: ModelGeometry) -> bool:
    """Return whether a layer's parameter is made of 2-D tensors, or is one expert of a stack of 2-D tensors."""
    if not parameter.startswith("decoder.layers."):
        return False
    rule = find_rule(geometry, parameter)[0]
    return all(len(dims) == 2 + rule.is_stacked for dims in rule.tensors.values())


def is_padded(parameter: str, geometry: ModelGeometry) -> bool:
    """Return whether files may store more rows of a parameter than the model uses (padded vocabulary)."""
    return find_rule(geometry, parameter)[0].kind in ("vocab_parallel", "vocab_columns")


def _rule_of_tower(geometry: ModelGeometry, name: str) -> Rule:
    for rule in end_rules(replace(geometry, adapter=None))[0]:
        if rule.mcore == name:
            return rule
    raise KeyError(f"{geometry.family}: no rule for {name!r}")  # e.g. an adapter: only the language model has adapters


def find_rule(geometry: ModelGeometry, name: str) -> tuple[Rule, int, int]:
    """Find the rule of a Megatron parameter, its layer, and its expert's local number (0 without experts).

    Raises:
        KeyError: the family has no rule for this parameter.
    """
    if geometry.vision is not None and name.startswith("vision_tower."):
        return _rule_of_tower(geometry, name), 0, 0
    if geometry.adapter is None:
        return _rule_of_layer(geometry, name)
    if is_trained_whole(name, geometry):
        rule, layer, expert = _rule_of_layer(geometry, name)
        return whole_rules(rule, geometry)[0], layer, expert
    weight, side = base_name(name)
    rule, layer, expert = _rule_of_layer(geometry, weight)
    if not (rules := _adapter_rules(geometry, rule.mcore, layer)):
        raise KeyError(f"{weight!r} has no adapter")
    return rules[(A, B, M).index(side)], layer, expert


@lru_cache(maxsize=4096)
def _adapter_rules(geometry: ModelGeometry, weight: str, layer: int) -> list[Rule]:
    """Return the rules for the adapters of a weight in one layer. All experts share them."""
    rules = _rules(geometry.family, geometry.head)[weight]
    return adapter_rules(_rule_in_layer(rules, geometry, layer), geometry, layer)


@cache
def _rules(family: str, head: str) -> dict[str, list[Rule]]:
    """Return a model's rules by Megatron name."""
    rules: dict[str, list[Rule]] = {}
    for rule in FAMILIES[family].rules + HEADS[head].rules:
        rules.setdefault(rule.mcore, []).append(rule)
    return rules


def _rule_of_layer(geometry: ModelGeometry, name: str) -> tuple[Rule, int, int]:
    rules, layer, expert = _find_rules(geometry.family, geometry.head, name)
    return _rule_in_layer(rules, geometry, layer), layer, expert


def _rule_in_layer(rules: list[Rule], geometry: ModelGeometry, layer: int) -> Rule:
    """Select the rule of a layer, if layers of different kinds have rules with one name."""
    if len(rules) == 1 or geometry.wide is None:
        return rules[0]
    kinds = ("all", *geometry.layer_kind(layer))
    return next(rule for rule in rules if rule.layers in kinds and rule.exists(geometry))


@cache
def _find_rules(family: str, head: str, name: str) -> tuple[list[Rule], int, int]:
    """Find the rules with this name, its layer, and its expert's local number."""
    generic, layer, expert = EMBEDDING if name == EMBEDDING_COPY else name, 0, 0
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        layer = int(match.group(1))
        generic = "decoder.layers.{i}." + name[match.end() :]
    if is_expert(name) and (
        match := re.search(r"(?<=\.local_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$", generic)
    ):
        expert = int(match.group())
        generic = generic[: match.start()] + "{k}" + generic[match.end() :]
    if (rules := _rules(family, head).get(generic)) is not None:
        return rules, layer, expert
    raise KeyError(f"no rule of family {family!r} places Megatron parameter {name!r}")


def _rows(name: str, shape: tuple[int, ...], first: int, count: int, local_row: int) -> Piece:
    """Describe ``count`` whole rows of a tensor, or ``count`` elements of a vector."""
    strides = contiguous_strides(shape)
    return Piece(name, (first, *(0 for _ in shape[1:])), (count, *shape[1:]), local_row * strides[0], strides)


def _of_stack(name: str, shape: tuple[int, ...], expert: int, shard: Shard) -> Iterator[Piece]:
    """Describe one expert's part of a stacked tensor: a vector, or a matrix that Megatron stores transposed."""
    assert shard.size == 1, "the part of an expert is whole"
    rows = shape[1]
    strides = (rows, 1) if len(shape) == 2 else (rows * shape[2], 1, rows)
    yield Piece(name, (expert, *(0 for _ in shape[1:])), (1, *shape[1:]), 0, strides)


def _halves_of_stack(name: str, shape: tuple[int, ...], expert: int, shard: Shard) -> Iterator[Piece]:
    """Describe this rank's rows of both halves (gate, then up) of one expert's matrix in a stacked tensor."""
    _, rows, columns = shape
    per_rank = rows // 2 // shard.size
    held = (1, per_rank, columns)
    for half in (0, 1):
        start = (expert, half * rows // 2 + shard.rank * per_rank, 0)
        yield Piece(name, start, held, half * per_rank * columns, contiguous_strides(held))


def _columns_of_stack(name: str, shape: tuple[int, ...], expert: int, shard: Shard) -> Iterator[Piece]:
    """Describe this rank's columns of one expert's matrix in a stacked tensor."""
    held = (1, shape[1], shape[2] // shard.size)
    yield Piece(name, (expert, 0, shard.rank * held[2]), held, 0, contiguous_strides(held))


_STACKS = {"stacked": _of_stack, "stacked_halves": _halves_of_stack, "stacked_columns": _columns_of_stack}


def _describe_replicated(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe tensors that every rank stores whole. Several tensors (adapters' As) are stacked by rows."""
    position = 0
    for name, shape in shapes.items():
        yield _rows(name, shape, 0, shape[0], position)
        position += shape[0]


def _column_parallel(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a linear layer with split outputs: this rank's rows of each matrix, stacked (gate, then up)."""
    position = 0
    for name, shape in shapes.items():
        per_rank = shape[0] // shard.size
        yield _rows(name, shape, shard.rank * per_rank, per_rank, position)
        position += per_rank


def _row_parallel(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a linear layer with split inputs."""
    for name, (rows, columns) in shapes.items():
        per_rank = columns // shard.size
        yield Piece(name, (0, shard.rank * per_rank), (rows, per_rank), 0, (per_rank, 1))


def _vocab_parallel(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe equal row ranges of the padded vocabulary, clipped to the real vocabulary."""
    per_rank = g.padded_vocab(shard.size) // shard.size
    first = shard.rank * per_rank
    for name, shape in shapes.items():
        if (count := min(per_rank, shape[0] - first)) > 0:
            yield _rows(name, shape, first, count, 0)


def _describe_transposed(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a matrix that every rank stores whole and transposed."""
    for name, shape in shapes.items():
        yield Piece(name, (0, 0), shape, 0, (1, shape[0]))


def _vocab_columns(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe equal column ranges of the padded vocabulary, clipped to the real vocabulary and transposed."""
    per_rank = g.padded_vocab(shard.size) // shard.size
    first = shard.rank * per_rank
    for name, (rows, columns) in shapes.items():
        if (count := min(per_rank, columns - first)) > 0:
            # A single row gets the strides of a contiguous matrix.
            yield Piece(name, (0, first), (rows, count), 0, (1, rows) if rows > 1 else (count, 1))


_Runs = Iterable[tuple[str, int, int]]  # rows: (tensor name, first row, number of rows)


def _interval(shapes: Shapes, runs: _Runs, shard: Shard) -> Iterator[Piece]:
    """Describe a rank's equal interval of the stacked rows of ``runs``.

    The interval may end inside a run: with fewer groups than ranks Megatron splits raw rows.
    """
    runs = list(runs)
    per_rank = sum(count for _, _, count in runs) // shard.size
    begin, end = shard.rank * per_rank, (shard.rank + 1) * per_rank
    position = 0
    for name, first, count in runs:
        low, high = max(position, begin), min(position + count, end)
        if low < high:
            yield _rows(name, shapes[name], first + low - position, high - low, low - begin)
        position += count


def _qkv(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe rows interleaved by query group: queries, then key, then value."""
    return _grouped_rows(shapes, g.num_kv_heads, shard)


def _wide_qkv(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    assert g.wide is not None
    return _grouped_rows(shapes, g.wide.heads.num_kv_heads, shard)


def _grouped_rows(shapes: Shapes, groups: int, shard: Shard) -> Iterator[Piece]:
    per_group = {name: shape[0] // groups for name, shape in shapes.items()}
    runs = ((name, group * rows, rows) for group in range(groups) for name, rows in per_group.items())
    return _interval(shapes, runs, shard)


def _joined_qkv(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe rows interleaved by query group, for files with one tensor: all queries, all keys, all values."""
    ((name, (rows, *_)),), groups = shapes.items(), range(g.num_kv_heads)
    keys = g.num_kv_heads * g.head_dim
    sections = [(0, rows - 2 * keys), (rows - 2 * keys, keys), (rows - keys, keys)]
    per_group = [(first, count // g.num_kv_heads) for first, count in sections]
    return _interval(
        shapes, ((name, first + group * count, count) for group in groups for first, count in per_group), shard
    )


def _halves(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe this rank's rows of both halves of one tensor (gate, then up), stacked."""
    for name, shape in shapes.items():
        half = shape[0] // 2
        per_rank = half // shard.size
        for number in (0, 1):
            yield _rows(name, shape, number * half + shard.rank * per_rank, per_rank, number * per_rank)


def _gated_qkv(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe rows interleaved by query group, for queries with gates.

    Files alternate queries and gates per head. Megatron stores all queries of a group, then all its gates.
    """
    (queries, keys, values), width = shapes, g.head_dim

    def runs() -> _Runs:
        per_group = g.num_heads // g.num_kv_heads
        for group in range(g.num_kv_heads):
            heads = range(group * per_group, (group + 1) * per_group)
            for half in (0, 1):
                yield from ((queries, (2 * head + half) * width, width) for head in heads)
            yield from ((name, group * width, width) for name in (keys, values))

    return _interval(shapes, runs(), shard)


def _delta(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a delta net's rows, grouped by kind.

    One tensor holds queries, keys and values; each other kind has its own tensor.
    """
    (mixed, *others), sections = shapes, []
    assert g.delta is not None
    first = 0
    for count in (g.delta.keys, g.delta.keys, g.delta.values):
        sections.append((mixed, first, count))
        first += count
    sections += [(name, 0, shapes[name][0]) for name in others]
    return _split_each(shapes, sections, shard)


def _split_each(shapes: Shapes, sections: _Runs, shard: Shard) -> Iterator[Piece]:
    """Describe a rank's equal part of each section, stacked."""
    position = 0
    for name, first, rows in sections:
        per_rank = rows // shard.size
        yield _rows(name, shapes[name], first + shard.rank * per_rank, per_rank, position)
        position += per_rank


def _state_space(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a state-space layer's rows, grouped by kind: all kinds, or the kinds that the convolution reads."""
    assert g.space is not None
    ((name, shape),) = shapes.items()
    rows = g.space.projection_sizes if shape[0] == sum(g.space.projection_sizes) else g.space.conv_sizes
    ends = list(accumulate(rows))
    return _split_each(shapes, [(name, end - count, count) for end, count in zip(ends, rows, strict=True)], shard)


def _delta_by_head(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a delta net's rows for files that group rows by key head.

    The first tensor has query, key, values and gates of each head; the second tensor has betas and alphas.
    """
    assert g.delta is not None
    (mixed, scalars), heads = shapes, g.delta.value_heads // g.delta.key_heads
    key, value, position = g.delta.key_dim, heads * g.delta.value_dim, 0
    per_rank = g.delta.key_heads // shard.size
    for name, parts in ((mixed, (key, key, value, value)), (scalars, (heads, heads))):
        for number, rows in enumerate(parts):
            for head in range(shard.rank * per_rank, (shard.rank + 1) * per_rank):
                yield _rows(name, shapes[name], head * sum(parts) + sum(parts[:number]), rows, position)
                position += rows


_SPLITS: dict[str, Callable[[Shapes, ModelGeometry, Shard], Iterator[Piece]]] = {
    "replicated": _describe_replicated,
    "column_parallel": _column_parallel,
    "row_parallel": _row_parallel,
    "vocab_parallel": _vocab_parallel,
    "qkv": _qkv,
    "joined_qkv": _joined_qkv,
    "wide_qkv": _wide_qkv,
    "gated_qkv": _gated_qkv,
    "halves": _halves,
    "transposed": _describe_transposed,
    "vocab_columns": _vocab_columns,
    "delta": _delta,
    "delta_by_head": _delta_by_head,
    "state_space": _state_space,
}
# For these kinds, B and magnitudes are split as the kind says. For other kinds, a rank holds B's rows that match
# its weight rows.
_PLAIN_SPLITS = ("replicated", "vocab_parallel", "vocab_columns")


@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``row`` to ``row + count`` of a rank's weight, to which a product of rows of B and A is added.

    The product uses rows ``b_row`` to ``b_row + count`` of B, and rows ``a_row`` to ``a_row + rank`` of A.
    """

    row: int
    count: int
    b_row: int
    a_row: int


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the names of the Megatron parameters A and B of a weight's adapters."""
    head, _, number = weight.rpartition(".weight")
    return f"{head}{A}{number}", f"{head}{B}{number}"


def blocks(weight: str, geometry: ModelGeometry, shard: Shard) -> list[Block]:
    """List the blocks of a rank's weight that have adapters, sorted by row. Return an empty list without adapters.

    Args:
        weight: Megatron's name of the weight.
        geometry: model geometry with adapters.
        shard: the rank's shard.
    """
    adapter = geometry.adapter
    assert adapter is not None
    name_a, name_b = adapter_names(weight)
    try:
        held_a, held_b = pieces(name_a, geometry, shard), pieces(name_b, geometry, shard)
    except KeyError:
        return []
    first_rows = {hf_module(piece.hf_name): piece.offset // piece.strides[0] for piece in held_a}
    # Key: a piece's first row in the whole B. PEFT transposes the embedding's B, so there the key is a column.
    b_rows = {(hf_module(piece.hf_name), max(piece.start)): piece.offset // adapter.rank for piece in held_b}
    joined = []
    for piece in pieces(weight, replace(geometry, adapter=None), shard):
        module = piece.hf_name.removesuffix(".weight")
        if module in first_rows:
            b_row = b_rows[module, piece.start[0]]
            joined.append(Block(piece.offset // piece.strides[0], piece.shape[0], b_row, first_rows[module]))
    return sorted(joined, key=lambda block: block.row)
