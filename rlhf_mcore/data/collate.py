"""Collates rows into microbatches, and restores model outputs to rows. Only this module shifts fields.

Token layout: rows are concatenated, and ``x[k]`` belongs to ``token_ids[k]``. The loop and the algorithms use it.

Model layout: position i of a row predicts token i + 1. Position i of a field therefore contains the value of token i + 1, and
the last position of each row is zero. Forward passes use it.

Only ``to_model_layout`` and ``to_token_layout`` convert between the layouts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rlhf_mcore.data.packing import check_budget, group_by_length, pack, round_up
from rlhf_mcore.data.prefixes import Ids, PrefixTree, build_tree, computed_tokens, units_of
from rlhf_mcore.parallel.rows import split_tokens
from rlhf_mcore.types import Microbatch, Ragged


@dataclass(slots=True)
class RowTokens:
    """Some rows of a step with concatenated tokens, the input of a model run.

    ``fields`` are flat tensors [sum of lengths, ...] in token layout, including ``token_ids``. ``ragged`` fields contain
    values for the same tokens, but none for the first token of a row, which no position predicts. A row may consist of
    several sequences, which do not attend to each other.
    """

    rows: list[int]
    lengths: list[int]
    fields: Mapping[str, Tensor]
    ragged: Mapping[str, Ragged[Tensor]] = field(default_factory=dict)
    # Token counts of the sequences of each row; None: every row is one sequence.
    sequences: Sequence[Sequence[int]] | None = None
    # Image digests of each sequence of all rows; None: no row has images.
    images: Sequence[tuple[str, ...]] | None = None

    @property
    def sequence_lengths(self) -> list[int]:
        """Token counts of all sequences, the units that a model runs."""
        return self.lengths if self.sequences is None else [size for sizes in self.sequences for size in sizes]

    @property
    def starts(self) -> list[int]:
        """Start offsets of the rows, and the end of the last row."""
        return [0, *accumulate(self.lengths)]


def make_microbatches(
    tokens: RowTokens,
    *,
    max_tokens: int,
    packing: bool,
    rows_per_unit: int = 1,
    pad_multiple: int = 1,
    sequence_multiple: int = 1,
    min_count: int = 1,
    multiple_of: int = 1,
    pad_token_id: int = 0,
    share_prefixes: bool = False,
    alone: Collection[int] = (),
) -> list[Microbatch]:
    """Split rows into microbatches of at most ``max_tokens`` tokens, padding included.

    ``Microbatch.fields`` contains the fields in model layout with their dtype, and ``token_ids`` as "labels" (int64, the next
    token, 0 if there is none). There are at least ``min_count`` microbatches and a multiple of ``multiple_of``. Surplus ones
    are dummies with ``pad_multiple`` pad tokens, zero fields and no rows. Dummies keep ranks in step and add nothing to a
    sum.

    ``Microbatch.ragged`` contains the ragged fields: the counts in model layout, and the values of the rows in order.

    Every ``rows_per_unit`` consecutive rows stay together, in order. ``Microbatch.rows`` contains indices into
    ``tokens.rows``, or into ``tokens.sequence_lengths`` if rows consist of several sequences.

    Packed: token_ids [1, N], each sequence padded to a multiple of ``sequence_multiple``. A dummy sequence pads N to a
    multiple of ``pad_multiple``, which is a multiple of ``sequence_multiple``. It has an entry in ``cu_seqlens``, but none in
    ``rows`` and ``lengths``. Padded: token_ids [b, T_b], where T_b is a multiple of ``pad_multiple``.

    With ``share_prefixes``, packed rows with a common prefix go together, and the model computes the prefix once.
    ``max_tokens`` then limits the tokens of ``Microbatch.tree``. A microbatch without shared prefixes has no tree. Rows in
    ``alone`` never share.

    Raises:
        ConfigError: one row, or unit of rows, is longer than ``max_tokens``.
    """
    assert "labels" not in tokens.fields, "make_microbatches adds the labels"
    if tokens.sequences is not None:
        assert rows_per_unit == 1, "units require one sequence per row"
        lengths = tokens.sequence_lengths
        tokens = RowTokens(list(range(len(lengths))), lengths, tokens.fields, tokens.ragged, None, tokens.images)
    paddings = _Paddings(sequence_multiple, pad_multiple, pad_token_id)
    units = in_units(range(len(tokens.rows)), rows_per_unit)
    ids: list[Ids] = []
    if not packing:
        padded = [max(tokens.lengths[place] for place in unit) for unit in units]
        sizes = [rows_per_unit * round_up(length, sequence_multiple) for length in padded]
        assign, pad_to = group_by_length, rows_per_unit * pad_multiple
    else:
        sizes = [sum(round_up(tokens.lengths[place], sequence_multiple) for place in unit) for unit in units]
        assign, pad_to = pack, pad_multiple
        if share_prefixes:
            ids = [part.numpy() for part in tokens.fields["token_ids"].long().split(tokens.lengths)]
            check_budget(sizes if rows_per_unit == 1 else [], max_tokens, pad_multiple)
            limit = max_tokens // pad_multiple * pad_multiple
            units, sizes = _sharing_units(ids, units, sizes, limit, sequence_multiple, alone)
    bins = assign(sizes, max_tokens, min_bins=min_count, multiple_of=multiple_of, pad_multiple=pad_to)
    fields, values = _shift_fields(tokens)
    microbatches = []
    for units_of_bin in bins:
        places = [place for unit in units_of_bin for place in units[unit]]
        microbatch = (_build_packed if packing else _build_padded)(tokens, places, fields, paddings)
        if ids:
            microbatch.tree = _build_tree(microbatch, ids, alone, paddings)
        for name, rows in values.items():
            counts, parts = microbatch.fields.pop(name), [rows[place] for place in places]
            # The order of the values needs no shift, because the first token of a row has no values.
            microbatch.ragged[name] = Ragged(counts, torch.cat([tokens.ragged[name].values[:0], *parts]))
            assert int(counts.sum()) == len(microbatch.ragged[name].values)
        microbatch.images = [tokens.images[place] for place in places] if tokens.images else []
        microbatches.append(microbatch)
    return microbatches


@dataclass(frozen=True, slots=True)
class _Paddings:
    """The multiples to which sequences and microbatches are padded, and the id of padding tokens."""

    sequence_multiple: int
    pad_multiple: int
    pad_token_id: int


def _shift_fields(tokens: RowTokens) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Return the fields and the counts of ragged fields in model layout, and the values of ragged fields by row."""
    fields = {"labels": tokens.fields["token_ids"].long(), **tokens.fields}
    del fields["token_ids"]
    fields |= {name: ragged.counts for name, ragged in tokens.ragged.items()}
    shifted = {name: to_model_layout(values, tokens.lengths) for name, values in fields.items()}
    by_row = {name: split_tokens(ragged, tokens.lengths) for name, ragged in tokens.ragged.items()}
    return shifted, {name: [part.values for part in parts] for name, parts in by_row.items()}


def _build_tree(
    microbatch: Microbatch, ids: Sequence[Ids], alone: Collection[int], paddings: _Paddings
) -> PrefixTree | None:
    return build_tree(
        [ids[place] for place in microbatch.rows],
        sequence_sizes(microbatch),
        multiple=paddings.sequence_multiple,
        pad_multiple=paddings.pad_multiple,
        pad_token_id=paddings.pad_token_id,
        alone=[number for number, place in enumerate(microbatch.rows) if place in alone],
    )


def in_units(rows: Sequence[int], rows_per_unit: int) -> list[list[int]]:
    """Split consecutive rows into units of ``rows_per_unit``."""
    assert len(rows) % rows_per_unit == 0, (len(rows), rows_per_unit)
    return [list(rows[start : start + rows_per_unit]) for start in range(0, len(rows), rows_per_unit)]


def _sharing_units(
    ids: Sequence[Ids],
    units: list[list[int]],
    sizes: list[int],
    max_tokens: int,
    multiple: int,
    alone: Collection[int],
) -> tuple[list[list[int]], list[int]]:
    """Join single-row units with common prefixes. Return units and the computed tokens per unit; the inputs if no rows share."""
    if any(len(unit) > 1 for unit in units):
        return units, [computed_tokens([ids[place] for place in unit], multiple) for unit in units]
    return units_of(ids, max_tokens, multiple, alone) or (units, sizes)


def restore_tokens(
    outputs: Sequence[Tensor],
    microbatches: Sequence[Microbatch],
    lengths: Sequence[int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Convert per-token outputs of microbatches from model layout to the token layout of their rows.

    Each output has the shape of its microbatch's token_ids, optionally with further dimensions. Return [sum of lengths, ...]
    on the host. The first token of a row is zero, because no position predicts it.
    """
    result = torch.zeros(sum(lengths), *outputs[0].shape[2:], dtype=dtype)
    parts = result.split(list(lengths))
    for place, values in _iterate_rows(outputs, microbatches, dtype):
        parts[place].copy_(values)
    return to_token_layout(result, lengths)


def restore_last(outputs: Sequence[Tensor], microbatches: Sequence[Microbatch], num_rows: int) -> Tensor:
    """Return a model's outputs at the last token of each row: [num_rows, ...] float32 on the host."""
    result = torch.zeros(num_rows, *outputs[0].shape[2:], dtype=torch.float32)
    for place, values in _iterate_rows(outputs, microbatches):
        result[place] = values[-1]
    return result


def _iterate_rows(
    outputs: Sequence[Tensor], microbatches: Sequence[Microbatch], dtype: torch.dtype = torch.float32
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of each row and its outputs [length], in model layout."""
    for output, microbatch in zip(outputs, microbatches, strict=True):
        assert output.shape[:2] == microbatch.token_ids.shape, (output.shape, microbatch.token_ids.shape)
        values = output.detach().to(device="cpu", dtype=dtype)
        starts = microbatch.cu_seqlens.tolist() if microbatch.cu_seqlens is not None else None
        for sequence, (place, length) in enumerate(zip(microbatch.rows, microbatch.lengths, strict=True)):
            source = values[sequence] if starts is None else values[0, starts[sequence] :]
            yield place, source[:length]


def last_positions(microbatch: Microbatch) -> Tensor:
    """Return the position of each row's last token in the flattened token_ids: [num_rows] int64."""
    lengths = torch.tensor(microbatch.lengths, dtype=torch.int64)
    if microbatch.cu_seqlens is None:
        return torch.arange(len(lengths)) * microbatch.token_ids.size(1) + lengths - 1
    return microbatch.cu_seqlens[: len(lengths)].long() + lengths - 1


def sequence_sizes(microbatch: Microbatch) -> list[int]:
    """Return the size of each sequence along the last dimension, with padding. For padded rows, return the common width."""
    if microbatch.cu_seqlens is None:
        return [microbatch.token_ids.size(1)]
    sizes: list[int] = microbatch.cu_seqlens.diff().tolist()
    return sizes


def computed_sizes(microbatch: Microbatch) -> list[int]:
    """Return the sizes of the sequences that the model computes: the segments of a prefix tree, or ``sequence_sizes``."""
    return sequence_sizes(microbatch) if microbatch.tree is None else microbatch.tree.sizes


def sequence_ids(microbatch: Microbatch) -> tuple[Tensor, int]:
    """Return the sequence number of each position, in the shape of token_ids, and the number of sequences.

    Padding counts as part of its row. The padding at the end of a packed microbatch is a separate sequence.
    """
    if microbatch.cu_seqlens is None:
        height = microbatch.token_ids.size(0)
        return torch.arange(height)[:, None].expand(microbatch.token_ids.shape), height
    sizes = microbatch.cu_seqlens.diff()
    return torch.arange(len(sizes)).repeat_interleave(sizes.cpu())[None], len(sizes)


def one_later(values: Tensor, microbatch: Microbatch) -> Tensor:
    """Shift values in model layout: each position gets the next value of its sequence, the last position zero."""
    shifted = torch.zeros_like(values)
    shifted[:, :-1] = values[:, 1:]
    if microbatch.cu_seqlens is not None:
        shifted[0, microbatch.cu_seqlens[1:].long().to(values.device) - 1] = 0
    return shifted


def to_model_layout(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Convert flat token layout to model layout: out[i] = values[i + 1] within a row, and zero at its last position."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[torch.tensor(list(accumulate(lengths)), dtype=torch.int64) - 1] = 0
    return shifted


def to_token_layout(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Convert flat model layout to token layout: out[t] = values[t - 1] within a row, and zero at its first position."""
    shifted = torch.zeros_like(values)
    shifted[1:] = values[:-1]
    shifted[torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)[:-1]] = 0
    return shifted


def _build_packed(
    tokens: RowTokens, places: list[int], fields: Mapping[str, Tensor], paddings: _Paddings
) -> Microbatch:
    starts, lengths = tokens.starts, [tokens.lengths[place] for place in places]
    sizes = [round_up(length, paddings.sequence_multiple) for length in lengths]
    num_padding = max(round_up(sum(sizes), paddings.pad_multiple), paddings.pad_multiple) - sum(sizes)
    sizes += [num_padding] * (num_padding > 0)

    def pack_rows(values: Tensor, filler: int) -> Tensor:
        out = values.new_full((sum(sizes), *values.shape[1:]), filler)
        for part, place in zip(out.split(sizes), places, strict=False):
            part[: tokens.lengths[place]] = values[starts[place] : starts[place + 1]]
        return out[None]

    return Microbatch(
        token_ids=pack_rows(tokens.fields["token_ids"], paddings.pad_token_id).long(),
        position_ids=torch.cat([torch.arange(size) for size in sizes])[None],
        rows=places,
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen=max(sizes),
        fields={name: pack_rows(values, 0) for name, values in fields.items()},
    )


def _build_padded(
    tokens: RowTokens, places: list[int], fields: Mapping[str, Tensor], paddings: _Paddings
) -> Microbatch:
    starts, lengths = tokens.starts, [tokens.lengths[place] for place in places]
    height = max(len(places), 1)
    width = round_up(max(lengths, default=1), paddings.pad_multiple)

    def pad_rows(values: Tensor, filler: int) -> Tensor:
        out = values.new_full((height, width, *values.shape[1:]), filler)
        for line, place in enumerate(places):
            out[line, : lengths[line]] = values[starts[place] : starts[place + 1]]
        return out

    return Microbatch(
        token_ids=pad_rows(tokens.fields["token_ids"], paddings.pad_token_id).long(),
        position_ids=torch.arange(width).expand(height, width).contiguous(),
        rows=places,
        lengths=lengths,
        max_seqlen=width,
        fields={name: pad_rows(values, 0) for name, values in fields.items()},
    )
