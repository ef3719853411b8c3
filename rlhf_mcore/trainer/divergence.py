"""End a run if an update produced weights that are not finite, or if too many updates in a row were skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.types import UpdateResult


class DivergedError(RuntimeError):
    """Training diverged, so the current weights are not usable. The last checkpoint was saved before the divergence."""


def share_results(results: Iterable[UpdateResult | None]) -> list[UpdateResult]:
    """Return the results of all models on every rank. For each model, the last rank's result is used. Collective over the world.

    ``results``: results of the models that have a shard on this rank; None for other models.
    """
    mine = [asdict(result) for result in results if result is not None]
    by_model = {result["model"]: result for of_rank in all_gather_json(mine) for result in of_rank}
    return [UpdateResult(**result) for result in by_model.values()]


def refuse_not_finite(names: Iterable[str], what: str) -> None:
    """End the run on every rank if ``names`` lists models with a NaN or an infinity. ``what``: message about the skipped action.

    Raises:
        DivergedError: ``names`` is not empty.
    """
    if models := ", ".join(sorted(set(names))):
        raise DivergedError(
            f"the weights or the optimizer's state of {models} are not finite: {what}. The last checkpoint is from before that: "
            "start the run again to go on from it (trainer.max_restarts does so by itself). If it happens again, lower the learning "
            "rate, or look at the data and the rewards of the last steps"
        )


def stop_if_diverged(results: Sequence[UpdateResult], max_bad_updates: int) -> None:
    """End the run on every rank if a model is not finite, or if ``max_bad_updates`` updates in a row were skipped.

    Raises:
        DivergedError: one of the conditions is met; the message names the model.
    """
    spoiled = [result.model for result in results if not result.is_finite]
    refuse_not_finite(spoiled, "this step is neither saved nor sent to the engines")
    for result in results:
        if result.bad_in_a_row >= max_bad_updates:
            raise DivergedError(
                f"the loss or the gradient of the {result.model} was not finite in {result.bad_in_a_row} updates in a row "
                "and none of them was made. Lower the learning rate, or look at the data "
                "and the rewards of the last steps; the last checkpoint is intact"
            )
