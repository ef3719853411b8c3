"""Build the trainers of runs on given responses: supervised fine-tuning, reward models and preference learning."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from rlhf_mcore.cli.models import ModelBuilder
from rlhf_mcore.cli.run_context import Data, RunContext, load_example_data
from rlhf_mcore.cli.saving import SavedModel, build_checkpointer
from rlhf_mcore.cli.trainers import decide_offload, note_kernels, trained_work
from rlhf_mcore.config.choices import PREFERENCE_LOSSES
from rlhf_mcore.config.questions import needs_reference
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.data.examples import ExampleBatches, TokenizedExample, example_batch
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.planning.counts import model_flops
from rlhf_mcore.roles.model import TrainedModel
from rlhf_mcore.roles.policy import Reference, SupervisedActor
from rlhf_mcore.roles.preference import PreferenceActor
from rlhf_mcore.roles.reward_model import RewardModelTrainer
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
from rlhf_mcore.trainer.work import StepWork
from rlhf_mcore.types import TrainBatch


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
    saved = [SavedModel(run.kind.saved_as, role.model, cfg.model.path)]
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
