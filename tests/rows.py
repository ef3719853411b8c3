"""Rows for tests. Build batches from lists, and convert flat tensors to padded tensors [B, T], which are easier to compare by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.algorithms.interfaces import AdvantageInputs
from rlhf_mcore.algorithms.masking import OwnedRows, row_weights
from rlhf_mcore.data.prefixes import computed_of_row
from rlhf_mcore.parallel.rows import merge_rows, owners_of
from rlhf_mcore.types import TrainBatch


@dataclass(slots=True)
class Row:
    """A scored response. ``rollout_logprobs`` contains one value per response token."""

    prompt_ids: list[int]
    response_ids: list[int]
    rollout_logprobs: list[float]
    score: float = 0.0
    truncated: bool = False


def batch_of(rows: Sequence[Row], group_ids: Sequence[int], owners: Sequence[int] | None = None) -> TrainBatch:
    """Return the rows as the batch of a step. Every rank passes the same rows and keeps the rows that it owns."""
    lengths = torch.tensor([len(r.prompt_ids) + len(r.response_ids) for r in rows], dtype=torch.int64)
    dealt = owners_of(lengths.numpy(), dist.get_world_size()) if owners is None else np.array(owners, np.int64)
    mine = np.flatnonzero(dealt == dist.get_rank())
    held = [rows[k] for k in mine]

    def flat(parts: Sequence[list[float]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([value for part in parts for value in part], dtype=dtype)

    masks = [np.arange(len(r.prompt_ids) + len(r.response_ids)) >= len(r.prompt_ids) for r in rows]
    return TrainBatch(
        lengths=lengths,
        computed=torch.tensor([computed_of_row(np.zeros(len(mask), np.int32), mask) for mask in masks]),
        num_sampled=torch.tensor([len(r.response_ids) for r in rows], dtype=torch.int64),
        scores=torch.tensor([r.score for r in rows], dtype=torch.float64),
        truncated=torch.tensor([r.truncated for r in rows], dtype=torch.bool),
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        owners=torch.from_numpy(dealt),
        rows=torch.from_numpy(mine),
        token_ids=flat([[*r.prompt_ids, *r.response_ids] for r in held], torch.int32),
        loss_mask=flat([[0.0] * len(r.prompt_ids) + [1.0] * len(r.response_ids) for r in held], torch.bool),
        rollout_logprobs=flat([[0.0] * len(r.prompt_ids) + r.rollout_logprobs for r in held], torch.float32),
    )


def pad_rows(batch: TrainBatch, values: Tensor) -> Tensor:
    """Convert [N] on the owners to [B, T] on every rank, padded with zeros. Collective over the world."""
    width = max(batch.lengths.tolist(), default=1)
    whole = torch.zeros((batch.num_rows, width), dtype=torch.float64)
    parts = values.split(batch.lengths[batch.rows].tolist())
    for row, part in zip(batch.rows.tolist(), parts, strict=True):
        whole[row, : len(part)] = part
    return merge_rows(whole).to(values.dtype)


def flat(batch: TrainBatch, values: Tensor) -> Tensor:
    """Convert [B, T] to [N], the tokens of the rows that this rank owns."""
    parts = [values[row, : int(batch.lengths[row])] for row in batch.rows.tolist()]
    return torch.cat([values.new_empty(0), *parts])


def rows_of_padded(batch: TrainBatch, values: Tensor) -> list[list[float]]:
    """Return the values at the sampled tokens of each row, as lists. Collective over the world."""
    whole, mask = pad_rows(batch, values), pad_rows(batch, batch.loss_mask)
    return [whole[row][mask[row]].tolist() for row in range(batch.num_rows)]


def everything(like: Tensor) -> OwnedRows:
    """Return the layout of one rank that owns all rows of a [B, T] tensor. Padding counts as tokens."""
    height, width = like.shape
    return OwnedRows(torch.arange(height), torch.full((height,), width, dtype=torch.int64))


def advantage_inputs(
    rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    truncated: Tensor,
    old_values: Tensor | None = None,
    bootstrap_values: Tensor | None = None,
) -> AdvantageInputs:
    """Return the inputs of an advantage estimator from tensors [B, T] of all rows."""
    values = old_values.flatten() if old_values is not None else None
    return AdvantageInputs(
        rewards.flatten(), loss_mask.flatten(), everything(rewards), group_ids, truncated, values, bootstrap_values
    )


def token_weights(loss_mask: Tensor, aggregation: str, **counts: int) -> Tensor:
    """Return [B, T] with the weight of the row at every token in the mask, and zero elsewhere."""
    per_row = row_weights(loss_mask.sum(1), aggregation, **counts)
    return torch.where(loss_mask, per_row[:, None], 0.0)


def padded_batch(batch: TrainBatch) -> Any:
    """Return the batch with every per-token tensor as [B, T], for oracles that compute token by token. Collective over the world."""
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    per_token = set(tensors) - {"lengths", "num_sampled", "scores", "truncated", "group_ids", "owners", "rows"}
    per_token -= {"bootstrap_values", "kl_coef", "policy_version", "prompts", "with_entropy", "fields", "sequences"}
    per_token -= {"images", "computed", "replicas"}
    whole = {name: pad_rows(batch, tensors[name]) for name in per_token if tensors[name] is not None}
    return SimpleNamespace(**{**tensors, **whole})
