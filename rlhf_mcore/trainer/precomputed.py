"""Logprobs of a frozen policy that are computed once for a whole run: pairs of responses do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhf_mcore.algorithms.rows import OwnedRows
from rlhf_mcore.data.examples import TokenizedExample, example_batch
from rlhf_mcore.parallel.rows import merge_rows

if TYPE_CHECKING:
    from rlhf_mcore.protocols import LogprobModel


def add_reference(
    examples: Sequence[TokenizedExample],
    reference: LogprobModel,
    examples_per_batch: int,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Set the reference's logprob of each response of the examples. Collective over the world.

    Examples are cut into batches in their own order, so that a run which resumes gets the same numbers, bit for bit.
    """
    for start in range(0, len(examples), examples_per_batch):
        progress(f"reference, {start:,} of {len(examples):,} examples")
        part = examples[start : start + examples_per_batch]
        batch = example_batch(part)
        rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
        sums = iter(rows.sums(reference.compute_logprobs(batch), batch.loss_mask).tolist())
        for example in part:
            example.reference_logprobs = [next(sums) for _ in example.response_ids]
