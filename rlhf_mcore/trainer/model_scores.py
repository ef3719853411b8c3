"""The reward model's say in an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlhf_mcore.trainer.exchange import Exchange
from rlhf_mcore.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.trainer.parts import ScoreModel


@dataclass(frozen=True, slots=True)
class ModelScores:
    """Adds ``weight`` times the model's score of a response to what rules or a function gave it, as a step of training does."""

    model: ScoreModel
    weight: float
    pad_token_id: int
    prompts_per_batch: int  # of all engines together

    def __call__(
        self, prompts: Sequence[Prompt], samples: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]
    ) -> list[Score]:
        """The scores of this rank's trajectories, in their order. Collective over the world.

        Args:
            prompts: all prompts, the same on every rank.
            samples: responses per prompt.
            trajectories, scores: those that this rank owns, maybe none.
        """
        exchange = Exchange(samples, self.pad_token_id)
        places = {prompt.index: place for place, prompt in enumerate(prompts)}
        found = list(scores)
        for start in range(0, len(prompts), self.prompts_per_batch):
            part = prompts[start : start + self.prompts_per_batch]
            mine = [i for i, t in enumerate(trajectories) if start <= places[t.prompt.index] < start + len(part)]
            positions = [places[trajectories[i].prompt.index] - start for i in mine]
            batch = exchange(part, positions, [trajectories[i] for i in mine], [scores[i] for i in mine]).batch
            added = self.model.compute_scores(batch)
            for i, position in zip(mine, positions, strict=True):
                row = position * samples + trajectories[i].sample
                found[i] = replace(scores[i], value=scores[i].value + self.weight * float(added[row]))
        return found
