"""Send rows of a step, as flat tensors over their tokens, from the ranks that hold them to the ranks that need them.

Every rank knows the number of tokens of all rows, which rank holds each row, and which ranks need it. Both ends of a
message therefore know its size, and only the tokens are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.types import Field, Ragged

Rows = NDArray[np.int64]  # indices of rows in a step
NO_ROWS: Rows = np.zeros(0, dtype=np.int64)


def move_rows(
    fields: Mapping[str, Tensor],
    lengths: Rows,
    holders: Rows,
    wanted: Sequence[Rows],
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Send rows from the ranks that hold them to the ranks that need them, by one all-to-all per field.

    Collective over ``group``.

    Args:
        fields: host tensors [tokens of the rows that this rank holds, ...], rows ascending and back to back. Names,
            dtypes and further dimensions are equal on every rank.
        lengths: [B] tokens of every row of the step.
        holders: [B] the rank of the group that holds each row.
        wanted: for each rank of the group, the rows that it needs, in its order. Ranks that need the same rows share
            one array.

    Returns:
        [tokens of this rank's wanted rows, ...] by name, in the order of ``wanted``.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    assert len(wanted) == world_size, (len(wanted), world_size)
    own = np.flatnonzero(holders == rank)
    place = np.full(len(lengths), -1)
    place[own] = np.arange(len(own))
    # The positions of the rank's own rows in each wanted array, by the array's identity.
    places_of: dict[int, list[int]] = {}
    for rows in wanted:
        if id(rows) not in places_of:
            places_of[id(rows)] = place[rows[holders[rows] == rank]].tolist()
    sent = [places_of[id(rows)] for rows in wanted]
    own_lengths = lengths[own].tolist()
    sent_tokens = [sum(own_lengths[k] for k in rows) for rows in sent]

    # Rows arrive sender by sender.
    order = np.argsort(holders[wanted[rank]], kind="stable")
    arriving = wanted[rank][order]
    received_tokens = np.bincount(holders[arriving], weights=lengths[arriving], minlength=world_size)
    arriving_lengths = lengths[arriving].tolist()
    back = np.argsort(order).tolist()

    moved = {}
    for name in sorted(fields):
        dtype = fields[name].dtype
        values = (
            fields[name][..., None].view(torch.uint8) if dtype == torch.int16 else fields[name]
        )  # gloo does not support int16
        parts = values.split(own_lengths)
        outgoing = _join([parts[k] for rows in sent for k in rows], values)
        incoming = values.new_empty(int(received_tokens.sum()), *values.shape[1:])
        if world_size == 1:
            incoming = outgoing
        else:
            dist.all_to_all_single(incoming, outgoing, received_tokens.astype(int).tolist(), sent_tokens, group=group)
        received = incoming.split(arriving_lengths)
        joined = _join([received[k] for k in back], incoming)
        moved[name] = joined.view(dtype)[..., 0] if dtype == torch.int16 else joined
    return moved


def merge_rows(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum host values [B, ...] over the ranks of a group, in place.

    Each rank sets its own rows and leaves others zero.

    A row has one owner, so each sum has at most one nonzero term. The result is exact and does not depend on the
    owners.
    """
    dist.all_reduce(values, group=group)
    return values


def owners_of(lengths: Rows, world_size: int) -> Rows:
    """Assign each row [B] to a rank, so that ranks get nearly equal numbers of tokens.

    Rows are assigned from the longest to the shortest, through the ranks back and forth.
    """
    order = np.argsort(-lengths, kind="stable")
    turn, place = np.divmod(np.arange(len(lengths)), world_size)
    owners = np.empty(len(lengths), np.int64)
    owners[order] = np.where(turn % 2, world_size - 1 - place, place)
    return owners


def rows_by_rank(ranks: Rows, world_size: int) -> list[Rows]:
    """Return the rows of each rank, ascending, from the rank of each row."""
    counts = np.bincount(ranks, minlength=world_size)
    return np.split(np.argsort(ranks, kind="stable"), np.cumsum(counts)[:-1])


def _join(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(parts)) if parts else like.new_empty(0, *like.shape[1:])


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
    """Send rows of a ragged field, like ``move_rows``. Collective over the world.

    The counts are sent first, so that a rank knows the number of values in each of its wanted rows.
    """
    counts = move_rows({"counts": field.counts}, lengths, holders, wanted)["counts"]
    rank, totals = dist.get_rank(), np.zeros_like(lengths)
    for rows, of_tokens in ((np.flatnonzero(holders == rank), field.counts), (wanted[rank], counts)):
        totals[rows] = [int(part.sum()) for part in of_tokens.split(lengths[rows].tolist())]
    values = move_rows({"values": field.values}, totals, holders, wanted)["values"]
    return Ragged(counts, values)


def move_fields(fields: Mapping[str, Field], lengths: Rows, holders: Rows, wanted: Sequence[Rows]) -> dict[str, Field]:
    """Send rows of fields of any kind, like ``move_rows``. Collective over the world."""
    tensors = {name: values for name, values in fields.items() if isinstance(values, Tensor)}
    moved: dict[str, Field] = dict(move_rows(tensors, lengths, holders, wanted))
    for name, values in sorted(fields.items()):
        if isinstance(values, Ragged):
            moved[name] = move_ragged(values, lengths, holders, wanted)
    return moved
