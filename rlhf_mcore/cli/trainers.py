"""Build the trainers: reinforcement learning, supervised fine-tuning, reward models and preference learning."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.checkpoint.registry import Stateful
from rlhf_mcore.cli.generation import Generation, Rewards, build_colocated, build_disaggregated, start_fleet
from rlhf_mcore.cli.models import ModelBuilder, build_teacher
from rlhf_mcore.cli.preflight import load_environment
from rlhf_mcore.cli.reward_pools import build_graders, reward_pools
from rlhf_mcore.cli.run_context import Data, RunContext, load_example_data, load_prompt_data
from rlhf_mcore.cli.saving import ModelToSave, build_checkpointer
from rlhf_mcore.config.choices import DPO, PREFERENCE_LOSSES, REWARD_MODEL, RL, SFT, RunKind
from rlhf_mcore.config.keys import value_of
from rlhf_mcore.config.questions import has_teacher, needs_critic, needs_reference
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.coroutines import Background
from rlhf_mcore.data.examples import ExampleBatches, TokenizedExample, example_batch
from rlhf_mcore.data.prefixes import SHORTEST
from rlhf_mcore.data.sampler import PromptSampler, Sampler, WeightedSampler
from rlhf_mcore.expected_kernels import kernels_text
from rlhf_mcore.mcore.kernels import live_kernels
from rlhf_mcore.observability.run_directory import episode_files
from rlhf_mcore.observability.throughput import Throughput
from rlhf_mcore.parallel.collectives import all_gather_json, on_every_rank, world_group
from rlhf_mcore.planning.counts import model_flops, mtp_flops
from rlhf_mcore.planning.inputs import GPUS, roles_of
from rlhf_mcore.planning.plan import with_offload
from rlhf_mcore.protocols import Evaluator, ResponseSampler, RewardFunction
from rlhf_mcore.roles.policy import Actor, Reference, SupervisedActor
from rlhf_mcore.roles.preference import PreferenceActor
from rlhf_mcore.roles.scalar_models import Critic, RewardModel, RewardModelTrainer
from rlhf_mcore.roles.teacher import Teacher
from rlhf_mcore.roles.trained_model import TrainedModel
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.trainer.advantages import AdvantageComputer
from rlhf_mcore.trainer.batches import keep_scores
from rlhf_mcore.trainer.evaluation import PolicyEvaluator, evaluation_sampling, prompts_per_batch
from rlhf_mcore.trainer.example_learner import (
    ExampleEvaluator,
    ExampleLearner,
    NoPublisher,
    Sums,
    add_reference,
    likelihood,
    likelihood_metrics,
    preference,
    preference_metrics,
)
from rlhf_mcore.trainer.loop import TrainingLoop
from rlhf_mcore.trainer.metrics import Counters
from rlhf_mcore.trainer.model_reward import ModelReward
from rlhf_mcore.trainer.record import TokenRecord
from rlhf_mcore.trainer.reinforcement import NoEvaluator, PolicyLearner, Roles
from rlhf_mcore.trainer.scores import OnError
from rlhf_mcore.trainer.work import StepWork, TrainedWork
from rlhf_mcore.types import Prompt, TrainBatch


@dataclass(frozen=True, slots=True)
class PolicyModels:
    """The models of reinforcement learning; None: the run has no such model."""

    actor: Actor
    critic: Critic | None
    reference: Reference | None
    teacher: Teacher | None
    reward: RewardModel | None

    @classmethod
    def build(cls, run: RunContext, tokenizer: PreTrainedTokenizerBase) -> PolicyModels:
        """Build all models of a run. Collective over the world."""
        cfg, record = run.cfg, run.record
        models = ModelBuilder(decide_offload(run), run.platform, run.start.weights, record.memory, record.progress)
        run.stack.callback(models.release)
        actor = models.actor()
        return cls(
            actor,
            critic=models.critic() if needs_critic(cfg) else None,
            reference=models.reference() if needs_reference(cfg) else None,
            teacher=build_teacher(models, actor, tokenizer) if has_teacher(cfg) else None,
            reward=models.reward_model() if cfg.reward.model.path is not None else None,
        )

    def models_to_save(self, cfg: Config) -> list[ModelToSave]:
        """List the models whose weights change, which checkpoints contain."""
        saved = [ModelToSave("actor", self.actor.model, cfg.model.path)]
        if self.critic is not None:
            saved.append(ModelToSave("critic", self.critic.model, cfg.critic.path or cfg.model.path))
        if self.reference is not None and cfg.reference.refresh_steps:
            saved.append(ModelToSave("reference", self.reference.model, cfg.reference.path or cfg.model.path))
        if self.teacher is not None and self.teacher.average is not None:
            saved.append(ModelToSave("teacher", self.teacher.average.model, cfg.model.path))
        return saved

    def work(self, cfg: Config, throughput: Throughput) -> StepWork:
        """Return the counter of a step's floating-point operations."""
        return StepWork(
            throughput,
            trained_work(self.actor.model),
            trained_work(self.critic.model) if self.critic is not None else None,
            model_flops(self.reference.model.spec.geometry) if self.reference is not None else None,
            generates=cfg.rollout.placement == "colocated",
            teacher=None if self.teacher is None else self.teacher.work,
            shares_prefixes=self.actor.model.shares_prefixes,
        )

    def roles(self, cfg: Config) -> Roles:
        """Return the models and their settings for an update."""
        return Roles(
            self.actor,
            self.critic,
            self.reference,
            warmup_steps=cfg.critic.warmup_steps if self.critic is not None else 0,
            refresh_steps=cfg.reference.refresh_steps,
            computes={} if self.teacher is None else {self.teacher.field: self.teacher.compute},
        )


def rl_trainer(run: RunContext) -> TrainingLoop:
    """Build the trainer for reinforcement learning: engines sample responses, and graders or a reward model score them."""
    cfg, record = run.cfg, run.record
    with record.phase("load_data"):
        pools = reward_pools(cfg.reward)
        graders = on_every_rank(lambda: build_graders(cfg, pools))
        on_every_rank(lambda: load_environment(cfg) if dist.get_rank() == 0 else None)
        data = load_prompt_data(cfg, record.note, world_group())
    # Only the first rank of a disaggregated run communicates with the fleet.
    has_fleet = cfg.rollout.placement == "disaggregated" and dist.get_rank() == 0
    fleet = on_every_rank(lambda: start_fleet(run) if has_fleet else None)
    with record.phase("build_model"):
        models = PolicyModels.build(run, data.tokenizer)
    actor, teacher = models.actor, models.teacher
    reward = (
        None if models.reward is None else ModelReward(graders, models.reward.compute_scores, cfg.reward.model.weight)
    )
    thread = Background("rewards")
    run.stack.callback(thread.close)
    rewards = Rewards(graders, keep_scores if reward is None else reward.add, thread)
    in_advantages = teacher is not None and teacher.top_k is None
    estimation = AdvantageComputer(cfg.algorithm, teacher_coef=cfg.teacher.coef if in_advantages else 0.0)
    sampler, counters = _prompt_sampler(cfg, data.train), Counters()
    generation = _build_generation(run, actor, rewards, sampler, data, fleet)
    note_kernels(run, actor.model, generation.kernels)
    holders: dict[str, Stateful] = {"counters": counters, "kl_controller": estimation.kl_controller}
    if models.critic is not None and models.critic.normalizer is not None:
        holders["return_normalizer"] = models.critic.normalizer
    checkpointer = build_checkpointer(
        run, models.models_to_save(cfg), holders, sampler, generation.ahead, generation.lengths, generation.room
    )
    if cfg.environment.function is not None:
        record.episodes = episode_files(cfg.logging.episode_traces)
    assert record.throughput is not None
    return TrainingLoop(
        source=generation.source,
        learner=PolicyLearner(
            models.roles(cfg),
            estimation,
            record,
            cfg.logging.entropy_every,
            models.work(cfg, record.throughput),
            _token_record(run, generation),
        ),
        publisher=generation.publisher,
        evaluator=_build_evaluator(run, data.held_out, generation.sampler, reward or graders),
        checkpointer=checkpointer,
        recorder=record,
        counters=counters,
    )


def _token_record(run: RunContext, generation: Generation) -> TokenRecord | None:
    """Return the recorder of the tokens of some responses, or None if the run records none."""
    cfg = run.cfg.logging
    if not cfg.rollout_tokens:
        return None
    return TokenRecord(cfg.rollout_tokens, cfg.rollouts_every, generation.sampler.decode, run.record.directory)


def _build_generation(
    run: RunContext,
    actor: Actor,
    rewards: Rewards,
    sampler: Sampler,
    data: Data[Prompt],
    fleet: Fleet | None,
) -> Generation:
    """Start the engines of a run, or wait until the engines of ``fleet`` have started. Collective over the world."""
    with run.record.phase("start_engine"):
        if run.cfg.rollout.placement == "colocated":
            return build_colocated(run, actor, rewards, sampler, data)
        on_every_rank(lambda: None if fleet is None else fleet.wait_until_ready(run.record.progress))
        return build_disaggregated(run, actor, rewards, sampler, data, fleet)


def _build_evaluator(
    run: RunContext, held_out: Sequence[Prompt], sampler: ResponseSampler, reward: RewardFunction
) -> Evaluator:
    if not held_out:
        return NoEvaluator()
    cfg, record = run.cfg, run.record
    return PolicyEvaluator(
        held_out,
        sampler,
        reward,
        evaluation_sampling(cfg.evaluate, cfg.rollout.sampling.max_new_tokens, cfg.seed),
        cfg.evaluate.every,
        prompts_per_batch(cfg.evaluate.samples, cfg.rollout.slots),
        record.note,
        OnError.of(cfg.reward),
        record.progress,
    )


def decide_offload(run: RunContext) -> Config:
    """Return the configuration with ``offload`` of every model decided for this run's devices. Collective over the world."""
    smallest = min(all_gather_json(run.platform.memory_bytes() or 0))
    if not smallest:
        return run.cfg
    decided = with_offload(run.cfg, dist.get_world_size(), replace(GPUS["H100"], memory_bytes=smallest))
    for role in roles_of(decided, dist.get_world_size(), run.dtype):
        group = role.name.partition("[")[0]  # several teachers are named teacher[SOURCE]
        key = f"{'reward.model' if group == 'reward' else group}.offload"
        if role.offload and value_of(run.cfg, key) == "auto":
            run.record.note(
                f"{key}={value_of(decided, key)}: with less, a phase would not fit (rlhf-mcore plan shows it)"
            )
    return decided


def trained_work(model: TrainedModel) -> TrainedWork:
    return TrainedWork(model_flops(model.spec.geometry), model.plan.epochs, mtp_flops(model.spec.geometry))


def note_kernels(run: RunContext, trained: TrainedModel, of_engine: Mapping[str, str] | None = None) -> None:
    of_model = (
        {} if trained.model is None else live_kernels(trained.model)
    )  # the first rank may have no shard of the model
    if kernels := {**of_model, **(of_engine or {})}:
        run.record.note(kernels_text(kernels))
    if trained.shares_prefixes:
        run.record.note(f"shared prefixes of at least {SHORTEST} tokens are computed once")
    elif trained.unshared_because is not None:
        run.record.note(f"shared prefixes are computed for each sequence: {trained.unshared_because}")


def _prompt_sampler(cfg: Config, prompts: Sequence[Prompt]) -> Sampler:
    size, seed, shuffle = cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle
    if cfg.data.weights is None:
        return PromptSampler(len(prompts), size, seed, shuffle)
    rows_by_file = Counter(prompt.file for prompt in prompts)
    sizes = [rows_by_file[number] for number in range(len(cfg.data.train))]
    return WeightedSampler(sizes, cfg.data.weights, size, seed, shuffle)


@dataclass(frozen=True, slots=True)
class _ComparedModels:
    """A frozen policy, and the function that adds its logprobs to a batch."""

    reference: Reference
    compute: Callable[[TrainBatch], None]


def sft_trainer(run: RunContext) -> TrainingLoop:
    """Build the trainer for supervised fine-tuning, which trains a policy on given responses."""
    data = _load_data(run)
    actor = SupervisedActor(_build_on_examples(run, "actor"))
    return _example_trainer(run, data, actor, partial(likelihood, actor), likelihood_metrics)


def reward_model_trainer(run: RunContext) -> TrainingLoop:
    """Build the trainer of a reward model from pairs of a better and a worse response."""
    data = _load_data(run)
    model = RewardModelTrainer(_build_on_examples(run, "reward_model"), run.cfg.algorithm.centering)
    return _example_trainer(run, data, model, partial(preference, model.compute_scores), preference_metrics)


def preference_trainer(run: RunContext) -> TrainingLoop:
    """Build the trainer of a policy from pairs of a better and a worse response."""
    data = _load_data(run)
    has_reference = needs_reference(run.cfg)
    cfg = decide_offload(run) if has_reference else run.cfg
    if cfg.reference.precompute:  # the reference is released after its logprobs are computed
        cfg = with_values(cfg, {"reference.offload": "never"})
    models = _models(run, cfg)
    once, is_actor = (
        cfg.reference.precompute,
        cfg.actor.lora.rank is not None,
    )  # the reference is the actor without adapters
    if once and not is_actor:
        _precompute(run, data, models)
        models.release()
        gc.collect()  # free the reference before the actor needs the device
    with run.record.phase("build_model"):
        model = models.on_examples(run.kind, "actor")
        reference = models.reference() if has_reference and not once else None
    if once and is_actor:
        _precompute(run, data, models)
    note_kernels(run, model)
    dpo = run.cfg.algorithm.dpo
    actor = PreferenceActor(model, dpo, reference)
    build = partial(example_batch, with_mismatched=PREFERENCE_LOSSES[dpo.loss].needs_mismatched)
    compared = None if reference is None else _ComparedModels(reference, actor.compute_reference)
    return _example_trainer(run, data, actor, actor.measure, preference_metrics, build=build, compared=compared)


def _precompute(run: RunContext, data: Data[TokenizedExample], models: ModelBuilder) -> None:
    """Add the reference's logprobs to all pairs, and keep no link to the reference. Collective over the world."""
    with run.record.phase("reference"):
        reference = models.reference()
        for examples in (data.train, data.held_out):
            add_reference(examples, reference, run.cfg.trainer.prompts_per_step, run.record.progress)


def _build_on_examples(run: RunContext, name: str) -> TrainedModel:
    """Build the model of a run on given responses. ``name`` prefixes its metrics."""
    with run.record.phase("build_model"):
        model = _models(run, run.cfg).on_examples(run.kind, name)
    note_kernels(run, model)
    return model


def _models(run: RunContext, cfg: Config) -> ModelBuilder:
    models = ModelBuilder(cfg, run.platform, run.start.weights, run.record.memory, run.record.progress)
    run.stack.callback(models.release)
    return models


def _example_trainer(
    run: RunContext,
    data: Data[TokenizedExample],
    role: SupervisedActor | RewardModelTrainer | PreferenceActor,
    measure: Callable[[TrainBatch], Sums],
    named: Callable[[Sums], dict[str, float]],
    *,
    build: Callable[[Sequence[TokenizedExample]], TrainBatch] = example_batch,
    compared: _ComparedModels | None = None,
) -> TrainingLoop:
    """Build a trainer. ``measure`` and ``named`` evaluate the role on batches from ``build``, see :class:`ExampleEvaluator`."""
    cfg, record, counters = run.cfg, run.record, Counters()
    assert record.throughput is not None
    sampler = PromptSampler(len(data.train), cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle)
    work = StepWork(record.throughput, trained_work(role.model), shares_prefixes=role.model.shares_prefixes)
    learner = ExampleLearner(role, record, work)
    if compared is not None:
        work = replace(work, reference=model_flops(compared.reference.model.spec.geometry))
        learner = ExampleLearner(role, record, work, compared.compute)
    saved = [ModelToSave(run.kind.saved_as, role.model, cfg.model.path)]
    return TrainingLoop(
        source=ExampleBatches(data.train, sampler, build),
        learner=learner,
        publisher=NoPublisher(),
        evaluator=ExampleEvaluator(
            data.held_out, cfg.evaluate.every, cfg.trainer.prompts_per_step, measure, named, build
        ),
        checkpointer=build_checkpointer(run, saved, {"counters": counters}, sampler),
        recorder=record,
        counters=counters,
    )


def _load_data(run: RunContext) -> Data[TokenizedExample]:
    with run.record.phase("load_data"):
        return load_example_data(run.cfg, run.record.note, world_group())


TRAINERS: dict[RunKind, Callable[[RunContext], TrainingLoop]] = {
    RL: rl_trainer,
    SFT: sft_trainer,
    REWARD_MODEL: reward_model_trainer,
    DPO: preference_trainer,
}
