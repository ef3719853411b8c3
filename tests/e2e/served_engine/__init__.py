"""Declare an engine of another package: a separate server that generates tokens and receives weights through its own call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_mcore.config.engine_kinds import EngineKind

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.rollout.engine import Engine, EngineModel


@dataclass(frozen=True, slots=True)
class _Served(EngineKind):
    def build(self, cfg: RolloutConfig, model: EngineModel) -> Engine:
        from tests.e2e.served_engine.client import ServedEngine

        return ServedEngine(cfg, model)


KIND = _Served("served", runs_apart=False, weights="full")
