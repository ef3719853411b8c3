"""Sends what engines have recorded of tokens, beside their logprobs, to the owners of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.ragged import move_ragged
from rlhf_mcore.parallel.rows import Rows, move_rows
from rlhf_mcore.types import Field, Ragged


def move_fields(fields: Mapping[str, Field], lengths: Rows, holders: Rows, wanted: Sequence[Rows]) -> dict[str, Field]:
    """Send rows of fields of any kind, as ``move_rows``. Collective over the world."""
    tensors = {name: values for name, values in fields.items() if isinstance(values, Tensor)}
    moved: dict[str, Field] = dict(move_rows(tensors, lengths, holders, wanted))
    for name, values in fields.items():
        if isinstance(values, Ragged):
            moved[name] = move_ragged(values, lengths, holders, wanted)
    return moved


def as_everywhere(recorded: dict[str, Field], problem: str, *, draws: bool) -> dict[str, Field]:
    """Return the fields that every rank has, of no tokens where this one draws nothing. Collective over the world.

    Raises:
        RuntimeError: on every rank, rows have different fields, or a rank has a problem.
    """

    def form(field: Field) -> list[Any]:
        values = field.values if isinstance(field, Ragged) else field
        return [isinstance(field, Ragged), str(values.dtype).removeprefix("torch."), list(values.shape[1:])]

    ranks = all_gather_json([problem, {name: form(recorded[name]) for name in sorted(recorded)} if draws else None])
    if problems := [of_rank for of_rank, _ in ranks if of_rank]:
        raise RuntimeError(problems[0])
    forms, *others = [of_rank for _, of_rank in ranks if of_rank is not None]
    if different := [other for other in others if other != forms]:
        raise RuntimeError(f"engines recorded different fields of their tokens: {forms} and {different[0]}")
    if draws:
        return recorded
    blanks: dict[str, Field] = {}
    for name, (is_ragged, dtype, shape) in forms.items():
        values = torch.zeros(0, *shape, dtype=getattr(torch, dtype))
        blanks[name] = Ragged(torch.zeros(0, dtype=torch.int32), values) if is_ragged else values
    return blanks
