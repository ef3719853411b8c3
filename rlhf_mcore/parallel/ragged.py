"""Ragged fields of rows: splits them, selects tokens, and moves them between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel.rows import Rows, move_rows
from rlhf_mcore.types import Ragged


def split_tokens(field: Ragged[Tensor], lengths: Sequence[int]) -> list[Ragged[Tensor]]:
    """Split a field into consecutive parts of ``lengths`` tokens."""
    counts = field.counts.split(list(lengths))
    values = field.values.split([int(part.sum()) for part in counts])
    return [Ragged(*part) for part in zip(counts, values, strict=True)]


def take_tokens(field: Ragged[Tensor], places: Tensor) -> Ragged[Tensor]:
    """Return the tokens at ``places`` [n] int64 of the flattened counts, in this order."""
    all_counts = field.counts.flatten().long()
    counts = all_counts[places]
    begins = (all_counts.cumsum(0) - all_counts)[places]
    shift = begins - (counts.cumsum(0) - counts)
    total = int(counts.sum())
    sources = torch.arange(total, device=counts.device) + shift.repeat_interleave(counts, output_size=total)
    return Ragged(counts.to(field.counts.dtype), field.values[sources])


def move_ragged(field: Ragged[Tensor], lengths: Rows, holders: Rows, wanted: Sequence[Rows]) -> Ragged[Tensor]:
    """Send rows of a ragged field from the ranks that hold them to those that need them, as ``move_rows``. Collective over the world.

    The counts are sent first, so that a rank knows how many values each of its wanted rows has.
    """
    counts = move_rows({"counts": field.counts}, lengths, holders, wanted)["counts"]
    rank, totals = dist.get_rank(), np.zeros_like(lengths)
    for rows, of_tokens in ((np.flatnonzero(holders == rank), field.counts), (wanted[rank], counts)):
        totals[rows] = [int(part.sum()) for part in of_tokens.split(lengths[rows].tolist())]
    values = move_rows({"values": field.values}, totals, holders, wanted)["values"]
    return Ragged(counts, values)
