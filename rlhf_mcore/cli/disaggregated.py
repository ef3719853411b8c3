"""Build disaggregated engines under Ray, and the sampling side of their run. ``cli/generation.py`` builds colocated engines."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.plan.sent_weights import sent_geometry, sent_quantisation
from rlhf_mcore.bridge.run.endpoints import HostCopies, KeptSources
from rlhf_mcore.bridge.run.remote import BridgeJob, EngineEnd, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import NoTarget
from rlhf_mcore.cli.generation import (
    Generation,
    OnDeviceBridge,
    Rewards,
    SyncSources,
    build_canary,
    build_exchange,
    choose_fill_step,
    engine_adapters,
    select_sent,
    training_sampling,
)
from rlhf_mcore.cli.run_context import Data, RunContext
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.environments.build import EpisodeSpec
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.addresses import LOOPBACK, source_address
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import SyncStats
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.rollout.engine import EngineModel
from rlhf_mcore.rollout.remote.cluster import Cluster
from rlhf_mcore.rollout.remote.control import listening
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.rollout.remote.fleet_state import RESTARTS, FleetPlan
from rlhf_mcore.rollout.remote.host import EngineSpec
from rlhf_mcore.rollout.vllm.tool_calls import ToolCallParser
from rlhf_mcore.trainer.ahead import SamplingAhead, SamplingSchedule
from rlhf_mcore.trainer.pipeline import FirstRank, FleetSampler, PipelinedBatches
from rlhf_mcore.trainer.publishers import RemotePublisher
from rlhf_mcore.trainer.scores import OnError
from rlhf_mcore.types import Prompt


def build_disaggregated(
    run: RunContext,
    actor: Actor,
    rewards: Rewards,
    sampler: Sampler,
    data: Data[Prompt],
    fleet: Fleet | None,
) -> Generation:
    """Build the sampling side of a run with disaggregated engines, which sample while the trainer trains."""
    cfg, rollout = run.cfg, run.cfg.rollout
    in_order, drain, bound = rollout.deterministic_order, rollout.at_publish == "drain", cfg.trainer.max_staleness
    last = cfg.trainer.num_steps
    schedule = SamplingSchedule(cfg.trainer.prompts_per_step, bound, rollout.oversample, in_order, drain, last)
    first = None
    if fleet is not None:
        sampling = training_sampling(cfg)
        ahead = SamplingAhead(data.train, sampler, fleet.begin, sampling, schedule, rewards.begin)
        first = FirstRank(ahead, fleet.needs_weights, fleet.begin, fleet.pop_work, fleet.num_sampled_tokens)
    kind = engine_kind(rollout.engine)
    assert kind.weights != "full", "config.validate keeps others from engines that run apart"
    sent = select_sent(cfg, actor.model)
    copies = _kept_sources(sent) if in_order or cfg.bridge.full_every is not None else None
    remote = RemoteBridge(
        Side(sent.parameters, NoTarget(), sources=sent.sources),
        BridgeJob(
            sent_geometry(cfg, actor.model.spec.geometry),
            cfg.bridge.bucket_bytes,
            verify=cfg.bridge.verify == "digest",
            live_cpu_weights=cfg.bridge.live_cpu_weights and kind.reads("bridge.live_cpu_weights"),
            adapter=sent.adapter,
            full_every=cfg.bridge.full_every,
            transport=cfg.bridge.transport,
            quantisation=sent_quantisation(cfg),
            changing=sent.changing,
            weights=kind.weights,
        ),
        world_group(),
        fleet,
        address=LOOPBACK if rollout.ray.address is None else source_address(rollout.ray.address.rpartition(":")[0]),
        timeout_s=rollout.engine_timeout_s,
        note=run.record.note,
        kept=copies,
    )
    run.stack.callback(remote.leave)
    bridge = OnDeviceBridge(remote, actor.model)

    def sync_again() -> SyncStats:
        with actor.model.on_device():
            return remote.sync_again()

    fleet_sampler = FleetSampler(first, data.decode, sync_again, run.record.beat)
    on_error = OnError.of(cfg.reward)
    exchange = build_exchange(cfg, on_error, actor)
    fill_step = choose_fill_step(cfg, on_error)
    resync = bridge.sync if copies is None else lambda _version: sync_again()
    source = PipelinedBatches(data.train, first, exchange, run.record, resync, rewards.add_model, fill_step)
    canary = build_canary(run, actor, replace(fleet_sampler, single_turn=True), NoTarget())
    publisher = RemotePublisher(bridge, run.record, source.drain if drain else None, canary)
    return Generation(source, publisher, fleet_sampler, None if first is None else first.ahead)


def _kept_sources(sent: SyncSources) -> KeptSources:
    """Return the copies of this rank's sent weights, for engines that restart."""
    return sent.kept or HostCopies({parameter.name: parameter.tensor.view(-1) for parameter in sent.parameters})


def start_fleet(run: RunContext) -> Fleet:
    """Start the engines under Ray, and do not wait for them. Called on the first rank only."""
    spec = load_spec(run.cfg.model.path)
    geometry = sent_geometry(run.cfg, replace(spec.geometry, mtp_layers=getattr(spec.hf_config, MTP_KEY, 0)))
    model = EngineModel.of(run.cfg, run.dtype, hf_shapes(geometry), engine_adapters(run.cfg, geometry))
    cfg, rollout, on_cuda = run.cfg, run.cfg.rollout, run.platform.name == "cuda"
    spare: list[str] = []
    if on_cuda and rollout.ray.address is None:  # ranks use the first devices, engines the others
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        spare = visible.split(",")[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :]
    cluster = Cluster(rollout.ray.address, 1, gpus=int(on_cuda), own_gpus=spare)
    episodes = None
    if cfg.environment.function is not None:
        episodes = EpisodeSpec.of(cfg, rollout.num_engines, ToolCallParser).build
    plan = FleetPlan(
        EngineSpec(
            rollout, model, EngineEnd, episodes, os.getcwd(), cfg.deterministic, cfg.trainer.bind_numa == "auto"
        ),
        rollout.num_engines,
        rollout.layout.num_ranks,
        cfg.trainer.threads_per_rank,
        rollout.engine_timeout_s,
        RESTARTS,
        rollout.deterministic_order,
        rollout.slots,
        sends_rows=episodes is not None,
    )
    fleet = Fleet(cluster, plan, run.record.note)
    count = "an engine" if plan.num_engines == 1 else f"{plan.num_engines} engines"
    of = f" of {plan.engine_ranks} processes" if plan.engine_ranks > 1 else ""
    run.record.note(f"starting {count}{of} {f'at {cluster.address}' if cluster.address else 'on this machine'}")
    fleet.start()
    run.stack.callback(fleet.close)
    if run.record.exporter is not None:
        run.record.exporter.engines = fleet.status
    run.stack.enter_context(listening(fleet, run.directory))
    return fleet
