"""The composition root: from a checked configuration to a running job. The one place that picks concrete classes."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.bridge.export import Exporter
from rlhf_mcore.bridge.hf_files import HFReader
from rlhf_mcore.bridge.reload import keep_loading_layout
from rlhf_mcore.bridge.rules import hf_shapes
from rlhf_mcore.bridge.sync import GatherBridge, PlannedBridge
from rlhf_mcore.bridge.transfer import Gatherer, load
from rlhf_mcore.cli.rendezvous import connect
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import to_yaml
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.data.source import load_prompts
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.mcore.families import load_spec
from rlhf_mcore.mcore.groups import ModelGroups, build_groups
from rlhf_mcore.mcore.model import BuildOptions, MegatronModel, build_model, local_parameters
from rlhf_mcore.mcore.optimizer import build_optimizer
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.timers import Timers
from rlhf_mcore.observability.trackers import JsonlTracker, MultiTracker, TensorboardTracker
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.platform import Platform, current_platform
from rlhf_mcore.protocols import RolloutEngine, Tracker, WeightBridge
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.roles.policy import Actor, Policy
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.trainer.canary import NUM_TOKENS, TOLERANCE, CanaryBridge, canary_prompts
from rlhf_mcore.trainer.evaluation import Evaluator, evaluation_sampling, prompts_per_batch
from rlhf_mcore.trainer.exchange import Exchange
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.parts import PromptBatches
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.saving import ModelSaver
from rlhf_mcore.types import Prompt, Sampling

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def run(cfg: Config) -> None:
    """Train. Every rank of the world calls it, under torchrun.

    Raises:
        ConfigError: what could only be found out with the parts in hand; raised on every rank.
    """
    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), cfg.trainer.threads_per_rank)
    connect(platform.collective_backend, COLLECTIVE_TIMEOUT)
    try:
        with ExitStack() as stack:
            record = on_every_rank(lambda: _open_record(cfg, platform, stack))
            _build(cfg, platform, record).run(cfg.trainer.num_steps)
            if record.console is not None:
                _summary(cfg, record)
    finally:
        dist.destroy_process_group()


def _open_record(cfg: Config, platform: Platform, stack: ExitStack) -> RunRecord:
    record = RunRecord(Timers(platform.synchronize), cfg.logging.rollouts_every)
    if dist.get_rank() != 0:
        return record
    directory = stack.enter_context(closing(RunDirectory.create(cfg.output_dir, cfg.project, cfg.experiment)))
    directory.write_config(to_yaml(cfg))
    earlier = directory.set_aside_metrics()
    trackers: list[Tracker] = [JsonlTracker(directory.metrics_path)]
    if cfg.logging.tensorboard:
        trackers.append(TensorboardTracker(directory.tensorboard_path))
    record.directory = directory
    record.tracker = stack.enter_context(closing(MultiTracker(trackers)))
    title = f"{cfg.project} / {cfg.experiment}"
    record.console = stack.enter_context(Console(cfg.logging.console, cfg.trainer.num_steps, title))
    if earlier is not None:
        record.console.note(f"metrics of an earlier run are in {os.path.relpath(earlier)}")
    return record


def _build(cfg: Config, platform: Platform, record: RunRecord) -> Trainer:
    with record.phase("load_data"):
        data = on_every_rank(lambda: _load_data(cfg))
    dtype = platform.default_dtype if cfg.model.dtype == "auto" else cfg.model.dtype
    with record.phase("build_model"):
        models = _build_models(cfg, platform, dtype)
    with record.phase("start_engine"):
        engine = build_engine(
            cfg.rollout,
            model_dir=cfg.model.path,
            tokenizer_dir=cfg.model.tokenizer_path or cfg.model.path,
            dtype=dtype,
            max_model_len=cfg.rollout.max_model_len,
            seed=cfg.seed,
            **({"hf_shapes": hf_shapes(models.actor.model.spec.geometry)} if cfg.rollout.engine == "vllm" else {}),
        )
    record.timers.pop()
    return _trainer(cfg, data, models, engine, record)


@dataclass(slots=True)
class _Data:
    tokenizer: PreTrainedTokenizerBase
    train: list[Prompt]
    evaluation: list[Prompt]


def _load_data(cfg: Config) -> _Data:
    tokenizer = load_tokenizer(cfg.model.tokenizer_path or cfg.model.path)
    train = load_prompts(cfg.data.train, tokenizer, cfg.data)
    if len(train) < cfg.trainer.prompts_per_step:
        raise ConfigError(
            f"data.train has {len(train)} prompts, fewer than trainer.prompts_per_step={cfg.trainer.prompts_per_step}: "
            "a step would hold a prompt twice. Lower it, or add data."
        )
    evaluation = load_prompts(cfg.data.eval, tokenizer, cfg.data, field="data.eval") if cfg.data.eval else []
    return _Data(tokenizer, train, evaluation[: cfg.evaluate.max_prompts])


@dataclass(slots=True)
class _Models:
    groups: ModelGroups
    actor: Actor
    gatherer: Gatherer
    reference: Policy | None


def _build_models(cfg: Config, platform: Platform, dtype: str) -> _Models:
    cut = cfg.actor.layout
    layout = ParallelLayout(
        dist.get_world_size(),
        cut.tp,
        cut.pp,
        cut.vpp,
        sequence_parallel=cut.sequence_parallel,
        ep=cut.ep,
        etp=cut.etp,
        layers_per_stage=None if cut.layers_per_stage is None else tuple(cut.layers_per_stage),
    )
    groups = build_groups(layout)
    temperature = cfg.rollout.sampling.temperature
    model = _load_model(cfg, platform, groups, dtype, cfg.model.path, trainable=True)
    optimizer = build_optimizer(model, cfg.actor.optimizer)
    actor = Actor(model, cfg.trainer, temperature, optimizer, cfg.actor.optimizer, cfg.algorithm)
    pgs = groups.collection
    gatherer = Gatherer(local_parameters(model), model.spec.geometry, pgs.tp, pgs.pp, pgs.tp_ep)
    reference = None
    if cfg.algorithm.kl.coef:
        path = cfg.reference.path or cfg.model.path
        frozen = _load_model(cfg, platform, groups, dtype, path, trainable=False)
        reference = Policy(frozen, cfg.trainer, temperature)
    return _Models(groups, actor, gatherer, reference)


def _load_model(
    cfg: Config, platform: Platform, groups: ModelGroups, dtype: str, path: str, *, trainable: bool
) -> MegatronModel:
    spec = load_spec(path)
    options = BuildOptions(
        dtype=dtype,
        layer_spec=cfg.model.layer_spec,
        recompute=cfg.actor.recompute,
        trainable=trainable,
        deterministic=cfg.deterministic,
        seed=cfg.seed,
        aux_loss_coef=cfg.actor.moe.aux_loss_coef,
    )
    model = build_model(spec, groups, platform, options)
    on_every_rank(lambda: load(local_parameters(model), spec.geometry, HFReader(path)))
    return model


def _bridge(cfg: Config, models: _Models, engine: RolloutEngine) -> WeightBridge:
    bridge = _plain_bridge(cfg, models, engine)
    if not cfg.bridge.canary:
        return bridge
    dp, model, drawn = models.groups.collection.dp, models.actor.model, cfg.rollout.sampling
    count = math.lcm(engine.num_engines, dp.size())
    prompts = canary_prompts(count, min(NUM_TOKENS, cfg.data.max_prompt_tokens), model.spec.geometry.vocab_size)
    sampling = Sampling(temperature=drawn.temperature, max_new_tokens=min(NUM_TOKENS, drawn.max_new_tokens))
    return CanaryBridge(bridge, engine, models.actor, dp, prompts, sampling, TOLERANCE[model.config.params_dtype])


def _plain_bridge(cfg: Config, models: _Models, engine: RolloutEngine) -> WeightBridge:
    if cfg.bridge.method == "gather":
        return GatherBridge(models.gatherer, engine)
    if cfg.bridge.live_cpu_weights and cfg.rollout.engine == "vllm":
        keep_loading_layout(engine.model)
    model = models.actor.model
    return PlannedBridge(
        local_parameters(model),
        model.spec.geometry,
        engine,
        bucket_bytes=cfg.bridge.bucket_bytes,
        verify=cfg.bridge.verify,
        gatherer=models.gatherer,
    )


def _trainer(cfg: Config, data: _Data, models: _Models, engine: RolloutEngine, record: RunRecord) -> Trainer:
    reward = build_reward(cfg.reward)
    pgs = models.groups.collection
    sampling = Sampling(**vars(cfg.rollout.sampling), seed=cfg.seed)
    sampler = PromptSampler(len(data.train), cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle)
    exchange = Exchange(
        dp_rank=pgs.dp.rank(),
        dp_size=pgs.dp.size(),
        samples_per_prompt=sampling.n,
        prompts_per_minibatch=cfg.trainer.minibatch_size or cfg.trainer.prompts_per_step,
        pad_token_id=int(data.tokenizer.pad_token_id),
    )
    run_directory = Path(cfg.output_dir) / cfg.project / cfg.experiment
    exporter = Exporter(
        local_parameters(models.actor.model),
        models.actor.model.spec.geometry,
        [cfg.model.path, cfg.model.tokenizer_path or cfg.model.path],
        bucket_bytes=cfg.bridge.bucket_bytes,
    )
    return Trainer(
        prompt_source=PromptBatches(data.train, sampler),
        engine=engine,
        sampling=sampling,
        reward=reward,
        exchange=exchange,
        actor=models.actor,
        reference=models.reference,
        algorithm=cfg.algorithm,
        dp_group=pgs.dp,
        bridge=_bridge(cfg, models, engine),
        evaluator=Evaluator(
            data.evaluation, engine, reward, evaluation_sampling(cfg), cfg.evaluate.every, prompts_per_batch(cfg)
        ),
        checkpointer=ModelSaver(exporter.save, run_directory, cfg.checkpoint.save_steps, cfg.trainer.num_steps),
        recorder=record,
    )


def _summary(cfg: Config, record: RunRecord) -> None:
    """The table a run ends with: before and after, where everything is, and what to try next."""
    assert record.console is not None and record.directory is not None
    rows: list[tuple[str, ...]] = []
    if record.rewards:
        few = max(len(record.rewards) // 10, 1)
        first, last = sum(record.rewards[:few]) / few, sum(record.rewards[-few:]) / few
        rows.append((f"training reward (mean of {few} steps)", f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"))
    if len(record.evaluations) > 1:
        before, after = record.evaluations[min(record.evaluations)], record.evaluations[max(record.evaluations)]
        for name, label in (("evaluate/accuracy", "held-out accuracy"), ("evaluate/reward", "held-out reward")):
            rows.append((label, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{after[name] - before[name]:+.3f}"))
    directory = os.path.relpath(record.directory.path)
    footer = [
        f"run directory   {directory}",
        f"trained model   {directory}/latest/actor  (a Hugging Face directory)",
        f"curves          tensorboard --logdir {directory}",
    ]
    record.console.summary("result", rows, ("", "before", "after", "change"), footer)
