"""How much a run has been trained on: steps, prompts, samples and tokens, each counted for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_mcore.types import TrainBatch


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
