"""Trajectories -> TrainBatch -> Microbatch, and per-token outputs back. The one place of the shift.

Token layout, [B, T]: ``x[:, t]`` belongs to ``token_ids[:, t]``. So the loop and the algorithms see everything.

Model layout: position i of a sequence predicts token i + 1, so a field holds at position i the value of token i + 1,
and zero at the last position of each sequence. So a forward pass sees everything.

``to_model_layout`` and ``to_token_layout`` are the only functions that go from one to the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_mcore.data.packing import group_by_length, pack, round_up
from rlhf_mcore.types import Microbatch, TrainBatch


@dataclass(slots=True)
class Row:
    """What training needs of a scored trajectory. ``rollout_logprobs`` has one value per response token."""

    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    score: float
    truncated: bool = False


def make_train_batch(records: Sequence[Row], group_ids: Sequence[int], pad_token_id: int) -> TrainBatch:
    """The rows of a step, padded on the right to the longest. No rows at all give tensors [0, 1].

    Raises:
        ValueError: a row without a prompt (its first response token would have no predictor), or with a number of
            logprobs that is not that of its response tokens.
    """
    assert len(records) == len(group_ids)
    for number, record in enumerate(records):
        _check_row(number, record)
    width = max((len(record.prompt_ids) + len(record.response_ids) for record in records), default=1)
    token_ids = torch.full((len(records), width), pad_token_id, dtype=torch.int64)
    loss_mask = torch.zeros((len(records), width), dtype=torch.bool)
    rollout_logprobs = torch.zeros((len(records), width), dtype=torch.float32)
    for row, record in enumerate(records):
        start, stop = len(record.prompt_ids), len(record.prompt_ids) + len(record.response_ids)
        token_ids[row, :stop] = torch.tensor(record.prompt_ids + record.response_ids, dtype=torch.int64)
        loss_mask[row, start:stop] = True
        rollout_logprobs[row, start:stop] = torch.tensor(record.rollout_logprobs, dtype=torch.float32)
    return TrainBatch(
        token_ids=token_ids,
        lengths=torch.tensor([len(r.prompt_ids) + len(r.response_ids) for r in records], dtype=torch.int64),
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        scores=torch.tensor([record.score for record in records], dtype=torch.float64),
        truncated=torch.tensor([record.truncated for record in records], dtype=torch.bool),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
    )


def make_microbatches(
    batch: TrainBatch,
    rows: Sequence[int],
    *,
    fields: Mapping[str, Tensor],
    max_tokens: int,
    packing: bool,
    rows_per_unit: int = 1,
    pad_multiple: int = 1,
    min_count: int = 1,
    multiple_of: int = 1,
    pad_token_id: int = 0,
) -> list[Microbatch]:
    """Cut ``rows`` of a batch into microbatches of at most ``max_tokens`` tokens, padding included.

    ``fields`` are tensors [B, T] in token layout; they arrive in ``Microbatch.fields`` in model layout with their
    dtype, beside "labels" (int64, the next token, 0 where there is none) and "mask" (bool, the loss mask). There are at
    least ``min_count`` microbatches and a multiple of ``multiple_of``; those that no row is left for are dummies of
    ``pad_multiple`` pad tokens with zero fields and no rows, which keep ranks in step and add nothing to a sum.

    Every ``rows_per_unit`` consecutive ``rows`` stay together, and follow each other.

    Packed: token_ids [1, N], with one extra dummy sequence that fills N up to ``pad_multiple``; it has an entry in
    ``cu_seqlens`` but none in ``rows`` and ``lengths``. Padded: [b, T_b], T_b a multiple of ``pad_multiple``.

    Raises:
        ConfigError: one row, or unit of rows, is longer than ``max_tokens``.
    """
    assert not {"labels", "mask"} & set(fields), "labels and mask are made here"
    shifted = {"labels": batch.token_ids, "mask": batch.loss_mask, **fields}
    shifted = {name: to_model_layout(value, batch.lengths) for name, value in shifted.items()}
    units = in_units(rows, rows_per_unit)
    lengths = [[int(batch.lengths[row]) for row in unit] for unit in units]
    cut, size, height = (pack, sum, 1) if packing else (group_by_length, _padded_size, rows_per_unit)
    bins = cut(
        [size(unit) for unit in lengths],
        max_tokens,
        min_bins=min_count,
        multiple_of=multiple_of,
        pad_multiple=height * pad_multiple,
    )
    build = _build_packed if packing else _build_padded
    held = [[row for place in bin for row in units[place]] for bin in bins]
    return [build(batch, rows, shifted, pad_multiple, pad_token_id) for rows in held]


def in_units(rows: Sequence[int], rows_per_unit: int) -> list[list[int]]:
    """Consecutive rows in runs of ``rows_per_unit``."""
    assert len(rows) % rows_per_unit == 0, (len(rows), rows_per_unit)
    return [list(rows[start : start + rows_per_unit]) for start in range(0, len(rows), rows_per_unit)]


def _padded_size(lengths: Sequence[int]) -> int:
    return len(lengths) * max(lengths)


def restore_rows(
    outputs: Sequence[Tensor], microbatches: Sequence[Microbatch], num_rows: int, max_length: int
) -> Tensor:
    """Per-token outputs of the microbatches, in model layout, back to token layout.

    Each output has the shape of its microbatch's token_ids. Returns [num_rows, max_length] float32 on the host;
    column 0, padding and rows that are in no microbatch are zero.
    """
    result = torch.zeros((num_rows, max_length), dtype=torch.float32)
    lengths = torch.zeros(num_rows, dtype=torch.int64)
    for row, values in _by_row(outputs, microbatches):
        result[row, : len(values)] = values
        lengths[row] = len(values)
    return to_token_layout(result, lengths)


def restore_last(outputs: Sequence[Tensor], microbatches: Sequence[Microbatch], num_rows: int) -> Tensor:
    """What the model says at the last token of each row: [num_rows] float32 on the host, zero for rows in no microbatch."""
    result = torch.zeros(num_rows, dtype=torch.float32)
    for row, values in _by_row(outputs, microbatches):
        result[row] = values[-1]
    return result


def _by_row(outputs: Sequence[Tensor], microbatches: Sequence[Microbatch]) -> Iterator[tuple[int, Tensor]]:
    """Row and its outputs [length], in model layout, of every sequence."""
    for output, microbatch in zip(outputs, microbatches, strict=True):
        assert output.shape == microbatch.token_ids.shape, (output.shape, microbatch.token_ids.shape)
        values = output.detach().to(device="cpu", dtype=torch.float32)
        starts = microbatch.cu_seqlens.tolist() if microbatch.cu_seqlens is not None else None
        for sequence, (row, length) in enumerate(zip(microbatch.rows, microbatch.lengths, strict=True)):
            source = values[sequence] if starts is None else values[0, starts[sequence] :]
            yield row, source[:length]


def last_positions(microbatch: Microbatch) -> Tensor:
    """Where the last token of each of its rows is, counted over the flattened token_ids: [num_rows] int64."""
    lengths = torch.tensor(microbatch.lengths, dtype=torch.int64)
    if microbatch.cu_seqlens is None:
        return torch.arange(len(lengths)) * microbatch.token_ids.size(1) + lengths - 1
    return microbatch.cu_seqlens[: len(lengths)].long() + lengths - 1


def sequence_ids(microbatch: Microbatch) -> tuple[Tensor, int]:
    """Which sequence of the microbatch each position belongs to, in the shape of its token_ids, and how many there are.

    Padding counts as part of its row, or as a sequence of its own behind the others (packed).
    """
    if microbatch.cu_seqlens is None:
        height = microbatch.token_ids.size(0)
        return torch.arange(height)[:, None].expand(microbatch.token_ids.shape), height
    sizes = microbatch.cu_seqlens.diff()
    return torch.arange(len(sizes)).repeat_interleave(sizes.cpu())[None], len(sizes)


def to_model_layout(values: Tensor, lengths: Tensor) -> Tensor:
    """[B, T] in token layout -> model layout: out[b, i] = values[b, i + 1] for i + 1 < lengths[b], else zero."""
    shifted = torch.zeros_like(values)
    shifted[:, :-1] = values[:, 1:]
    return shifted.masked_fill(_unpredicted(shifted, lengths), 0)


def to_token_layout(values: Tensor, lengths: Tensor) -> Tensor:
    """[B, T] in model layout -> token layout: out[b, t] = values[b, t - 1] for 0 < t < lengths[b], else zero."""
    kept = values.masked_fill(_unpredicted(values, lengths), 0)
    shifted = torch.zeros_like(values)
    shifted[:, 1:] = kept[:, :-1]
    return shifted


def _unpredicted(values: Tensor, lengths: Tensor) -> Tensor:
    """[B, T] bool: positions that predict no token of their sequence, in model layout."""
    return torch.arange(values.shape[1], device=values.device) >= lengths.to(values.device)[:, None] - 1


def _check_row(number: int, record: Row) -> None:
    if not record.prompt_ids:
        raise ValueError(f"row {number}: the prompt has no tokens, so its first response token cannot be predicted")
    if len(record.rollout_logprobs) != len(record.response_ids):
        raise ValueError(
            f"row {number}: the engine gave {len(record.rollout_logprobs)} logprobs for "
            f"{len(record.response_ids)} response tokens"
        )


def _build_packed(
    batch: TrainBatch, rows: list[int], shifted: Mapping[str, Tensor], pad_multiple: int, pad_token_id: int
) -> Microbatch:
    lengths = [int(batch.lengths[row]) for row in rows]
    num_tokens = sum(lengths)
    num_padding = max(round_up(num_tokens, pad_multiple), pad_multiple) - num_tokens
    sizes = lengths + [num_padding] * (num_padding > 0)
    width = batch.token_ids.shape[1]
    places = [torch.arange(row * width, row * width + length) for row, length in zip(rows, lengths, strict=True)]
    index = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)

    def flat(values: Tensor, filler: int) -> Tensor:
        padding = values.new_full((num_padding,), filler)
        return torch.cat([values.flatten()[index.to(values.device)], padding])[None]

    return Microbatch(
        token_ids=flat(batch.token_ids, pad_token_id),
        position_ids=torch.cat([torch.arange(size) for size in sizes])[None],
        rows=rows,
        lengths=lengths,
        cu_seqlens=torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        max_seqlen=max(sizes),
        fields={name: flat(values, 0) for name, values in shifted.items()},
    )


def _build_padded(
    batch: TrainBatch, rows: list[int], shifted: Mapping[str, Tensor], pad_multiple: int, pad_token_id: int
) -> Microbatch:
    lengths = [int(batch.lengths[row]) for row in rows]
    height = max(len(rows), 1)
    width = round_up(max(lengths, default=1), pad_multiple)
    used = min(width, batch.token_ids.shape[1])

    def padded(values: Tensor, filler: int) -> Tensor:
        out = values.new_full((height, width), filler)
        out[: len(rows), :used] = values[rows, :used]
        return out

    real = torch.arange(width) < torch.tensor([*lengths, *[0] * (height - len(rows))])[:, None]
    return Microbatch(
        token_ids=padded(batch.token_ids, pad_token_id).masked_fill(~real, pad_token_id),
        position_ids=torch.arange(width).expand(height, width).contiguous(),
        rows=rows,
        lengths=lengths,
        max_seqlen=width,
        fields={name: padded(values, 0) for name, values in shifted.items()},
    )
