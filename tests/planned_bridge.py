"""Build planned bridges from keyword arguments, for tests and benchmarks that build many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rlhf_mcore.bridge.map.trace import EngineMap
from rlhf_mcore.bridge.run.endpoints import Sources
from rlhf_mcore.bridge.run.sync import EngineWeights, PlannedBridge, SentWeights, SyncOptions
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry


def planned_bridge(
    parameters: Sequence[LocalParameter],
    geometry: ModelGeometry,
    target: Any,
    group: dist.ProcessGroup,
    *,
    bucket_bytes: int,
    sources: Sources | None = None,
    adapter: AdapterSizes | None = None,
    quantisation: str | None = None,
    changing: Sequence[str] | None = None,
    traced: EngineMap | None = None,
    poison: bool = False,
    **options: Any,
) -> PlannedBridge:
    """Build a bridge to a vLLM model, which has loaders, or to a plain model. ``options``: fields of ``SyncOptions``."""
    sent = SentWeights(parameters, geometry, sources, adapter, quantisation, changing)
    weights = "loaders" if hasattr(target.model, "load_weights") else "plain"
    engine = EngineWeights(target, weights, traced, poison)  # type: ignore[arg-type]
    return PlannedBridge(sent, engine, group, SyncOptions(bucket_bytes, **options))
