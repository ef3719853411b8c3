"""Rows -> microbatches, and what a model computed back to rows. The one place of the shift.

Token layout, flat over rows back to back: ``x[k]`` belongs to ``token_ids[k]``. So the loop and the algorithms see everything.

Model layout: position i of a row predicts token i + 1, so a field holds at position i the value of token i + 1, and zero at the last
position of each row. So a forward pass sees everything.

``to_model_layout`` and ``to_token_layout`` are the only functions that go from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from rlhf_mcore.data.packing import group_by_length, pack, round_up
from rlhf_mcore.parallel.ragged import split_tokens
from rlhf_mcore.types import Microbatch, Ragged


@dataclass(slots=True)
class RowTokens:
    """Some rows of a step with their tokens back to back: what a model is run over.

    ``fields`` are flat tensors [sum of lengths, ...] in token layout, ``token_ids`` among them. ``ragged`` fields are of the same
    tokens; the first of a row, which nothing predicts, has no values.
    """

    rows: list[int]
    lengths: list[int]
    fields: Mapping[str, Tensor]
    ragged: Mapping[str, Ragged[Tensor]] = field(default_factory=dict)

    @property
    def starts(self) -> list[int]:
        """Where each row begins, and the end of the last one."""
        return [0, *accumulate(self.lengths)]


def make_microbatches(
    held: RowTokens,
    *,
    max_tokens: int,
    packing: bool,
    rows_per_unit: int = 1,
    pad_multiple: int = 1,
    sequence_multiple: int = 1,
    min_count: int = 1,
    multiple_of: int = 1,
    pad_token_id: int = 0,
) -> list[Microbatch]:
    """Cut rows into microbatches of at most ``max_tokens`` tokens, padding included.

    The fields arrive in ``Microbatch.fields`` in model layout with their dtype, and ``token_ids`` as "labels" (int64, the next token,
    0 where there is none). There are at least ``min_count`` microbatches and a multiple of ``multiple_of``; those that no row is left
    for are dummies of ``pad_multiple`` pad tokens with zero fields and no rows, which keep ranks in step and add nothing to a sum.

    Ragged fields arrive in ``Microbatch.ragged``, with the counts as a field, and the values of the rows in their order.

    Every ``rows_per_unit`` consecutive rows stay together, and follow each other. ``Microbatch.rows`` are places in ``held.rows``.

    Packed: token_ids [1, N], each sequence filled up to ``sequence_multiple``, with one extra dummy sequence that fills N up to
    ``pad_multiple``, a multiple of the former; it has an entry in ``cu_seqlens`` but none in ``rows`` and ``lengths``. Padded:
    [b, T_b], T_b a multiple of ``pad_multiple``.

    Raises:
        ConfigError: one row, or unit of rows, is longer than ``max_tokens``.
    """
    assert "labels" not in held.fields, "labels are made here"
    units = in_units(range(len(held.rows)), rows_per_unit)
    lengths = [[round_up(held.lengths[place], sequence_multiple) for place in unit] for unit in units]
    cut, size, height = (pack, sum, 1) if packing else (group_by_length, _padded_size, rows_per_unit)
    bins = cut(
        [size(unit) for unit in lengths],
        max_tokens,
        min_bins=min_count,
        multiple_of=multiple_of,
        pad_multiple=height * pad_multiple,
    )
    fields = {"labels": held.fields["token_ids"].long(), **held.fields}
    del fields["token_ids"]
    shifted = {name: to_model_layout(values, held.lengths) for name, values in fields.items()}
    shifted |= {name: to_model_layout(field.counts, held.lengths) for name, field in held.ragged.items()}
    values = {name: [part.values for part in split_tokens(f, held.lengths)] for name, f in held.ragged.items()}
    chosen = [[place for unit in bin for place in units[unit]] for bin in bins]
    made = []
    for places in chosen:
        if packing:
            part = _build_packed(held, places, shifted, (sequence_multiple, pad_multiple), pad_token_id)
        else:
            part = _build_padded(held, places, shifted, pad_multiple, pad_token_id)
        for name, rows in values.items():
            # The shift moves no value past one of another token: a row's first token has none, and its last position gets none.
            taken = [held.ragged[name].values[:0], *(rows[place] for place in places)]
            part.ragged[name] = Ragged(part.fields.pop(name), torch.cat(taken))
            assert int(part.ragged[name].counts.sum()) == len(part.ragged[name].values), name
        made.append(part)
    return made


def in_units(rows: Sequence[int], rows_per_unit: int) -> list[list[int]]:
    """Consecutive rows in runs of ``rows_per_unit``."""
    assert len(rows) % rows_per_unit == 0, (len(rows), rows_per_unit)
    return [list(rows[start : start + rows_per_unit]) for start in range(0, len(rows), rows_per_unit)]


def _padded_size(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths)


def restore_tokens(outputs: Sequence[Tensor], microbatches: Sequence[Microbatch], lengths: Sequence[int]) -> Tensor:
    """Per-token outputs of microbatches, in model layout, back to the token layout of the rows that they were cut from.

    Each output has the shape of its microbatch's token_ids, or that and further dimensions. Returns [sum of lengths, ...] float32 on
    the host; the first token of a row, which nothing predicts, is zero.
    """
    result = torch.zeros(sum(lengths), *outputs[0].shape[2:], dtype=torch.float32)
    parts = result.split(list(lengths))
    for place, values in _by_row(outputs, microbatches):
        parts[place].copy_(values)
    return to_token_layout(result, lengths)


def restore_last(outputs: Sequence[Tensor], microbatches: Sequence[Microbatch], num_rows: int) -> Tensor:
    """What a model computed at the last token of each row: [num_rows, ...] float32 on the host."""
    result = torch.zeros(num_rows, *outputs[0].shape[2:], dtype=torch.float32)
    for place, values in _by_row(outputs, microbatches):
        result[place] = values[-1]
    return result


def _by_row(outputs: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> Iterator[tuple[int, Tensor]]:
    """Place of a row and its outputs [length], in model layout, of every sequence."""
    for output, microbatch in zip(outputs, microbatches, strict=True):
        assert output.shape[:2] == microbatch.token_ids.shape, (output.shape, microbatch.token_ids.shape)
        values = output.detach().to(device="cpu", dtype=torch.float32)
        starts = microbatch.cu_seqlens.tolist() if microbatch.cu_seqlens is not None else None
        for sequence, (place, length) in enumerate(zip(microbatch.rows, microbatch.lengths, strict=True)):
            source = values[sequence] if starts is None else values[0, starts[sequence] :]
            yield place, source[:length]


def last_positions(microbatch: Microbatch) -> Tensor:
    """Where the last token of each of its rows is, counted over the flattened token_ids: [num_rows] int64."""
    lengths = torch.tensor(microbatch.lengths, dtype=torch.int64)
    if microbatch.cu_seqlens is None:
        return torch.arange(len(lengths)) * microbatch.token_ids.size(1) + lengths - 1
    return microbatch.cu_seqlens[: len(lengths)].long() + lengths - 1


def sequence_sizes(microbatch: Microbatch) -> list[int]:
    """Tokens of each sequence along the last dimension, padding included: those of packed input, or the width of padded rows."""
    if microbatch.cu_seqlens is None:
        return [microbatch.token_ids.size(1)]
    sizes: list[int] = microbatch.cu_seqlens.diff().tolist()
    return sizes


def sequence_ids(microbatch: Microbatch) -> tuple[Tensor, int]:
    """Which sequence of the microbatch each position belongs to, in the shape of its token_ids, and how many there are.

    Padding counts as part of its row; what fills up a packed microbatch is a sequence of its own behind the others.
    """
    if microbatch.cu_seqlens is None:
        height = microbatch.token_ids.size(0)
        return torch.arange(height)[:, None].expand(microbatch.token_ids.shape), height
    sizes = microbatch.cu_seqlens.diff()
    return torch.arange(len(sizes)).repeat_interleave(sizes.cpu())[None], len(sizes)


def one_later(values: Tensor, microbatch: Microbatch) -> Tensor:
    """In model layout, of every position what the next one of its sequence has, and zero at the last position of each."""
    shifted = torch.zeros_like(values)
    shifted[:, :-1] = values[:, 1:]
    if microbatch.cu_seqlens is not None:
        shifted[0, microbatch.cu_seqlens[1:].long().to(values.device) - 1] = 0
    return shifted


def to_model_layout(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Flat token layout -> model layout: out[i] = values[i + 1] within a row, and zero at its last position."""
    shifted = torch.zeros_like(values)
    shifted[:-1] = values[1:]
    shifted[torch.tensor(list(accumulate(lengths)), dtype=torch.int64) - 1] = 0
    return shifted


def to_token_layout(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Flat model layout -> token layout: out[t] = values[t - 1] within a row, and zero at its first position."""
    shifted = torch.zeros_like(values)
    shifted[1:] = values[:-1]
    shifted[torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)[:-1]] = 0
    return shifted


def _build_packed(
    held: RowTokens, places: list[int], fields: Mapping[str, Tensor], multiples: tuple[int, int], pad_token_id: int
) -> Microbatch:
    (sequence_multiple, pad_multiple), starts = multiples, held.starts
    lengths = [held.lengths[place] for place in places]
    sizes = [round_up(length, sequence_multiple) for length in lengths]
    num_padding = max(round_up(sum(sizes), pad_multiple), pad_multiple) - sum(sizes)
    sizes += [num_padding] * (num_padding > 0)

    def packed(values: Tensor, filler: int) -> Tensor:
        out = values.new_full((sum(sizes), *values.shape[1:]), filler)
        for part, place in zip(out.split(sizes), places, strict=False):
            part[: held.lengths[place]] = values[starts[place] : starts[place + 1]]
        return out[None]

    return Microbatch(
        token_ids=packed(held.fields["token_ids"], pad_token_id).long(),
        position_ids=torch.cat([torch.arange(size) for size in sizes])[None],
        rows=places,
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen=max(sizes),
        fields={name: packed(values, 0) for name, values in fields.items()},
    )


def _build_padded(
    held: RowTokens, places: list[int], fields: Mapping[str, Tensor], pad_multiple: int, pad_token_id: int
) -> Microbatch:
    starts, lengths = held.starts, [held.lengths[place] for place in places]
    height = max(len(places), 1)
    width = round_up(max(lengths, default=1), pad_multiple)

    def padded(values: Tensor, filler: int) -> Tensor:
        out = values.new_full((height, width, *values.shape[1:]), filler)
        for line, place in enumerate(places):
            out[line, : lengths[line]] = values[starts[place] : starts[place + 1]]
        return out

    return Microbatch(
        token_ids=padded(held.fields["token_ids"], pad_token_id).long(),
        position_ids=torch.arange(width).expand(height, width).contiguous(),
        rows=places,
        lengths=lengths,
        max_seqlen=width,
        fields={name: padded(values, 0) for name, values in fields.items()},
    )
