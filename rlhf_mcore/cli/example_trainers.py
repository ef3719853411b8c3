"""From the configuration of a run on given responses to its trainer: supervised fine-tuning and reward models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlhf_mcore.cli.models import ModelBuilder
from rlhf_mcore.cli.run_context import Data, RunContext
from rlhf_mcore.cli.saving import SavedModel, build_checkpointer
from rlhf_mcore.cli.trainers import load_data, note_kernels, trained_work
from rlhf_mcore.config.data_columns import file_keys, wanted_columns
from rlhf_mcore.config.implied import longest_example
from rlhf_mcore.data.examples import ExampleBatches, TokenizedExample, load_examples
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.parallel.collectives import on_every_rank, world_group
from rlhf_mcore.roles.model import TrainedModel
from rlhf_mcore.roles.reward_model import RewardModelTrainer
from rlhf_mcore.roles.supervised import SupervisedActor
from rlhf_mcore.trainer.example_learner import (
    ExampleEvaluator,
    ExampleLearner,
    NoPublisher,
    Sums,
    likelihood,
    likelihood_metrics,
    preference,
    preference_metrics,
)
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.metrics import Counters
from rlhf_mcore.trainer.work import StepWork
from rlhf_mcore.types import TrainBatch


def sft_trainer(run: RunContext) -> Trainer:
    """Build supervised fine-tuning: a policy that imitates given responses."""
    data = load_data(run, _load_examples)
    actor = SupervisedActor(_build_on_examples(run, "actor"))
    return _example_trainer(run, data, actor, partial(likelihood, actor), likelihood_metrics)


def reward_model_trainer(run: RunContext) -> Trainer:
    """Build the training of a reward model from pairs of a better and a worse response."""
    data = load_data(run, _load_examples)
    model = RewardModelTrainer(_build_on_examples(run, "reward_model"), run.cfg.algorithm.centering)
    return _example_trainer(run, data, model, partial(preference, model.compute_scores), preference_metrics)


def _build_on_examples(run: RunContext, name: str) -> TrainedModel:
    """Build the one model of a run on given responses. ``name`` prefixes its metrics."""
    with run.record.phase("build_model"):
        record = run.record
        models = ModelBuilder(run.cfg, run.platform, run.start.weights, record.memory, record.progress)
        run.stack.callback(models.release)
        model = models.on_examples(run.kind, name)
    note_kernels(run, model)
    return model


def _example_trainer(
    run: RunContext,
    data: Data[TokenizedExample],
    role: SupervisedActor | RewardModelTrainer,
    measure: Callable[[TrainBatch], Sums],
    named: Callable[[Sums], dict[str, float]],
) -> Trainer:
    """Build a trainer. ``measure`` and ``named`` evaluate the role: see :class:`ExampleEvaluator`."""
    cfg, record, counters = run.cfg, run.record, Counters()
    assert record.throughput is not None
    sampler = PromptSampler(len(data.train), cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle)
    saved = [SavedModel(run.kind.saved_as, role.model, cfg.model.path)]
    return Trainer(
        source=ExampleBatches(data.train, sampler),
        learner=ExampleLearner(role, record, StepWork(record.throughput, trained_work(role.model))),
        publisher=NoPublisher(),
        evaluator=ExampleEvaluator(data.held_out, cfg.evaluate.every, cfg.trainer.prompts_per_step, measure, named),
        checkpointer=build_checkpointer(run, saved, {"counters": counters}, sampler),
        recorder=record,
        max_bad_updates=cfg.trainer.max_bad_updates,
        counters=counters,
    )


def _load_examples(
    run: RunContext, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[TokenizedExample], list[TokenizedExample]]:
    cfg, data = run.cfg, run.cfg.data
    spec = on_every_rank(lambda: load_spec(cfg.model.path, run.kind.head))
    positions = spec.hf_config.max_position_embeddings

    def load(files: list[str], field: str) -> list[TokenizedExample]:
        columns = [wanted_columns(cfg, prompt_key) for prompt_key, _ in file_keys(data, files, field)]
        return load_examples(
            files,
            tokenizer,
            columns,
            max_tokens=min(longest_example(cfg), positions),
            drop_longer=data.overlong_prompts == "drop",
            data=data,
            field=field,
            note=run.record.note,
            group=world_group(),
        )

    return load(data.train, "data.train"), load(data.eval, "data.eval") if data.eval else []
