"""From a run's configuration to what samples for it: engines, the bridge to them, and the source of its batches."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rlhf_mcore.bridge.files.transfer import Gatherer
from rlhf_mcore.bridge.map.reload import keep_loading_layout
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.run.sync import GatherBridge, PlannedBridge
from rlhf_mcore.cli.run_context import Data, RunContext
from rlhf_mcore.config.schema import Config
from rlhf_mcore.data.sampler import ResumableSampler
from rlhf_mcore.data.source import PromptBatches
from rlhf_mcore.parallel.collectives import all_gather_json, world_group
from rlhf_mcore.platform import DTYPES
from rlhf_mcore.protocols import RewardFunction, WeightBridge, WeightTarget
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.rollout import EngineModel, build_engine
from rlhf_mcore.trainer.ahead import SamplingAhead
from rlhf_mcore.trainer.canary import NUM_TOKENS, TOLERANCE, Canary, canary_prompts
from rlhf_mcore.trainer.dynamic_sampling import DynamicSampling, PlainSampling
from rlhf_mcore.trainer.exchange import RowExchange
from rlhf_mcore.trainer.failures import OnError
from rlhf_mcore.trainer.parts import Publisher, Source
from rlhf_mcore.trainer.reinforcement import AddScores, EnginePublisher, SampledBatches
from rlhf_mcore.trainer.rollouts import RolloutWorker
from rlhf_mcore.types import Prompt, Sampling


@dataclass(frozen=True, slots=True)
class Rewards:
    """Who scores: ``graders`` as responses finish, then a reward model, for all ranks together."""

    graders: RewardFunction
    add_model: AddScores


@dataclass(frozen=True, slots=True)
class Generation:
    """What samples for a run. ``ahead``: what is sampled for coming steps, on the rank that keeps it."""

    source: Source
    publisher: Publisher
    worker: RolloutWorker
    ahead: SamplingAhead | None = None


def build_generation(
    run: RunContext, actor: Actor, rewards: Rewards, sampler: ResumableSampler, data: Data[Prompt]
) -> Generation:
    """Start the engines of a run. Collective over the world."""
    with run.record.phase("start_engine"):
        return _colocated(run, actor, rewards, sampler, data)


def _colocated(
    run: RunContext, actor: Actor, rewards: Rewards, sampler: ResumableSampler, data: Data[Prompt]
) -> Generation:
    """Engines in the trainer's processes, which sample and learn in turns."""
    cfg, record, dynamic = run.cfg, run.record, run.cfg.algorithm.dynamic_sampling
    engine = build_engine(cfg.rollout, EngineModel.of(cfg, run.dtype, hf_shapes(actor.model.spec.geometry)))
    worker = RolloutWorker(engine, engine.rank, data.decode)
    sampling = Sampling(**vars(cfg.rollout.sampling), seed=cfg.seed)
    on_error = OnError.of(cfg.reward)
    source = SampledBatches(
        PromptBatches(data.train, sampler),
        worker,
        sampling,
        rewards.graders,
        DynamicSampling(dynamic.max_batches, drop=on_error.drop) if dynamic.enabled else PlainSampling(),
        RowExchange(sampling.n, on_error=on_error),
        record,
        rewards.add_model,
    )
    canary = _build_canary(run, actor, worker, engine)
    return Generation(source, EnginePublisher(engine, _build_bridge(cfg, actor, engine), record, canary), worker)


def _build_canary(run: RunContext, actor: Actor, worker: RolloutWorker, target: WeightTarget) -> Canary | None:
    cfg, drawn = run.cfg, run.cfg.rollout.sampling
    if not cfg.bridge.canary:
        return None
    length = min(NUM_TOKENS, cfg.data.max_prompt_tokens)
    prompts = canary_prompts(worker.engine.num_engines, length, actor.model.spec.geometry.vocab_size)
    sampling = Sampling(temperature=drawn.temperature, max_new_tokens=min(NUM_TOKENS, drawn.max_new_tokens))
    return Canary(worker, target, actor, prompts, sampling, TOLERANCE[DTYPES[run.dtype]])


def _build_bridge(cfg: Config, actor: Actor, target: WeightTarget) -> WeightBridge:
    gatherer = None
    if cfg.bridge.method == "gather" or cfg.bridge.verify == "full":
        model = actor.model.model
        assert model is not None, "config.validate keeps actor.ranks from these"
        pgs = model.groups.collection
        gatherer = Gatherer(model.local_parameters(), model.spec.geometry, pgs.tp, pgs.pp, pgs.tp_ep)
    if cfg.bridge.method == "gather":
        assert gatherer is not None
        return GatherBridge(gatherer, target)
    if cfg.bridge.live_cpu_weights and cfg.rollout.engine == "vllm":
        keep_loading_layout(target.model)
    return PlannedBridge(
        actor.model.local_parameters(),
        actor.model.spec.geometry,
        target,
        world_group(),
        bucket_bytes=cfg.bridge.bucket_bytes,
        verify=cfg.bridge.verify,
        gatherer=gatherer,
        nodes=nodes(),
    )


def nodes() -> list[int] | None:
    """The machine of every rank, as torchrun has numbered them; None on a single one. Collective over the world."""
    numbers: list[int] = all_gather_json(int(os.environ.get("GROUP_RANK", 0)))
    return numbers if len(set(numbers)) > 1 else None
