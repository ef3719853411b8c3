"""Ragged fields of rows: cut by tokens, taken token by token, and on the move between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel.rows import Rows, move_rows
from rlhf_mcore.types import Ragged


def split_tokens(field: Ragged[Tensor], lengths: Sequence[int]) -> list[Ragged[Tensor]]:
    """The parts of ``lengths`` tokens each that follow each other."""
    counts = field.counts.split(list(lengths))
    values = field.values.split([int(part.sum()) for part in counts])
    return [Ragged(*part) for part in zip(counts, values, strict=True)]


def take_tokens(field: Ragged[Tensor], places: Tensor) -> Ragged[Tensor]:
    """The tokens at ``places`` [n] int64 of the flattened counts, in this order."""
    counts = field.counts.flatten().long()
    taken = counts[places]
    begins = (counts.cumsum(0) - counts)[places]  # where the values of each begin
    shift = begins - (taken.cumsum(0) - taken)
    total = int(taken.sum())
    sources = torch.arange(total, device=taken.device) + shift.repeat_interleave(taken, output_size=total)
    return Ragged(taken.to(field.counts.dtype), field.values[sources])


def move_ragged(field: Ragged[Tensor], lengths: Rows, holders: Rows, wanted: Sequence[Rows]) -> Ragged[Tensor]:
    """Send rows of a ragged field from the ranks that hold them to those that need them, as ``move_rows``. Collective over the world.

    How many values a row has is known to the rank that holds it, and with its counts to those that need it.
    """
    counts = move_rows({"counts": field.counts}, lengths, holders, wanted)["counts"]
    rank, totals = dist.get_rank(), np.zeros_like(lengths)
    for rows, held in ((np.flatnonzero(holders == rank), field.counts), (wanted[rank], counts)):
        totals[rows] = [int(part.sum()) for part in held.split(lengths[rows].tolist())]
    values = move_rows({"values": field.values}, totals, holders, wanted)["values"]
    return Ragged(counts, values)
