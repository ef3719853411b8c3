"""The composition root: from a checked configuration to a running job. The one place that picks concrete classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.bridge.files.transfer import Gatherer
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.bridge.run.reload import keep_loading_layout
from rlhf_mcore.bridge.run.sync import GatherBridge, PlannedBridge
from rlhf_mcore.checkpoint.layout import BEST, LATEST
from rlhf_mcore.checkpoint.permissions import Permissions
from rlhf_mcore.checkpoint.registry import Stateful
from rlhf_mcore.checkpoint.rng import seed_process
from rlhf_mcore.checkpoint.signals import SignalRequests
from rlhf_mcore.cli import supervised
from rlhf_mcore.cli.beginning import SAVED_AS, continues_text, finished_text, is_over
from rlhf_mcore.cli.rank_reports import Reporter
from rlhf_mcore.cli.rendezvous import connect
from rlhf_mcore.cli.roles import BuiltRoles, build_roles
from rlhf_mcore.cli.saved_checkpoint import check_saved
from rlhf_mcore.cli.saving import build_saving, saved_roles
from rlhf_mcore.config.derive import is_supervised
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.show import to_yaml, without_secrets
from rlhf_mcore.data.rendering import shown
from rlhf_mcore.data.sampler import PromptSampler, Sampler, WeightedSampler
from rlhf_mcore.data.source import load_prompts
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.mcore.families import DTYPES
from rlhf_mcore.observability.console import Console
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.timers import Timers
from rlhf_mcore.observability.trackers import JsonlTracker, MultiTracker, TensorboardTracker
from rlhf_mcore.observability.watchdog import Watchdog
from rlhf_mcore.parallel.collectives import all_gather_json, broadcast_json, on_every_rank
from rlhf_mcore.platform import Platform, current_platform
from rlhf_mcore.protocols import RewardFunction, RolloutEngine, Tracker, WeightBridge
from rlhf_mcore.rewards.reward import build_reward, check_sources
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.rollout import build_engine
from rlhf_mcore.trainer.advantages import Estimation
from rlhf_mcore.trainer.canary import NUM_TOKENS, TOLERANCE, CanaryBridge, canary_prompts
from rlhf_mcore.trainer.counters import Counters
from rlhf_mcore.trainer.dynamic_sampling import DynamicSampling, OneBatch
from rlhf_mcore.trainer.evaluation import Evaluator, evaluation_sampling, prompts_per_batch
from rlhf_mcore.trainer.exchange import Exchange
from rlhf_mcore.trainer.inputs import fingerprints
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.model_reward import ModelReward
from rlhf_mcore.trainer.parts import PromptBatches, Roles
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.reinforcement import EnginePublisher, PolicyLearner, SampledBatches
from rlhf_mcore.trainer.resume import Start, find_start
from rlhf_mcore.types import Prompt, Sampling

SUMMARISED = {
    "evaluate/accuracy": "held-out accuracy",
    "evaluate/reward": "held-out reward",
    "evaluate/margin": "held-out margin",
    "evaluate/perplexity": "held-out perplexity",
}


def run(cfg: Config, announced: int = 0) -> bool:
    """Train. Every rank of the world calls it, under torchrun. Returns whether the run has come to its end.

    ``announced``: the launcher has said that the run continues after this step.

    Raises:
        ConfigError: what could only be found out with the parts in hand; raised on every rank.
    """
    platform = current_platform()
    platform.setup_process(int(os.environ["LOCAL_RANK"]), cfg.trainer.threads_per_rank)
    connect(platform.collective_backend, timedelta(seconds=cfg.trainer.collective_timeout_s))
    seed_process(cfg.seed, dist.get_rank())
    try:
        with ExitStack() as stack:
            reporter = Reporter()
            watchdog = Watchdog(cfg.trainer.watchdog_s, watcher=reporter if reporter.is_heard else None)
            stack.enter_context(watchdog)
            record = RunRecord(Timers(platform.synchronize), cfg.logging.rollouts_every, watchdog=watchdog)
            requests = stack.enter_context(SignalRequests(record.acknowledge, reporter.training).listening())
            start = _tell(on_every_rank(lambda: _open_record(cfg, record, stack, announced)))
            if start.is_over:
                assert start.checkpoint is not None
                record.note(finished_text(cfg, start.checkpoint, start.step))
                return True
            trainer = _build(cfg, platform, record, start, requests)
            finished = trainer.run(cfg.trainer.num_steps, start.step + 1)
            if record.console is not None and finished:
                _summary(cfg, record)
            return finished
    finally:
        dist.destroy_process_group()


def _open_record(cfg: Config, record: RunRecord, stack: ExitStack, announced: int) -> Start:
    """Take the run directory, find out where the run begins, and open its record there. On the first rank."""
    if dist.get_rank() != 0:
        return Start()
    directory = stack.enter_context(closing(RunDirectory.create(cfg.output_dir, cfg.project, cfg.experiment)))
    check = partial(check_saved, values=cfg.checkpoint.verify)
    start = find_start(directory.path, cfg.checkpoint, to_yaml(cfg), fingerprints(cfg), check)
    directory.write_config(to_yaml(cfg), Permissions(cfg.checkpoint.mode).of("config.yaml"))
    notes = list(start.notes)
    over = start.continues and is_over(cfg, directory.path, start.step)
    if start.checkpoint is not None and start.step != announced and not over:
        notes.insert(0, continues_text(cfg, start.checkpoint, start.step))
    if start.continues:
        directory.cut_metrics(start.step)
        record.recall(directory.records())
    elif (earlier := directory.set_aside_metrics()) is not None:
        notes.append(f"metrics of an earlier run are in {os.path.relpath(earlier)}")
    trackers: list[Tracker] = [JsonlTracker(directory.metrics_path)]
    if cfg.logging.tensorboard:
        trackers.append(TensorboardTracker(directory.tensorboard_path, start.step if start.continues else None))
    record.directory = directory
    record.tracker = stack.enter_context(closing(MultiTracker(trackers)))
    title = f"{cfg.project} / {cfg.experiment}"
    console = Console(cfg.logging.console, cfg.trainer.num_steps, without_secrets(title), first_step=start.step)
    record.console = stack.enter_context(console)
    for note in notes:
        record.console.note(note)
    return replace(start, is_over=over)


def _tell(start: Start) -> Start:
    """What the first rank has found, on every rank."""
    weights = {role: str(path) for role, path in start.weights.items()}
    told = broadcast_json([str(start.checkpoint or ""), start.step, weights, start.continues, start.is_over], 0)
    checkpoint, step, weights, continues, over = told
    found = {role: Path(path) for role, path in weights.items()}
    return Start(Path(checkpoint) if checkpoint else None, step, found, continues, over, inputs=start.inputs)


def _build(cfg: Config, platform: Platform, record: RunRecord, start: Start, requests: SignalRequests) -> Trainer:
    dtype = platform.default_dtype if cfg.model.dtype == "auto" else cfg.model.dtype
    if is_supervised(cfg):
        return supervised.build_trainer(cfg, platform, dtype, record, start, requests)
    with record.phase("load_data"):
        data = on_every_rank(lambda: _load_data(cfg))
    first = data.train[0].prompt_ids
    record.note(shown(data.tokenizer.decode(first), len(first)))
    with record.phase("build_model"):
        built = build_roles(cfg, platform, dtype, start.weights)
    with record.phase("start_engine"):
        engine = build_engine(
            cfg.rollout,
            model_dir=cfg.model.path,
            tokenizer_dir=cfg.model.tokenizer_path or cfg.model.path,
            dtype=dtype,
            max_model_len=cfg.rollout.max_model_len,
            seed=cfg.seed,
            **(
                {"hf_shapes": hf_shapes(built.actor.model.spec.geometry)}
                if cfg.rollout.engine == "vllm"
                else {"attention": cfg.model.attention}
            ),
        )
    sampler = _sampler(cfg, data.train)
    counters = Counters()
    estimation = Estimation(cfg.algorithm)
    holders: dict[str, Stateful] = {"counters": counters, "kl_controller": estimation.kl_controller}
    if built.critic is not None and built.critic.normalizer is not None:
        holders["return_normalizer"] = built.critic.normalizer
    saving = build_saving(cfg, start, saved_roles(cfg, built), holders, sampler, requests, record)
    for line in saving.resume(start):
        record.note(line)
    record.timers.pop()
    reward = _reward(cfg, data, built)
    sampling = Sampling(**vars(cfg.rollout.sampling), seed=cfg.seed)
    dynamic = cfg.algorithm.dynamic_sampling
    collector = DynamicSampling(dynamic.max_batches) if dynamic.enabled else OneBatch()
    prompts, exchange = PromptBatches(data.train, sampler), Exchange(sampling.n)
    held_out = evaluation_sampling(cfg), cfg.evaluate.every, prompts_per_batch(cfg)
    return Trainer(
        source=SampledBatches(prompts, engine, sampling, reward, collector, exchange, record),
        learner=PolicyLearner(_roles(cfg, built), estimation, record),
        publisher=EnginePublisher(engine, _bridge(cfg, built.actor, engine, built.dtype), record),
        evaluator=Evaluator(data.evaluation, engine, reward, *held_out, record.note),
        checkpointer=saving.checkpointer,
        recorder=record,
        max_bad_updates=cfg.trainer.max_bad_updates,
        counters=counters,
    )


def _sampler(cfg: Config, prompts: Sequence[Prompt]) -> Sampler:
    size, seed, shuffle = cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle
    if cfg.data.weights is None:
        return PromptSampler(len(prompts), size, seed, shuffle)
    held = Counter(prompt.file for prompt in prompts)
    sizes = [held[number] for number in range(len(cfg.data.train))]
    return WeightedSampler(sizes, cfg.data.weights, size, seed, shuffle)


@dataclass(slots=True)
class _Data:
    tokenizer: PreTrainedTokenizerBase
    train: list[Prompt]
    evaluation: list[Prompt]
    graders: RewardFunction


def _load_data(cfg: Config) -> _Data:
    """What the user has written and collected: all that may be wrong with it is found before a model is built."""
    graders = build_reward(cfg.reward)
    tokenizer = load_tokenizer(cfg.model.tokenizer_path or cfg.model.path)
    train = load_prompts(cfg.data.train, tokenizer, cfg.data)
    if len(train) < cfg.trainer.prompts_per_step:
        raise ConfigError(
            f"data.train has {len(train)} prompts, fewer than trainer.prompts_per_step={cfg.trainer.prompts_per_step}: "
            "a step would hold a prompt twice. Lower it, or add data."
        )
    evaluation = load_prompts(cfg.data.eval, tokenizer, cfg.data, field="data.eval") if cfg.data.eval else []
    if cfg.reward.function is None:
        check_sources(train, cfg.reward.sources, "data.train")
        check_sources(evaluation, cfg.reward.sources, "data.eval")
    return _Data(tokenizer, train, evaluation[: cfg.evaluate.max_prompts], graders)


def _bridge(cfg: Config, actor: Actor, engine: RolloutEngine, dtype: str) -> WeightBridge:
    bridge = _plain_bridge(cfg, actor, engine)
    if not cfg.bridge.canary:
        return bridge
    drawn = cfg.rollout.sampling
    length = min(NUM_TOKENS, cfg.data.max_prompt_tokens)
    prompts = canary_prompts(engine.num_engines, length, actor.model.spec.geometry.vocab_size)
    sampling = Sampling(temperature=drawn.temperature, max_new_tokens=min(NUM_TOKENS, drawn.max_new_tokens))
    return CanaryBridge(bridge, engine, actor, prompts, sampling, TOLERANCE[DTYPES[dtype]])


def _ranks_per_node() -> int | None:
    """Ranks of each machine as torchrun has started them; None on a single machine, and where machines have different numbers."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    return local if local < dist.get_world_size() and len(set(all_gather_json(local))) == 1 else None


def _plain_bridge(cfg: Config, actor: Actor, engine: RolloutEngine) -> WeightBridge:
    gatherer = None
    if cfg.bridge.method == "gather" or cfg.bridge.verify == "full":
        model = actor.model.model
        assert model is not None, "config.validate keeps actor.ranks from these"
        pgs = model.groups.collection
        gatherer = Gatherer(model.local_parameters(), model.spec.geometry, pgs.tp, pgs.pp, pgs.tp_ep)
    if cfg.bridge.method == "gather":
        assert gatherer is not None
        return GatherBridge(gatherer, engine)
    if cfg.bridge.live_cpu_weights and cfg.rollout.engine == "vllm":
        keep_loading_layout(engine.model)
    return PlannedBridge(
        actor.model.local_parameters(),
        actor.model.spec.geometry,
        engine,
        bucket_bytes=cfg.bridge.bucket_bytes,
        verify=cfg.bridge.verify,
        gatherer=gatherer,
        ranks_per_node=_ranks_per_node(),
    )


def _reward(cfg: Config, data: _Data, built: BuiltRoles) -> RewardFunction:
    if built.reward_model is None:
        return data.graders
    return ModelReward(data.graders, built.reward_model, cfg.reward.model.weight)


def _roles(cfg: Config, built: BuiltRoles) -> Roles:
    warmup_steps = cfg.critic.warmup_steps if built.critic is not None else 0
    refresh_steps = cfg.reference.refresh_steps
    return Roles(built.actor, built.critic, built.reference, warmup_steps=warmup_steps, refresh_steps=refresh_steps)


def _summary(cfg: Config, record: RunRecord) -> None:
    """The table a run ends with: before and after, where everything is, and what to try next."""
    assert record.console is not None and record.directory is not None
    rows: list[tuple[str, ...]] = []
    if record.rewards:
        few = max(len(record.rewards) // 10, 1)
        first, last = sum(record.rewards[:few]) / few, sum(record.rewards[-few:]) / few
        label = f"training reward (mean of {few} steps)" if few > 1 else "training reward (first and last step)"
        rows.append((label, f"{first:.3f}", f"{last:.3f}", f"{last - first:+.3f}"))
    if len(record.evaluations) > 1:
        before, after = record.evaluations[min(record.evaluations)], record.evaluations[max(record.evaluations)]
        for name, label in SUMMARISED.items():
            if name not in after:
                continue
            rows.append((label, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{after[name] - before[name]:+.3f}"))
    directory = os.path.relpath(record.directory.path)
    chosen = BEST if cfg.checkpoint.load_best_model_at_end else LATEST
    footer = [
        f"run directory   {directory}",
        f"trained model   {directory}/{chosen}/{SAVED_AS.get(cfg.algorithm.kind, 'actor')}  (a Hugging Face directory)",
        f"curves          tensorboard --logdir {directory}",
    ]
    record.console.summary("result", rows, ("", "before", "after", "change"), footer)
