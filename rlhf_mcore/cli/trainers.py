"""From a run's configuration to its trainer: reinforcement learning here, runs on given responses in ``example_trainers``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.checkpoint.registry import Stateful
from rlhf_mcore.cli.generation import Generation, Rewards, build_colocated
from rlhf_mcore.cli.models import ModelBuilder
from rlhf_mcore.cli.reward_pools import build_graders, check_environment, reward_pools
from rlhf_mcore.cli.run_context import Data, RunContext, T
from rlhf_mcore.cli.saving import SavedModel, build_checkpointer
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.implied import grades, has_teacher, needs_critic, needs_reference
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.reward_sources import scores_alone
from rlhf_mcore.config.schema import Config
from rlhf_mcore.data.rendering import shown
from rlhf_mcore.data.sampler import PromptSampler, Sampler, WeightedSampler
from rlhf_mcore.data.source import image_reader, load_prompts
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.expected_kernels import kernels_text
from rlhf_mcore.mcore.kernels import live_kernels
from rlhf_mcore.parallel.collectives import all_gather_json, on_every_rank, world_group
from rlhf_mcore.planning.counts import model_flops, mtp_flops
from rlhf_mcore.protocols import Evaluator, RewardFunction
from rlhf_mcore.rewards.reward import check_sources
from rlhf_mcore.roles.model import TrainedModel
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.failures import OnError
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.metrics import Counters
from rlhf_mcore.trainer.reinforcement import NoEvaluator, PolicyLearner, Roles, keep_scores
from rlhf_mcore.trainer.rollouts import RolloutWorker
from rlhf_mcore.trainer.work import StepWork, TrainedWork
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.fleet import Fleet


def rl_trainer(run: RunContext) -> Trainer:
    """Reinforcement learning from responses that engines draw and graders or a reward model score."""
    cfg, record = run.cfg, run.record
    with record.phase("load_data"):
        pools = reward_pools(cfg.reward)
        graders = on_every_rank(lambda: build_graders(cfg, pools))
        on_every_rank(lambda: check_environment(cfg) if dist.get_rank() == 0 else None)
    data = load_data(run, _load_prompts)
    fleet = on_every_rank(lambda: _start_fleet(run))
    with record.phase("build_model"):
        models = ModelBuilder(with_offload(run), run.platform, run.start.weights, record.memory, record.progress)
        run.stack.callback(models.release)
        actor = models.actor()
        note_kernels(run, actor.model)
        critic = models.critic() if needs_critic(cfg) else None
        reference = models.reference() if needs_reference(cfg) else None
        teacher = None
        if has_teacher(cfg):
            from rlhf_mcore.cli.teacher import build_teacher

            teacher = build_teacher(models, actor, data.tokenizer)
        model_reward = None
        if cfg.reward.model.path is not None:
            from rlhf_mcore.trainer.model_reward import ModelReward

            model_reward = ModelReward(graders, models.reward_model().compute_scores, cfg.reward.model.weight)
    sampler, counters = _prompt_sampler(cfg, data.train), Counters()
    in_advantages = teacher is not None and teacher.top_k is None
    estimation = AdvantageComputer(cfg.algorithm, teacher_coef=cfg.teacher.coef if in_advantages else 0.0)
    saved = [SavedModel("actor", actor.model, cfg.model.path)]
    holders: dict[str, Stateful] = {"counters": counters, "kl_controller": estimation.kl_controller}
    if critic is not None:
        saved.append(SavedModel("critic", critic.model, cfg.critic.path or cfg.model.path))
        if critic.normalizer is not None:
            holders["return_normalizer"] = critic.normalizer
    if reference is not None and cfg.reference.refresh_steps:  # its weights change
        saved.append(SavedModel("reference", reference.model, cfg.reference.path or cfg.model.path))
    if teacher is not None and teacher.average is not None:
        saved.append(SavedModel("teacher", teacher.average.model, cfg.model.path))
    rewards = Rewards(graders, keep_scores if model_reward is None else model_reward.add)
    generation = _build_generation(run, actor, rewards, sampler, data, fleet)
    lengths = generation.worker.dealer.lengths if cfg.rollout.placement == "colocated" else None
    checkpointer = build_checkpointer(run, saved, holders, sampler, generation.ahead, lengths, generation.room)

    assert record.throughput is not None
    work = StepWork(
        record.throughput,
        trained_work(actor.model),
        trained_work(critic.model) if critic is not None else None,
        model_flops(reference.model.spec.geometry) if reference is not None else None,
        generates=cfg.rollout.placement == "colocated",
        teacher=None if teacher is None else teacher.work,
    )
    roles = Roles(
        actor,
        critic,
        reference,
        warmup_steps=cfg.critic.warmup_steps if critic is not None else 0,
        refresh_steps=cfg.reference.refresh_steps,
        computes={} if teacher is None else {teacher.field: teacher.compute},
    )
    shown, tokens = cfg.logging, None
    if shown.rollout_tokens:
        from rlhf_mcore.trainer.token_record import TokenRecord

        tokens = TokenRecord(shown.rollout_tokens, shown.rollouts_every, generation.worker.decode, record.directory)
    if cfg.environment.function is not None:
        from rlhf_mcore.observability.episode_files import EpisodeFiles

        record.episodes = EpisodeFiles(shown.episode_traces)
    return Trainer(
        source=generation.source,
        learner=PolicyLearner(roles, estimation, record, cfg.logging.entropy_every, work, tokens),
        publisher=generation.publisher,
        evaluator=_build_evaluator(run, data.held_out, generation.worker, model_reward or graders),
        checkpointer=checkpointer,
        recorder=record,
        max_bad_updates=cfg.trainer.max_bad_updates,
        counters=counters,
    )


def _build_generation(
    run: RunContext,
    actor: Actor,
    rewards: Rewards,
    sampler: Sampler,
    data: Data[Prompt],
    fleet: Fleet | None,
) -> Generation:
    """Start the engines of a run, or wait until those of ``fleet`` have started. Collective over the world."""
    with run.record.phase("start_engine"):
        if run.cfg.rollout.placement == "colocated":
            return build_colocated(run, actor, rewards, sampler, data)
        from rlhf_mcore.cli.disaggregated import build_disaggregated

        on_every_rank(lambda: None if fleet is None else fleet.wait_until_ready(run.record.progress))
        return build_disaggregated(run, actor, rewards, sampler, data, fleet)


def _start_fleet(run: RunContext) -> Fleet | None:
    """Begin to start the engines of a disaggregated run, under Ray. The first rank alone talks to them; None on the others."""
    if run.cfg.rollout.placement == "colocated" or dist.get_rank() != 0:
        return None
    from rlhf_mcore.cli.disaggregated import start

    return start(run)


def _build_evaluator(
    run: RunContext, held_out: Sequence[Prompt], worker: RolloutWorker, reward: RewardFunction
) -> Evaluator:
    if not held_out:
        return NoEvaluator()
    from rlhf_mcore.trainer.evaluation import PolicyEvaluator, evaluation_sampling, prompts_per_batch

    cfg, record = run.cfg, run.record
    return PolicyEvaluator(
        held_out,
        worker,
        reward,
        evaluation_sampling(cfg),
        cfg.evaluate.every,
        prompts_per_batch(cfg),
        record.note,
        OnError.of(cfg.reward),
        record.progress,
    )


def with_offload(run: RunContext) -> Config:
    """Decide ``offload`` of every model for the devices at hand, and return that configuration. Collective over the world."""
    smallest = min(all_gather_json(run.platform.memory_bytes() or 0))
    if not smallest:
        return run.cfg
    from rlhf_mcore.planning.inputs import GPUS, roles_of
    from rlhf_mcore.planning.plan import with_offload

    decided = with_offload(run.cfg, dist.get_world_size(), replace(GPUS["H100"], memory_bytes=smallest))
    for role in roles_of(decided, dist.get_world_size(), run.dtype):
        group = role.name.partition("[")[0]  # of several teachers
        key = f"{'reward.model' if group == 'reward' else group}.offload"
        if role.offload and value_of(run.cfg, key) in ("auto", None):
            shown = str(value_of(decided, key)).lower()
            run.record.note(f"{key}={shown}: with less, a phase would not fit (rlhf-mcore plan shows it)")
    return decided


def trained_work(model: TrainedModel) -> TrainedWork:
    return TrainedWork(model_flops(model.spec.geometry), model.plan.epochs, mtp_flops(model.spec.geometry))


def note_kernels(run: RunContext, trained: TrainedModel) -> None:
    if trained.model is not None:  # of a role on other ranks the first one has nothing to look at
        run.record.note(kernels_text(live_kernels(trained.model)))


def load_data(
    run: RunContext, load: Callable[[RunContext, PreTrainedTokenizerBase], tuple[list[T], list[T]]]
) -> Data[T]:
    """Load what to learn from and what to evaluate on, before a model is built. Collective over the world, as ``load`` is.

    Raises:
        ConfigError: anything is wrong with the tokenizer or with the data; raised on every rank.
    """
    cfg = run.cfg
    with run.record.phase("load_data"):
        tokenizer = on_every_rank(lambda: load_tokenizer(cfg.model.tokenizer_path or cfg.model.path))
        train, held_out = load(run, tokenizer)
        if len(train) < cfg.trainer.prompts_per_step:
            one, many = ("a prompt", "prompts") if run.kind.generates else ("an example", "examples")
            raise ConfigError(
                f"data.train has {len(train)} {many}, fewer than trainer.prompts_per_step={cfg.trainer.prompts_per_step}: "
                f"a step would hold {one} twice. Lower it, or add data."
            )
        data = Data(tokenizer, train, held_out[: cfg.evaluate.max_prompts])
    first = data.train[0].prompt_ids
    run.record.note(shown(data.tokenizer.decode(first), len(first)))
    return data


def _load_prompts(run: RunContext, tokenizer: PreTrainedTokenizerBase) -> tuple[list[Prompt], list[Prompt]]:
    data, reward = run.cfg.data, run.cfg.reward
    tools = []
    if (path := run.cfg.environment.tools) is not None:
        from rlhf_mcore.config.tool_schemas import read_tools

        tools = on_every_rank(lambda: read_tools(path))
    images = on_every_rank(lambda: image_reader(run.cfg))
    load = partial(
        load_prompts,
        tokenizer=tokenizer,
        cfg=data,
        tools=tools,
        note=run.record.note,
        group=world_group(),
        images=images,
    )
    train = load(data.train)
    held_out = load(data.eval, field="data.eval") if data.eval else []
    if not scores_alone(reward) and grades(run.cfg):
        check_sources(train, reward.sources, "data.train")
        check_sources(held_out, reward.sources, "data.eval")
    return train, held_out


def _prompt_sampler(cfg: Config, prompts: Sequence[Prompt]) -> Sampler:
    size, seed, shuffle = cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle
    if cfg.data.weights is None:
        return PromptSampler(len(prompts), size, seed, shuffle)
    rows_by_file = Counter(prompt.file for prompt in prompts)
    sizes = [rows_by_file[number] for number in range(len(cfg.data.train))]
    return WeightedSampler(sizes, cfg.data.weights, size, seed, shuffle)
