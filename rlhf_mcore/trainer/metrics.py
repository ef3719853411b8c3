"""The numbers of a step that the loop itself knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rlhf_mcore.algorithms.correction import rollout_ratio_statistics
from rlhf_mcore.algorithms.rows import OwnedRows
from rlhf_mcore.parallel.rows import merge_rows
from rlhf_mcore.trainer.exchange import Exchanged
from rlhf_mcore.types import TrainBatch


def rollout_metrics(exchanged: Exchanged) -> dict[str, float]:
    """Rewards and lengths over all rows of the step."""
    batch = exchanged.batch
    scores, lengths = batch.scores, batch.num_sampled.double()
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std(unbiased=False)),
        "reward/max": float(scores.max()),
        "reward/min": float(scores.min()),
        **{f"reward/{kind}s": float(count) for kind, count in exchanged.failures.items()},
        **{f"reward/{name}_mean": mean for name, mean in exchanged.part_means.items()},
        "rollout/response_length_mean": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated_fraction": float(batch.truncated.double().mean()),
        "rollout/num_tokens": float(lengths.sum()),
    }


def source_metrics(batch: TrainBatch, sources: Sequence[str]) -> dict[str, float]:
    """Where scores teach nothing: the share of responses that score 0, and of prompts whose responses all score the same.

    ``sources``: the data source of each prompt of the step. Where there are several, each has its own mean and shares.
    """
    scores = batch.scores.reshape(len(sources), -1)  # [P, G]
    same = (scores == scores[:, :1]).all(dim=1)
    found = {
        "reward/share_zero": float((scores == 0).double().mean()),
        "reward/share_same": float(same.double().mean()),
    }
    if len(names := sorted(set(sources))) > 1:
        for name in names:
            held = torch.tensor([source == name for source in sources])
            found[f"reward/mean/{name}"] = float(scores[held].mean())
            found[f"reward/share_zero/{name}"] = float((scores[held] == 0).double().mean())
            found[f"reward/share_same/{name}"] = float(same[held].double().mean())
    return found


def agreement_metrics(batch: TrainBatch) -> dict[str, float]:
    """How far the trainer's logprobs are from the engine's on the same tokens. Collective over the world."""
    assert batch.old_logprobs is not None
    rows = OwnedRows(batch.rows, batch.lengths, merge_rows)
    found = rollout_ratio_statistics(batch.old_logprobs, batch.rollout_logprobs, batch.loss_mask, rows)
    return {f"rollout/{name}": value for name, value in found.items()}


class DivergedError(RuntimeError):
    """There is no point in continuing from the weights that training has led to. The last checkpoint is from before that."""


def refuse_not_finite(names: Iterable[str], what: str) -> None:
    """End the run, on every rank, because of models that hold a NaN or an infinity. ``what`` was not done with them.

    Raises:
        DivergedError: unless there are no ``names``.
    """
    if found := ", ".join(sorted(set(names))):
        raise DivergedError(
            f"the weights or the optimizer's state of {found} are not finite: {what}. The last checkpoint is from before that: "
            "start the run again to go on from it (trainer.max_restarts does so by itself). If it happens again, lower the learning "
            "rate, or look at the data and the rewards of the last steps"
        )


def stop_if_diverged(metrics: Mapping[str, float], max_bad_updates: int) -> None:
    """End the run, on every rank, when updates have spoiled a model, or too many of them in a row had to be skipped.

    Raises:
        DivergedError: with the model's name.
    """
    spoiled = [name.removesuffix("/not_finite") for name in metrics if name.endswith("/not_finite")]
    refuse_not_finite(spoiled, "this step is neither saved nor sent to the engines")
    for name, count in metrics.items():
        if name.endswith("/bad_updates_in_a_row") and count >= max_bad_updates:
            raise DivergedError(
                f"the loss or the gradient of the {name.split('/')[0]} was not finite in {int(count)} updates in a row "
                f"(trainer.max_bad_updates={max_bad_updates}); none of them was made. Lower the learning rate, or look at the data "
                "and the rewards of the last steps; the last checkpoint is intact"
            )


@dataclass(slots=True)
class Counters:
    """Sums over the steps that were made. ``tokens`` are those of responses, which carry the loss."""

    steps: int = 0
    prompts: int = 0
    samples: int = 0
    tokens: int = 0

    def count(self, batch: TrainBatch) -> dict[str, float]:
        """One more step. Returns the sums as metrics."""
        self.steps += 1
        self.prompts += len(batch.group_ids.unique())
        self.samples += len(batch.group_ids)
        self.tokens += int(batch.num_sampled.sum())
        return {f"progress/{name}": float(value) for name, value in asdict(self).items() if name != "steps"}

    def state_dict(self) -> dict[str, Any]:
        """The sums, as plain JSON values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from these sums."""
        for name in asdict(self):
            setattr(self, name, int(state[name]))
