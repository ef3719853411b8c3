"""Traffic of a sync, from the plan that the bridge itself would make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhf_mcore.bridge.map.layouts import spread_order, stage_names, trainer_places
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.plan.build import Plan, build_plan
from rlhf_mcore.config.schema import Config
from rlhf_mcore.planning.engine import destinations, engine_numel, whole_model_places
from rlhf_mcore.planning.hardware import Assumptions, Gpu
from rlhf_mcore.planning.roles import Role
from rlhf_mcore.planning.weights import BYTES

DEPTH = 2  # buckets in flight, as bridge/run/execute.py has them


@dataclass(frozen=True, slots=True)
class SyncBytes:
    """A sync's traffic: the busiest rank's, and all ranks' together. ``buffers`` are those of the rank with the largest ones."""

    received: int
    received_total: int
    local_total: int
    imported: int  # of the busiest rank, from other nodes
    buffers: int
    num_buckets: int
    seconds: float


def plan_sync(cfg: Config, actor: Role, world_size: int, gpu: Gpu, assumed: Assumptions) -> SyncBytes:
    """Exact bytes, and the time that they take at the given bandwidths."""
    plan = sync_plan(cfg, actor, world_size, gpu.per_node)
    counted = plan.bytes()
    received = counted.received
    # Where nodes are not told apart, the bridge counts every rank as one.
    imported = counted.imported if world_size > gpu.per_node else np.zeros_like(received)
    link, net = gpu.nvlink_bytes_per_s * assumed.link_efficiency, gpu.network_bytes_per_s * assumed.link_efficiency
    seconds = float(((received - imported) / link + imported / net).max(initial=0.0))
    return SyncBytes(
        int(received.max(initial=0)),
        int(received.sum()),
        int(counted.local.sum()),
        int(imported.max(initial=0)),
        counted.peak(DEPTH),
        plan.num_buckets,
        seconds,
    )


def sync_plan(cfg: Config, actor: Role, world_size: int, ranks_per_node: int) -> Plan:
    """The plan of a sync, without a model and without an engine."""
    geometry, layout = actor.geometry, actor.layout
    sources = trainer_places(stage_names(geometry, layout), geometry, layout)
    tp, shapes = cfg.rollout.layout.tp, hf_shapes(geometry)
    needed = (
        whole_model_places(geometry, world_size)
        if cfg.rollout.engine == "hf"
        else destinations(geometry, tp, world_size // tp)
    )
    return build_plan(
        sources,
        needed,
        element_sizes=dict.fromkeys(shapes, BYTES[actor.dtype]),
        bucket_bytes=cfg.bridge.bucket_bytes,
        order=spread_order(list(shapes), sources, keep_layers=False),
        ranks_per_node=ranks_per_node if world_size > ranks_per_node else None,
    )


def estimate_seconds(actor: Role, tp: int, gpu: Gpu, assumed: Assumptions) -> float:
    """A quick guess for comparing layouts: all of an engine rank's weights come over the slowest link of its replica."""
    layout = actor.layout
    spread = layout.world_size // (layout.dp * layout.cp) > gpu.per_node
    rate = gpu.network_bytes_per_s if spread else gpu.nvlink_bytes_per_s
    return engine_numel(actor.geometry, tp) * BYTES[actor.dtype] / (rate * assumed.link_efficiency)
