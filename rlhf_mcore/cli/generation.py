"""Build the sampling side of a run from its configuration: engines, the bridge to them, and the source of batches.

Colocated engines are in the trainer's processes. Disaggregated engines are in other processes, which Ray starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.gather import GatherBridge, Gatherer
from rlhf_mcore.bridge.map.engine import keep_loading_layout, map_engine
from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes, part_of
from rlhf_mcore.bridge.map.trace import EngineMap
from rlhf_mcore.bridge.plan.sent_weights import sends_adapters, sent_geometry, sent_quantisation
from rlhf_mcore.bridge.run.endpoints import HostCopies, KeptSources
from rlhf_mcore.bridge.run.merged import MergedSources, SeparateAdapterSources, adapted_weights
from rlhf_mcore.bridge.run.remote import BridgeJob, EngineEnd, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import EngineWeights, NoTarget, PlannedBridge, SentWeights, SyncOptions
from rlhf_mcore.cli.run_context import Data, RunContext
from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.config.questions import adapter_sizes, draws_greedy
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.rollout import truncates
from rlhf_mcore.coroutines import Background
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.data.source import PromptBatches
from rlhf_mcore.environments.build import EpisodeSpec
from rlhf_mcore.families.mtp import MTP_KEY
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.addresses import LOOPBACK, source_address
from rlhf_mcore.parallel.collectives import SharedProgress, StoreClaims, all_gather_json, on_every_rank, world_group
from rlhf_mcore.platform import DTYPES
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.protocols import (
    Publisher,
    ResponseSampler,
    RewardFunction,
    Source,
    SyncStats,
    WeightBridge,
    WeightTarget,
)
from rlhf_mcore.residency.sharing import DeviceSharing, storage_bytes
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.trained_model import TrainedModel
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.rollout.engine import AnyEngine, EngineModel, LiveEngine
from rlhf_mcore.rollout.remote.cluster import Cluster
from rlhf_mcore.rollout.remote.control import listening
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.rollout.remote.fleet_state import RESTARTS, FleetPlan
from rlhf_mcore.rollout.remote.host import EngineSpec
from rlhf_mcore.rollout.vllm.tool_calls import ToolCallParser
from rlhf_mcore.sampling.rollouts import RolloutSetup
from rlhf_mcore.trainer.ahead import SamplingAhead, SamplingSchedule
from rlhf_mcore.trainer.batches import AddScores, BatchSampler, ColocatedBatches, FillStep, take_next_batch
from rlhf_mcore.trainer.dealing import SHARED_QUEUE, Dealer, ExpectedLengths
from rlhf_mcore.trainer.dynamic_sampling import DynamicSampling
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.pipeline import FirstRank, FleetSampler, PipelinedBatches
from rlhf_mcore.trainer.publishers import (
    MAX_NEW_TOKENS,
    NUM_TOKENS,
    OF_8_BITS,
    TOLERANCE,
    Canary,
    EnginePublisher,
    RemotePublisher,
    canary_prompts,
)
from rlhf_mcore.trainer.scores import OnError
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory


@dataclass(frozen=True, slots=True)
class Rewards:
    """The scorers of a run: ``graders`` score each finished response, then ``add_model`` scores the batches of all ranks."""

    graders: RewardFunction
    add_model: AddScores
    thread: Background

    def begin(self, trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
        """Let the graders score in their thread."""
        return self.thread.start(self.graders.score(trajectories))


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampling side of a run. ``ahead``: the samples for later steps, on the rank that stores them.

    While ``room`` is entered (collectively), the engines are not on the trainer's devices.
    """

    source: Source
    publisher: Publisher
    sampler: ResponseSampler
    ahead: SamplingAhead | None = None
    lengths: ExpectedLengths | None = None  # state of a dealer, which a checkpoint stores
    room: Callable[[], AbstractContextManager[None]] = nullcontext
    kernels: Mapping[str, str] = field(default_factory=dict)  # kernels of this rank's engine, by part


def build_colocated(
    run: RunContext, actor: Actor, rewards: Rewards, sampler: Sampler, data: Data[Prompt]
) -> Generation:
    """Build engines in the trainer's processes, which alternate between sampling and training."""
    cfg, record = run.cfg, run.record
    sharing = record.memory or DeviceSharing(run.platform)
    sharing.settle()
    record.progress(f"{cfg.rollout.engine}: libraries, model and cache")
    geometry = sent_geometry(cfg, actor.model.spec.geometry)
    sent_shapes, adapters = hf_shapes(geometry), _engine_adapters(cfg, geometry)
    engine = build_engine(cfg.rollout, EngineModel.of(cfg, run.dtype, sent_shapes, adapters))
    for text in dict.fromkeys(text for texts in all_gather_json(engine.warnings) for text in texts):
        record.note(f"{cfg.rollout.engine}: {text}")
    record.progress("the weight bridge")
    run.stack.enter_context(_close_at_end(engine))
    sharing.sleep_level = cfg.rollout.sleep_level
    if engine_kind(cfg.rollout.engine).has_live_weights:
        sharing.engine_bytes = storage_bytes(_live(cfg, engine).model.parameters())
    batch_sampler = BatchSampler(engine, engine.rank, data.decode, ranks=engine.ranks)
    canary = _build_canary(run, actor, batch_sampler, engine)
    if cfg.environment.function is not None:
        spec = EpisodeSpec.of(cfg, engine.rank.num_engines, ToolCallParser)
        setup = on_every_rank(lambda: spec.build() if engine.rank.is_lead else RolloutSetup())
        batch_sampler = replace(batch_sampler, setup=setup)
    claims = StoreClaims() if cfg.rollout.order == SHARED_QUEUE else None
    progress = SharedProgress(cfg.trainer.collective_timeout_s, record.beat)
    engine.on_progress = progress.note
    dealer = Dealer(cfg.rollout.order, cfg.rollout.slots, claims=claims)
    batch_sampler = replace(batch_sampler, wait=progress.wait, dealer=dealer)
    sampling = _training_sampling(cfg)
    on_error = OnError.of(cfg.reward)
    source = ColocatedBatches(
        PromptBatches(data.train, sampler),
        batch_sampler,
        sampling,
        rewards.begin,
        _choose_fill_step(cfg, on_error),
        _build_exchange(cfg, on_error, actor),
        record,
        rewards.add_model,
        engine.pop_preemptions if engine_kind(cfg.rollout.engine).reserves_cache else None,
    )
    # Trace the engine while it still has its first weights, because a sleep may discard them.
    traced = _trace(cfg, sent_shapes, adapters, engine)
    if sharing.parts:
        sharing.sleep(engine)  # it starts awake, and its cache takes the memory that the models left
    with actor.model.on_device():  # a bridge makes views of the tensors on the device
        bridge = OnDeviceBridge(_build_bridge(cfg, actor, engine, traced), actor.model)
    publisher = EnginePublisher(engine, bridge, record, sharing, canary)
    return Generation(source, publisher, batch_sampler, None, dealer.lengths, publisher.asleep, engine.kernels())


@contextmanager
def _close_at_end(engine: AnyEngine) -> Iterator[None]:
    """Close the engine at the end of the block.

    After an error, the engine is closed only in a world of one process, which may start another run. In a larger world
    closing is collective and could wait forever for a failed rank.
    """
    try:
        yield
    except BaseException:
        if dist.get_world_size() == 1:
            with suppress(Exception):
                engine.close()
        raise
    engine.close()


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
        sampling = _training_sampling(cfg)
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
    exchange = _build_exchange(cfg, on_error, actor)
    fill_step = _choose_fill_step(cfg, on_error)
    resync = bridge.sync if copies is None else lambda _version: sync_again()
    source = PipelinedBatches(data.train, first, exchange, run.record, resync, rewards.add_model, fill_step)
    canary = _build_canary(run, actor, replace(fleet_sampler, single_turn=True), NoTarget())
    publisher = RemotePublisher(bridge, run.record, source.drain if drain else None, canary)
    return Generation(source, publisher, fleet_sampler, None if first is None else first.ahead)


def start_fleet(run: RunContext) -> Fleet:
    """Start the engines under Ray, and do not wait for them. Called on the first rank only."""
    spec = load_spec(run.cfg.model.path)
    geometry = sent_geometry(run.cfg, replace(spec.geometry, mtp_layers=getattr(spec.hf_config, MTP_KEY, 0)))
    model = EngineModel.of(run.cfg, run.dtype, hf_shapes(geometry), _engine_adapters(run.cfg, geometry))
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


def _build_exchange(cfg: Config, on_error: OnError, actor: Actor) -> RowExchange:
    asynchronous, parts = cfg.trainer.max_staleness > 0, tuple(cfg.algorithm.reward_weights or ())
    owners = actor.model.choose_owners
    return RowExchange(cfg.rollout.sampling.n, asynchronous, on_error, parts, draws_greedy(cfg), owners)


def _training_sampling(cfg: Config) -> Sampling:
    sampling = cfg.rollout.sampling
    return Sampling(
        **vars(sampling),
        seed=cfg.seed,
        records_support=truncates(sampling),
        records_routes=cfg.actor.router_replay == "rollout",
        records_drafts=engine_kind(cfg.rollout.engine).reads("rollout.speculative")
        and cfg.rollout.speculative.method != "off",
        baseline=draws_greedy(cfg),
    )


def _choose_fill_step(cfg: Config, on_error: OnError) -> FillStep:
    dynamic = cfg.algorithm.dynamic_sampling
    if not dynamic.enabled:
        return take_next_batch
    return DynamicSampling(dynamic.max_batches, drop=on_error.drop).fill_step


def _build_canary(run: RunContext, actor: Actor, sampler: ResponseSampler, target: WeightTarget) -> Canary | None:
    cfg, drawn = run.cfg, run.cfg.rollout.sampling
    if not cfg.bridge.canary:
        return None
    length = min(NUM_TOKENS, cfg.data.max_prompt_tokens)
    prompts = canary_prompts(sampler.rank.num_engines, length, actor.model.spec.geometry.vocab_size)
    sampling = Sampling(temperature=drawn.temperature, max_new_tokens=min(MAX_NEW_TOKENS, drawn.max_new_tokens))
    tolerance = TOLERANCE[DTYPES[run.dtype]] if cfg.rollout.quantization is None else OF_8_BITS
    return Canary(sampler, target, actor, prompts, sampling, tolerance)


def _live(cfg: Config, engine: AnyEngine) -> LiveEngine:
    assert engine_kind(cfg.rollout.engine).has_live_weights, "config.validate keeps others from what writes them"
    return cast("LiveEngine", engine)


def _trace(cfg: Config, shapes: Shapes, adapters: Shapes | None, engine: AnyEngine) -> EngineMap | None:
    """Map the weights of an engine for the planned bridge; None if no planned bridge is used."""
    kind = engine_kind(cfg.rollout.engine)
    if cfg.bridge.method == "gather" or kind.weights == "full":
        return None
    model = _live(cfg, engine).model
    if cfg.bridge.live_cpu_weights and kind.reads("bridge.live_cpu_weights"):
        keep_loading_layout(model)
    has_adapters, quantisation = adapters is not None, cfg.rollout.quantization
    return map_engine(
        model, {**shapes, **(adapters or {})}, kind.weights, has_adapters=has_adapters, quantisation=quantisation
    )


def _build_bridge(cfg: Config, actor: Actor, engine: AnyEngine, traced: EngineMap | None) -> WeightBridge:
    geometry = sent_geometry(cfg, actor.model.spec.geometry)
    if cfg.bridge.method == "gather":
        model = actor.model.model
        assert model is not None, "config.validate keeps actor.ranks from these"
        pgs = model.groups.collection
        parameters = part_of(actor.model.local_parameters(), actor.model.spec.geometry, geometry)
        return GatherBridge(Gatherer(parameters, geometry, pgs.tp, pgs.pp, pgs.tp_ep), engine)
    sent = select_sent(cfg, actor.model)
    quantisation = sent_quantisation(cfg)
    weights = SentWeights(sent.parameters, geometry, sent.sources, sent.adapter, quantisation, sent.changing)
    options = SyncOptions(cfg.bridge.bucket_bytes, verify=cfg.bridge.verify == "digest", nodes=find_machines())
    return PlannedBridge(weights, EngineWeights(_live(cfg, engine), traced=traced), world_group(), options)


@dataclass(frozen=True, slots=True)
class OnDeviceBridge:
    """Keep ``model`` on the device while a bridge reads its weights."""

    bridge: WeightBridge
    model: RoleModel

    def sync(self, version: int) -> SyncStats:
        with self.model.on_device():
            return self.bridge.sync(version)


def find_machines() -> list[int] | None:
    """Return the machine number of every rank, as torchrun assigns them; None on one machine. Collective over the world."""
    numbers: list[int] = all_gather_json(int(os.environ.get("GROUP_RANK", 0)))
    return numbers if len(set(numbers)) > 1 else None


@dataclass(frozen=True, slots=True)
class SyncSources:
    """The tensors that a rank sends, see :class:`PlannedBridge`. ``kept`` keeps the values of the last sync.

    Without ``sources`` the parameters are sent unchanged. ``changing``: names of the tensors that training changes; None: all.
    """

    parameters: Sequence[LocalParameter]
    sources: MergedSources | SeparateAdapterSources | None = None
    kept: MergedSources | SeparateAdapterSources | None = None
    adapter: AdapterSizes | None = None
    changing: tuple[str, ...] | None = None


def _engine_adapters(cfg: Config, geometry: ModelGeometry) -> Shapes | None:
    """Return the names and shapes of the adapters that engines add themselves; None if engines receive merged weights."""
    if not sends_adapters(cfg, geometry):
        return None
    return hf_shapes(replace(geometry.trunk, adapter=adapter_sizes(cfg.actor.lora)))


def select_sent(cfg: Config, model: TrainedModel) -> SyncSources:
    """Choose the tensors to send to engines (``actor.lora.sync``): merged weights, or weights once and then adapters."""
    geometry, whole = model.adapter_geometry, model.spec.geometry
    if geometry is None:
        sent = sent_geometry(cfg, whole)
        names = None if model.trained is None else tuple(name for name in model.trained if name in hf_shapes(sent))
        return SyncSources(part_of(model.local_parameters(), whole, sent), changing=names)
    weights, adapters = part_of(model.local_parameters(), whole, whole.trunk), model.adapter_parameters()
    if sends_adapters(cfg, whole):
        aside, kept_aside = (SeparateAdapterSources(weights, adapters, geometry, keep=keep) for keep in (False, True))
        return SyncSources([*weights, *adapters], aside, kept_aside, model.adapter, tuple(hf_shapes(geometry)))
    gains = _gains_of(model) if geometry.adapter is not None and geometry.adapter.use_dora else None
    merged, kept = (MergedSources(weights, adapters, geometry, keep=keep, gains=gains) for keep in (False, True))
    return SyncSources(weights, merged, kept, None, tuple(adapted_weights(geometry)))


def _kept_sources(sent: SyncSources) -> KeptSources:
    """Return the copies of this rank's sent weights, for engines that restart."""
    return sent.kept or HostCopies({parameter.name: parameter.tensor.view(-1) for parameter in sent.parameters})


def _gains_of(model: RoleModel) -> Callable[[], Mapping[str, Tensor]]:
    """Return a function that computes the DoRA gains: the factors for the rows of this rank's weights."""
    compute_gains = load_plugin("adapters", "dora", "actor.lora.use_dora=true").compute_gains
    return partial(compute_gains, [] if model.model is None else model.model.chunks)
