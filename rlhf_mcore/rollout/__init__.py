"""Rollout engines, which take requests and return completions. Weights are loaded in a transaction.

Each folder contains an engine; ``remote`` runs engines on other machines. ``KIND`` of a folder declares the features of its engine
(``config/engine_kinds.py``), and no other module names an engine. Start with ``engine``, the base class of all engines.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_mcore.config.engine_kinds import engine_kind

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.rollout.engine import AnyEngine, EngineModel


def build_engine(cfg: RolloutConfig, model: EngineModel) -> AnyEngine:
    """Build the engine that ``cfg.engine`` names (:meth:`EngineKind.build`)."""
    kind = engine_kind(cfg.engine)
    if cfg.max_num_seqs is None:
        from rlhf_mcore.platform import current_platform

        platform = current_platform()
        cfg = cfg.model_copy(
            update={"max_num_seqs": kind.default_sequences(platform.memory_bytes() or 0, platform.device_name())}
        )
    return kind.build(cfg, model)
