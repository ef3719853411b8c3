"""Servers of vLLM that somebody else runs: tokens in and out over HTTP, weights from a directory. Begin with ``engine``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_mcore.config.engine_kinds import EngineKind

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config, RolloutConfig
    from rlhf_mcore.geometry import ModelGeometry
    from rlhf_mcore.rollout.engine import Engine, EngineModel


@dataclass(frozen=True, slots=True)
class _Server(EngineKind):
    def model_problems(self, cfg: Config, geometry: ModelGeometry) -> Iterator[str]:
        from rlhf_mcore.rollout.server.limits import model_problems

        return model_problems(cfg)

    def build(self, cfg: RolloutConfig, model: EngineModel) -> Engine:
        from rlhf_mcore.rollout.server.engine import ServerEngine

        return ServerEngine(cfg, model)


KIND = _Server(
    "server",
    "vLLM's own servers, which somebody else runs",
    runs_apart=False,
    has_live_weights=False,
    temperatures=(0.01, 2.0),
    own_keys=("rollout.server",),
)
