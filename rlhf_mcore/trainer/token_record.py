"""Record, for each token of some responses, the advantage and the logprob difference between trainer and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlhf_mcore.observability.run_directory import write_rollouts
from rlhf_mcore.parallel.collectives import gather_json

if TYPE_CHECKING:
    from rlhf_mcore.observability.run_directory import RunDirectory
    from rlhf_mcore.types import TrainBatch


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Writes ``rollouts/tokens-<step>.jsonl`` for the first ``num_responses`` rows of every ``every``-th step.

    ``decode`` converts each token list to its own text. ``directory`` is set on the first rank only.
    """

    num_responses: int
    every: int
    decode: Callable[[list[list[int]]], list[str]]
    directory: RunDirectory | None

    def write(self, step: int, batch: TrainBatch) -> None:
        """Write the record of a batch, which must contain advantages and old logprobs. Collective over the world."""
        if not self.every or step % self.every:
            return
        gathered = gather_json(list(self._records(batch)))
        if self.directory is not None:
            records = sorted((record for part in gathered for record in part), key=lambda record: record["row"])
            path = self.directory.rollouts_path(step)
            write_rollouts(path.with_name(path.name.replace("step-", "tokens-")), records)

    def _records(self, batch: TrainBatch) -> Iterator[dict[str, Any]]:
        """Yield the records of the rows that this rank owns."""
        assert batch.old_logprobs is not None and batch.advantages is not None and batch.prompts is not None
        groups, stop = batch.group_ids.tolist(), 0
        for row, length in zip(batch.rows.tolist(), batch.lengths[batch.rows].tolist(), strict=True):
            start, stop = stop, stop + length
            if row >= self.num_responses:
                return
            kept = batch.loss_mask[start:stop]
            ids = batch.token_ids[start:stop][kept].tolist()
            difference = (batch.old_logprobs[start:stop] - batch.rollout_logprobs[start:stop])[kept]
            yield {
                "row": row,
                "prompt_id": batch.prompts[groups[row]].prompt_id,
                "sample": row - groups.index(groups[row]),
                "tokens": self.decode([[token] for token in ids]),
                "advantages": _short(batch.advantages[start:stop][kept].tolist()),
                "logprob_differences": _short(difference.tolist()),
            }


def _short(values: list[float]) -> list[float]:
    return [float(f"{value:.3g}") for value in values]
