"""Check that the choice of experts can be replayed, of this model and from these engines."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_mcore.config.engine_kinds import ENGINES, engine_kind
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.geometry import ModelGeometry

# Fields of Megatron that choose experts elsewhere than where they are replayed, or compute passes in another order.
_APART = ("moe_router_fusion", "moe_router_force_load_balancing")


def route_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """List problems with ``actor.router_replay``, which is not off. ``geometry``: of ``model.path``, where it is known."""
    name, engine = f"actor.router_replay={cfg.actor.router_replay}", engine_kind(cfg.rollout.engine)
    if cfg.actor.router_replay not in ("rollout", "old_logprobs"):  # which is another problem
        return
    if not (kind := run_kind(cfg)).generates:
        yield f"{name}: with algorithm.kind={kind.name} no responses are drawn, so there are no routes to replay; set it to off"
        return
    if geometry is not None and geometry.experts is None:
        yield f"{name}: model.path={cfg.model.path} has no experts that tokens are routed to; set it to off"
    if cfg.actor.router_replay == "rollout" and not engine.records_routes:
        others = " or ".join(kind.name for kind in ENGINES.values() if kind.records_routes)
        yield (
            f"{name}: rollout.engine={engine.name} does not record the experts that tokens went to; use {others}, or set it to "
            "old_logprobs or off"
        )
    for field in _APART:
        if (cfg.actor.megatron or {}).get(field):
            yield f"{name} is not supported with actor.megatron.{field}; remove that, or set it to off"
