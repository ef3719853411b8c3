"""Place Megatron's tensors in Hugging Face coordinates: the rules of the families, and the geometry of each kind of split.

Pure Python: neither torch, megatron nor vllm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.map.rectangles import contiguous_strides
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import FAMILIES, HEADS, Shapes, embedding_name, end_rules, hf_shapes, layer_rules
from rlhf_mcore.families.adapters import A, B, hf_module
from rlhf_mcore.families.base import Rule
from rlhf_mcore.families.mtp import EMBEDDING, EMBEDDING_COPY
from rlhf_mcore.geometry import LocalParameter, ModelGeometry, Shard
from rlhf_mcore.parallel.layout import is_expert


def layer_names(geometry: ModelGeometry, layer: int, num_experts: int, fused: bool = False) -> Iterator[str]:
    """Yield Megatron's parameters of one layer on a rank that has ``num_experts`` of its experts.

    ``fused`` names them as Transformer Engine's layers do: norms within linear layers, experts as one grouped product.
    """
    for rule in layer_rules(geometry, layer, fused=fused):
        yield from (rule.mcore.format(i=layer, k=k) for k in range(num_experts if "{k}" in rule.mcore else 1))


def parameter_names(geometry: ModelGeometry) -> list[str]:
    """List Megatron's parameters of a whole model on one rank, in the network's order, named as Transformer Engine's layers do."""
    first, last = end_rules(geometry)
    layers = (layer_names(geometry, layer, geometry.num_experts, True) for layer in range(geometry.num_layers))
    return [
        *(rule.mcore for rule in first),
        *(name for names in layers for name in names),
        *(rule.mcore for rule in last),
    ]


def in_memory(name: str, geometry: ModelGeometry) -> str | None:
    """Name the Megatron parameter with the rows of a tensor that transformers (since 5) holds under another name than it saves.

    ``{k}`` in it: the tensor is a stack, one for each expert. None: the name is not one of these.
    """
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
        for rule in FAMILIES[geometry.family].rules:
            if rule.in_memory == match.group(2):
                return rule.mcore.replace("{i}", match.group(1))
    return None


def pieces(name: str, geometry: ModelGeometry, shard: Shard) -> list[Piece]:
    """Describe what a rank's Megatron parameter holds, in Hugging Face coordinates; an adapter's in those of PEFT.

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
    if rule.kind == "stacked":
        assert shard.size == 1, "the part of an expert is whole"
        return [_of_stack(name, shape, expert) for name, shape in shapes.items()]
    return list(_SPLITS[rule.kind](shapes, geometry, shard))


def _rows_of_weight(name: str, shapes: Shapes, geometry: ModelGeometry, shard: Shard) -> list[Piece]:
    """Describe a rank's part of Bs of adapters, or of magnitudes: it has their rows that it has of the weight, in that order."""
    from rlhf_mcore.families.adapters import base_name, hf_name

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
    """Select the parameters of a part of a model, such as that without its MTP layers."""
    shapes = hf_shapes(part)
    return [p for p in parameters if all(piece.hf_name in shapes for piece in pieces(p.name, geometry, p.shard))]


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows from ``row`` on of a Megatron tensor are ``count`` rows of a Hugging Face tensor, from ``hf_row`` on."""

    hf_name: str
    hf_row: int
    row: int
    count: int


def row_runs(parameter: str, geometry: ModelGeometry) -> tuple[list[RowRun], tuple[int, ...]]:
    """Describe what the rows of a Megatron parameter of a whole model hold, in order, and its shape without padding.

    Where files have all experts in one tensor, an expert is one row of it, in another form (``files/formats/tiles.py``).

    Raises:
        KeyError: the family has no such parameter.
        ConfigError: its rows are no rows of Hugging Face tensors.
    """
    if geometry.vision is not None:
        raise ConfigError(
            f"{geometry.family}: Megatron's formats of models with a tower are not supported; convert from or to hf only"
        )
    if geometry.delta is not None:
        raise ConfigError(
            f"{geometry.family}: Megatron's formats of its gated delta nets are not supported; convert from or to hf only"
        )
    parts = pieces(parameter, geometry, Shard(0, 1))
    if find_rule(geometry, parameter)[0].kind == "stacked":
        (piece,) = parts
        return [RowRun(piece.hf_name, piece.start[0], 0, 1)], piece.shape[:0:-1]
    width = parts[0].shape[1:]
    runs = []
    for piece in parts:
        # On one rank nothing is split by columns: every piece is whole rows.
        assert piece.shape[1:] == width and not any(piece.start[1:]), parameter
        runs.append(RowRun(piece.hf_name, piece.start[0], piece.offset // piece.strides[0], piece.shape[0]))
    runs.sort(key=lambda run: run.row)
    return runs, (sum(run.count for run in runs), *width)


def holds_matrices(parameter: str, geometry: ModelGeometry) -> bool:
    """Tell whether a parameter of a layer is made of tensors of two dimensions, or is one expert's of a stack of such."""
    if not parameter.startswith("decoder.layers."):
        return False
    rule = find_rule(geometry, parameter)[0]
    return all(len(dims) == 2 + (rule.kind == "stacked") for dims in rule.tensors.values())


def is_padded(parameter: str, geometry: ModelGeometry) -> bool:
    """Tell whether a file may have more rows of a parameter than the model: those of a vocabulary."""
    return find_rule(geometry, parameter)[0].kind in ("vocab_parallel", "vocab_columns")


def _rule_of_tower(geometry: ModelGeometry, name: str) -> Rule:
    for rule in end_rules(replace(geometry, adapter=None))[0]:
        if rule.mcore == name:
            return rule
    raise KeyError(f"{geometry.family}: no rule for {name!r}")  # an adapter's: they are of the language model


def find_rule(geometry: ModelGeometry, name: str) -> tuple[Rule, int, int]:
    """Find the rule of a Megatron parameter, its layer, and its expert's number on its rank (0 where there is none).

    Raises:
        KeyError: the family has no rule for this parameter.
    """
    if geometry.vision is not None and name.startswith("vision_tower."):
        return _rule_of_tower(geometry, name), 0, 0
    if geometry.adapter is None:
        return _find_rule(geometry.family, geometry.head, name)
    from rlhf_mcore.families.adapters import A, B, M, base_name, is_trained_whole, whole_rules

    if is_trained_whole(name, geometry):
        rule, layer, expert = _find_rule(geometry.family, geometry.head, name)
        return whole_rules(rule, geometry)[0], layer, expert
    weight, side = base_name(name)
    rule, layer, expert = _find_rule(geometry.family, geometry.head, weight)
    if not (rules := _adapter_rules(geometry, rule.mcore, layer)):
        raise KeyError(f"{weight!r} has no adapter")
    return rules[(A, B, M).index(side)], layer, expert


@lru_cache(maxsize=4096)
def _adapter_rules(geometry: ModelGeometry, weight: str, layer: int) -> list[Rule]:
    """Derive the rules of the adapters of a weight in one layer. They are the same for all experts."""
    from rlhf_mcore.families.adapters import adapter_rules

    return adapter_rules(_rules(geometry.family, geometry.head)[weight], geometry, layer)


@cache
def _rules(family: str, head: str) -> dict[str, Rule]:
    """Return the rules of a model by their names; of two with one name the first."""
    rules: dict[str, Rule] = {}
    for rule in FAMILIES[family].rules + HEADS[head].rules:
        rules.setdefault(rule.mcore, rule)
    return rules


@cache
def _find_rule(family: str, head: str, name: str) -> tuple[Rule, int, int]:
    generic, layer, expert = EMBEDDING if name == EMBEDDING_COPY else name, 0, 0
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        layer = int(match.group(1))
        generic = "decoder.layers.{i}." + name[match.end() :]
    if is_expert(name) and (
        match := re.search(r"(?<=\.local_experts\.)\d+|(?<=\.weight)\d+$|(?<=\.bias)\d+$", generic)
    ):
        expert = int(match.group())
        generic = generic[: match.start()] + "{k}" + generic[match.end() :]
    if (rule := _rules(family, head).get(generic)) is not None:
        return rule, layer, expert
    raise KeyError(f"no rule of family {family!r} places Megatron parameter {name!r}")


def _rows(name: str, shape: tuple[int, ...], first: int, count: int, local_row: int) -> Piece:
    """Describe ``count`` whole rows of a tensor, or elements of a vector."""
    strides = contiguous_strides(shape)
    return Piece(name, (first, *(0 for _ in shape[1:])), (count, *shape[1:]), local_row * strides[0], strides)


def _of_stack(name: str, shape: tuple[int, ...], expert: int) -> Piece:
    """Describe one expert's part of the tensor of all: a vector, or a matrix that is held transposed."""
    rows = shape[1]
    strides = (rows, 1) if len(shape) == 2 else (rows * shape[2], 1, rows)
    return Piece(name, (expert, *(0 for _ in shape[1:])), (1, *shape[1:]), 0, strides)


def _replicated(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a tensor that every rank has whole; of several (the As of adapters) one below the other."""
    position = 0
    for name, shape in shapes.items():
        yield _rows(name, shape, 0, shape[0], position)
        position += shape[0]


def _column_parallel(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a linear layer whose outputs are split: this rank's rows of each matrix, one below the other (gate, then up)."""
    position = 0
    for name, shape in shapes.items():
        per_rank = shape[0] // shard.size
        yield _rows(name, shape, shard.rank * per_rank, per_rank, position)
        position += per_rank


def _row_parallel(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a linear layer whose inputs are split."""
    for name, (rows, columns) in shapes.items():
        per_rank = columns // shard.size
        yield Piece(name, (0, shard.rank * per_rank), (rows, per_rank), 0, (per_rank, 1))


def _vocab_parallel(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Equal row ranges of the padded vocabulary, clipped to the true one."""
    per_rank = g.padded_vocab(shard.size) // shard.size
    first = shard.rank * per_rank
    for name, shape in shapes.items():
        if (count := min(per_rank, shape[0] - first)) > 0:
            yield _rows(name, shape, first, count, 0)


def _transposed(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe a matrix that every rank has whole, transposed."""
    for name, shape in shapes.items():
        yield Piece(name, (0, 0), shape, 0, (1, shape[0]))


def _vocab_columns(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Equal column ranges of the padded vocabulary, clipped to the true one, transposed."""
    per_rank = g.padded_vocab(shard.size) // shard.size
    first = shard.rank * per_rank
    for name, (rows, columns) in shapes.items():
        if (count := min(per_rank, columns - first)) > 0:
            # Of one row the strides are those of a contiguous matrix too.
            yield Piece(name, (0, first), (rows, count), 0, (1, rows) if rows > 1 else (count, 1))


_Runs = Iterable[tuple[str, int, int]]  # of rows: their tensor, the first of them and how many


def _interval(shapes: Shapes, runs: _Runs, shard: Shard) -> Iterator[Piece]:
    """Describe a rank's equal interval of the rows of ``runs``, one below the other.

    It need not end at the border of a run: with fewer groups than ranks Megatron splits raw rows.
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
    """Describe rows interleaved by query group: its queries, its key, its value."""
    per_group = {name: shape[0] // g.num_kv_heads for name, shape in shapes.items()}
    groups = range(g.num_kv_heads)
    return _interval(
        shapes, ((name, group * rows, rows) for group in groups for name, rows in per_group.items()), shard
    )


def _gated_qkv(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe the same where queries have gates.

    Files have heads' queries and gates in turn; here a group has its queries, then its gates.
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
    """Describe rows of all heads of a kind, one kind after the other: queries, keys and values in one tensor, others in one each."""
    (mixed, *others), sections = shapes, []
    assert g.delta is not None
    first = 0
    for count in (g.delta.keys, g.delta.keys, g.delta.values):
        sections.append((mixed, first, count))
        first += count
    sections += [(name, 0, shapes[name][0]) for name in others]
    position = 0
    for name, first, rows in sections:
        per_rank = rows // shard.size
        yield _rows(name, shapes[name], first + shard.rank * per_rank, per_rank, position)
        position += per_rank


def _delta_by_head(shapes: Shapes, g: ModelGeometry, shard: Shard) -> Iterator[Piece]:
    """Describe the same where files have rows by head of keys: its query, key, values and gates; in a second tensor its betas and
    alphas.
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
    "replicated": _replicated,
    "column_parallel": _column_parallel,
    "row_parallel": _row_parallel,
    "vocab_parallel": _vocab_parallel,
    "qkv": _qkv,
    "gated_qkv": _gated_qkv,
    "transposed": _transposed,
    "vocab_columns": _vocab_columns,
    "delta": _delta,
    "delta_by_head": _delta_by_head,
}
# Of these a rank has of B and of magnitudes what the kind says; else it has the rows of B that it has of the weight.
_PLAIN_SPLITS = ("replicated", "vocab_parallel", "vocab_columns")


# Rows of a rank's weight with the rows of B and of A whose product they get.
@dataclass(frozen=True, slots=True)
class Block:
    """Rows ``row`` to ``row + count`` of a rank's weight get the product of rows of its B and of its A.

    They are ``b_row`` to ``b_row + count`` of B, and ``a_row`` to ``a_row + rank`` of A.
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
    """List the blocks of a rank's weight that have adapters, by their rows; none where it has none.

    Args:
        weight: Megatron's name.
        geometry: of the adapters.
        shard: the rank's.
    """
    adapter = geometry.adapter
    assert adapter is not None
    name_a, name_b = adapter_names(weight)
    try:
        held_a, held_b = pieces(name_a, geometry, shard), pieces(name_b, geometry, shard)
    except KeyError:
        return []
    first_rows = {hf_module(piece.hf_name): piece.offset // piece.strides[0] for piece in held_a}
    # By the first row that a piece has of the whole B: of the embedding, whose B PEFT has transposed, it is a column.
    b_rows = {(hf_module(piece.hf_name), max(piece.start)): piece.offset // adapter.rank for piece in held_b}
    joined = []
    for piece in pieces(weight, replace(geometry, adapter=None), shard):
        module = piece.hf_name.removesuffix(".weight")
        if module in first_rows:
            b_row = b_rows[module, piece.start[0]]
            joined.append(Block(piece.offset // piece.strides[0], piece.shape[0], b_row, first_rows[module]))
    return sorted(joined, key=lambda block: block.row)
