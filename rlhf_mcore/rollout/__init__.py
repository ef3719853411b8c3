"""Requests enter, completions leave; weights enter by a transaction. Engines, a folder each, and their other machines in ``remote``.

The ``KIND`` of a folder declares what its engine can do (``config/engine_kinds.py``); nothing else names an engine. Begin with
``engine``, which all of them are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_mcore.config.engine_kinds import engine_kind

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.rollout.engine import Engine, EngineModel


def build_engine(cfg: RolloutConfig, model: EngineModel) -> Engine:
    """Build the engine that ``cfg.engine`` names: see :meth:`EngineKind.build`."""
    kind = engine_kind(cfg.engine)
    if cfg.max_num_seqs is None:
        from rlhf_mcore.platform import current_platform

        platform = current_platform()
        cfg = cfg.model_copy(
            update={"max_num_seqs": kind.default_sequences(platform.memory_bytes() or 0, platform.device_name())}
        )
    return kind.build(cfg, model)
