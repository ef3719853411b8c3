"""The weights' way from a trained model to the rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_mcore.bridge.transfer import Gatherer
from rlhf_mcore.protocols import RolloutEngine


@dataclass(slots=True)
class GatherBridge:
    """The plain bridge: every rank gathers every full tensor, one at a time, and the engine cuts its part out again."""

    gatherer: Gatherer
    engine: RolloutEngine

    def sync(self, version: int) -> None:
        """Replace all weights of the engine and say which version they are. Collective over the model's ranks."""
        self.engine.load_weights(iter(self.gatherer), version=version)
