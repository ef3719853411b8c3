"""Rules for the keys of engines, the bridge, router replay and asynchronous training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec

from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.engine_kinds import ENGINES, EngineKind, engine_kind, is_engine
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.schema import BridgeConfig, Config, RolloutLayoutConfig
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.plugins import missing_plugin


def rollout_problems(cfg: Config) -> Iterator[str]:
    """Check the keys of engines, the bridge and asynchronous training against each other."""
    rollout, engine = cfg.rollout, engine_kind(cfg.rollout.engine)
    if rollout.sampling.top_k == 1:
        yield "rollout.sampling.top_k=1 always samples the most likely token, so all logprobs are 0; set it to 2 or more, or to -1"
    yield from engine.argument_problems(rollout)
    takers = [kind.name for kind in ENGINES.values() if (kernel := cfg.model.attention) in kind.attention_kernels]
    if takers and engine.name not in takers:
        yield f"model.attention={kernel} needs rollout.engine={' or '.join(takers)}, found {engine.name!r}; set it to auto"
    yield from sharding_problems(cfg)
    yield from _seam_problems(cfg, engine)
    least, most = engine.temperatures
    temperatures = {"rollout.sampling": rollout.sampling.temperature, "evaluate": cfg.evaluate.temperature}
    for group, value in temperatures.items():
        if 0 < value < least or most < value < math.inf:
            allowed = f"rollout.engine={engine.name} supports {least:g} to {most:g}"
            yield f"{group}.temperature={value:g}: {allowed}; choose a temperature in this range"
    if rollout.placement == "disaggregated":
        yield from _apart_problems(cfg)
    elif staleness := cfg.trainer.max_staleness:
        yield (
            f"trainer.max_staleness={staleness}: colocated engines sleep while the trainer learns; set it to 0, or set "
            "rollout.placement=disaggregated"
        )
    if rollout.order == "shared_queue" and cfg.deterministic:
        yield "rollout.order=shared_queue depends on timing, which deterministic=true forbids; use longest_first"
    forbidden = "depends on timing, which rollout.deterministic_order forbids"
    if rollout.deterministic_order and rollout.at_publish not in (None, "drain"):
        yield f"rollout.at_publish={rollout.at_publish} {forbidden}; set it to drain, or rollout.deterministic_order=false"
    if rollout.deterministic_order and rollout.oversample != 1:
        yield f"rollout.oversample={rollout.oversample:g} {forbidden}; set it to 1, or rollout.deterministic_order=false"
    if rollout.deterministic_order and (seconds := cfg.environment.max_seconds) is not None:
        yield f"environment.max_seconds={seconds:g} {forbidden}; remove it, or set rollout.deterministic_order=false"


def engine_keys(layout: RolloutLayoutConfig) -> str:
    """Return the keys whose product is the number of an engine's ranks, for messages."""
    return f"rollout.layout.tp{'*pp' * (layout.pp > 1)}{'*dp' * (layout.dp > 1)}"


def sharding_problems(cfg: Config) -> Iterator[str]:
    """Check that the engine supports the layout."""
    engine, layout = engine_kind(cfg.rollout.engine), cfg.rollout.layout
    if is_engine(engine.name) and not engine.is_sharded:
        others = " or ".join(kind.name for kind in ENGINES.values() if kind.is_sharded)
        for key, size in layout:
            if size > 1:
                yield f"rollout.layout.{key}={size}: rollout.engine={engine.name} is not sharded; set it to 1 or use {others}"
    if layout.ep not in (1, size := layout.tp * layout.dp):
        wanted = f"neither 1 nor rollout.layout.tp*dp={layout.tp}*{layout.dp}={size}"
        yield f"rollout.layout.ep={layout.ep} is {wanted}; set it to 1{f' or {size}' * (size > 1)}"


def _seam_problems(cfg: Config, engine: EngineKind) -> Iterator[str]:
    placement, name = cfg.rollout.placement, f"rollout.engine={engine.name}"
    if placement == "disaggregated" and not engine.runs_apart:
        yield f"rollout.placement=disaggregated: {name} does not run under Ray; set it to colocated"
    if not engine.has_live_weights and (method := cfg.bridge.method) != "gather":
        yield f"bridge.method={method}: {name} needs full tensors, because its parameters are in other processes; set it to gather"


def _transport_problems(bridge: BridgeConfig) -> Iterator[str]:
    """Report a plug-in or package that is not installed."""
    problem = None
    if bridge.transport == "nixl":
        problem = missing_plugin("transports", "nixl", "bridge.transport=nixl")
        if problem is None and find_spec("nixl") is None:
            problem = "bridge.transport=nixl needs the package nixl, which is not installed; pip install nixl, or set it to group"
    elif bridge.full_every is not None:
        problem = missing_plugin("transports", "delta_sync", f"bridge.full_every={bridge.full_every}")
    if problem is not None:
        yield problem


def _apart_problems(cfg: Config) -> Iterator[str]:
    bridge = cfg.bridge
    if engine_kind(cfg.rollout.engine).runs_apart and bridge.method != "planned":
        apart = "rollout.placement=disaggregated: disaggregated engines"
        yield f"{apart} do not support bridge.method={bridge.method}; use bridge.method=planned"
    if bridge.transport == "nixl" and bridge.full_every is not None:
        yield (
            f"bridge.full_every={bridge.full_every}: changed elements are sent through the process group, found "
            "bridge.transport=nixl; set that to group, or remove bridge.full_every"
        )
    else:
        yield from map(FileProblem, _transport_problems(bridge))


# Megatron fields that choose experts outside the replayed router.
_ROUTERS = ("moe_router_fusion", "moe_router_force_load_balancing")


def route_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """List problems with ``actor.router_replay``.

    ``geometry`` describes ``model.path``, or is None if it is not known.
    """
    name, engine = f"actor.router_replay={cfg.actor.router_replay}", engine_kind(cfg.rollout.engine)
    if cfg.actor.router_replay == "off":
        return
    if not (kind := run_kind(cfg)).generates:
        yield f"{name}: with algorithm.kind={kind.name} no responses are sampled, so there are no routes; set it to off"
        return
    if geometry is not None and geometry.experts is None:
        yield f"{name}: model.path={cfg.model.path} has no experts; set it to off"
    if cfg.actor.router_replay == "rollout" and not engine.records_routes:
        others = " or ".join(kind.name for kind in ENGINES.values() if kind.records_routes)
        yield f"{name}: rollout.engine={engine.name} does not record routes; use {others}, or set it to old_logprobs or off"
    for field in _ROUTERS:
        if (cfg.actor.megatron or {}).get(field):
            yield f"{name} is not supported with actor.megatron.{field}; remove that, or set it to off"
