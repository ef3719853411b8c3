"""Rules for the keys of engines, the bridge, router replay and asynchronous training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from rlhf_mcore.config.engine_kinds import ENGINES, EngineKind, engine_kind, is_engine
from rlhf_mcore.config.errors import FileProblem
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, RolloutConfig
from rlhf_mcore.config.schema.reward import is_address
from rlhf_mcore.config.schema.rollout import MOST_SUPPORT
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.plugins import missing_plugin

if TYPE_CHECKING:
    from rlhf_mcore.config.schema.rollout import BridgeConfig, RolloutLayoutConfig, SamplingConfig


def _support_problems(sampling: SamplingConfig) -> Iterator[str]:
    name = f"rollout.sampling.top_k={sampling.top_k}"
    if sampling.top_k > MOST_SUPPORT:
        yield (
            f"{name}: updates need the candidates of each sampled token, and at most {MOST_SUPPORT} are recorded; set it to "
            f"{MOST_SUPPORT} or less, or to -1"
        )
    if sampling.top_k == 1:
        yield f"{name} always samples the most likely token, so all logprobs are 0; set it to 2 or more, or to -1"


def rollout_problems(cfg: Config) -> Iterator[str]:
    """Check the keys of engines, the bridge and asynchronous training against each other."""
    yield from _support_problems(cfg.rollout.sampling)
    engine = engine_kind(cfg.rollout.engine)
    yield from engine.argument_problems(cfg.rollout)
    takers = [kind.name for kind in ENGINES.values() if cfg.model.attention in kind.attention_kernels]
    if takers and cfg.model.attention not in engine.attention_kernels:
        yield (
            f"model.attention={cfg.model.attention} needs rollout.engine={' or '.join(takers)}, found {engine.name!r}; set it to auto"
        )
    yield from sharding_problems(cfg)
    yield from _seam_problems(cfg, engine)
    least, most = engine.temperatures
    temperatures = {"rollout.sampling": cfg.rollout.sampling.temperature, "evaluate": cfg.evaluate.temperature}
    for group, temperature in temperatures.items():
        if 0 < temperature < least or most < temperature < math.inf:
            yield (
                f"{group}.temperature={temperature:g}: rollout.engine={engine.name} supports {least:g} to {most:g}; "
                "choose a temperature in this range"
            )
    if cfg.rollout.placement == "disaggregated":
        yield from _apart_problems(cfg)
    elif (
        cfg.rollout.placement == "colocated" and cfg.trainer.max_staleness
    ):  # an invalid placement is reported by the schema
        yield (
            f"trainer.max_staleness={cfg.trainer.max_staleness}: colocated engines sleep while the trainer learns; set it to 0, or "
            "set rollout.placement=disaggregated"
        )
    if cfg.rollout.order == "shared_queue" and cfg.deterministic:
        yield (
            "rollout.order=shared_queue: the assignment of responses to engines depends on timing, which deterministic=true forbids; "
            "use longest_first, or set deterministic=false"
        )
    if cfg.rollout.deterministic_order and cfg.rollout.at_publish not in (None, "drain"):
        yield (
            f"rollout.at_publish={cfg.rollout.at_publish}: the tokens that new weights sample depend on timing, which "
            "rollout.deterministic_order forbids; set it to drain, or set rollout.deterministic_order=false"
        )
    if cfg.rollout.deterministic_order and cfg.rollout.oversample != 1:
        yield (
            f"rollout.oversample={cfg.rollout.oversample:g}: the prompts that finish first depend on timing, which "
            "rollout.deterministic_order forbids; set it to 1, or set rollout.deterministic_order=false"
        )


def engine_keys(layout: RolloutLayoutConfig) -> str:
    """Return the keys whose product is the number of an engine's ranks, for messages."""
    return f"rollout.layout.tp{'*pp' * (layout.pp > 1)}{'*dp' * (layout.dp > 1)}"


def sharding_problems(cfg: Config) -> Iterator[str]:
    """Check that the engine supports the layout."""
    engine = engine_kind(cfg.rollout.engine)
    if is_engine(engine.name) and not engine.is_sharded:
        others = " or ".join(kind.name for kind in ENGINES.values() if kind.is_sharded)
        for key, size in vars(cfg.rollout.layout).items():
            if size > 1:
                yield f"rollout.layout.{key}={size}: rollout.engine={engine.name} is not sharded; set it to 1 or use {others}"
    layout = cfg.rollout.layout
    if layout.ep not in (1, size := layout.tp * layout.dp):
        yield (
            f"rollout.layout.ep={layout.ep} is neither 1 nor rollout.layout.tp*dp={layout.tp}*{layout.dp}={size}: the ranks of a "
            f"stage divide the experts, or they split each expert; set it to 1{f' or {size}' * (size > 1)}"
        )


def _seam_problems(cfg: Config, engine: EngineKind) -> Iterator[str]:
    if cfg.rollout.placement == "disaggregated" and not engine.runs_apart:
        yield f"rollout.placement=disaggregated: rollout.engine={engine.name} does not run under Ray; set it to colocated"
    timeout_s, usual_s = cfg.rollout.engine_timeout_s, RolloutConfig().engine_timeout_s
    if timeout_s != usual_s and cfg.rollout.placement == "colocated" and not engine.reads("rollout.server"):
        yield f"rollout.engine_timeout_s={timeout_s:g} has no effect with rollout.placement=colocated; remove it"
    if not engine.has_live_weights and cfg.bridge.method != "gather":
        yield (
            f"bridge.method={cfg.bridge.method}: rollout.engine={engine.name} needs full tensors, because its parameters are in other "
            "processes; set it to gather"
        )


def _transport_problems(bridge: BridgeConfig) -> Iterator[str]:
    """Report a plug-in or package that is not installed."""
    if bridge.transport == "nixl":
        problem = missing_plugin("transports", "nixl", "bridge.transport=nixl")
        if problem is None and find_spec("nixl") is None:
            problem = "bridge.transport=nixl needs the package nixl, which is not installed; pip install nixl, or set it to group"
    elif bridge.full_every is not None:
        problem = missing_plugin("transports", "delta_sync", f"bridge.full_every={bridge.full_every}")
    else:
        problem = None
    if problem is not None:
        yield problem


def _apart_problems(cfg: Config) -> Iterator[str]:
    address = cfg.rollout.ray.address
    if address is not None and not is_address(address):
        yield f"rollout.ray.address={address!r} is not an address; give host:port, as ray start --head prints it, or null"
    if engine_kind(cfg.rollout.engine).runs_apart and cfg.bridge.method != "planned":
        yield (
            "rollout.placement=disaggregated: disaggregated engines do not support "
            f"bridge.method={cfg.bridge.method}; use bridge.method=planned"
        )
    if cfg.bridge.transport == "nixl" and cfg.bridge.full_every is not None:
        yield (
            f"bridge.full_every={cfg.bridge.full_every}: changed elements are sent through the process group, found "
            "bridge.transport=nixl; set that to group, or remove bridge.full_every"
        )
    else:
        yield from map(FileProblem, _transport_problems(cfg.bridge))


# Megatron fields that choose experts outside the replayed router.
_APART = ("moe_router_fusion", "moe_router_force_load_balancing")


def route_problems(cfg: Config, geometry: ModelGeometry | None) -> Iterator[str]:
    """List problems with an ``actor.router_replay`` other than off.

    ``geometry`` describes ``model.path``, or is None if it is not known.
    """
    name, engine = f"actor.router_replay={cfg.actor.router_replay}", engine_kind(cfg.rollout.engine)
    if cfg.actor.router_replay not in ("rollout", "old_logprobs"):  # the schema reports it
        return
    if not (kind := run_kind(cfg)).generates:
        yield f"{name}: with algorithm.kind={kind.name} no responses are sampled, so there are no routes to replay; set it to off"
        return
    if geometry is not None and geometry.experts is None:
        yield f"{name}: model.path={cfg.model.path} has no experts; set it to off"
    if cfg.actor.router_replay == "rollout" and not engine.records_routes:
        others = " or ".join(kind.name for kind in ENGINES.values() if kind.records_routes)
        yield (
            f"{name}: rollout.engine={engine.name} does not record routes; use {others}, or set it to "
            "old_logprobs or off"
        )
    for field in _APART:
        if (cfg.actor.megatron or {}).get(field):
            yield f"{name} is not supported with actor.megatron.{field}; remove that, or set it to off"
