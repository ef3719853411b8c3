"""Composition of the runs that learn from given responses: supervised fine-tuning and reward models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from transformers import PreTrainedTokenizerBase

from rlhf_mcore.checkpoint.signals import SignalRequests
from rlhf_mcore.cli.beginning import SAVED_AS
from rlhf_mcore.cli.roles import build_supervised
from rlhf_mcore.cli.saving import build_saving
from rlhf_mcore.config.data_files import file_keys
from rlhf_mcore.config.derive import longest_example
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.supervised import wanted_columns
from rlhf_mcore.data.examples import Example, ExampleBatches, load_examples
from rlhf_mcore.data.rendering import shown
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.mcore.families import load_spec
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.platform import Platform
from rlhf_mcore.roles.policy import SupervisedActor
from rlhf_mcore.roles.reward_model import RewardModelTrainer
from rlhf_mcore.trainer.counters import Counters
from rlhf_mcore.trainer.loop import Trainer
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.resume import Start
from rlhf_mcore.trainer.supervised import (
    HeldOut,
    NoPublisher,
    SupervisedLearner,
    likelihood,
    likelihood_metrics,
    preference,
    preference_metrics,
)


@dataclass(slots=True)
class _Data:
    tokenizer: PreTrainedTokenizerBase
    train: list[Example]
    held_out: list[Example]


def build_trainer(
    cfg: Config, platform: Platform, dtype: str, record: RunRecord, start: Start, requests: SignalRequests
) -> Trainer:
    """From a resolved configuration to a trainer. Collective over the world.

    Raises:
        ConfigError: what could only be found out with data and model in hand; raised on every rank.
    """
    with record.phase("load_data"):
        data = on_every_rank(lambda: _load_data(cfg))
    first = data.train[0].prompt_ids
    record.note(shown(data.tokenizer.decode(first), len(first)))
    with record.phase("build_model"):
        model = build_supervised(cfg, platform, dtype, name := SAVED_AS[cfg.algorithm.kind], start.weights)
    sampler = PromptSampler(len(data.train), cfg.trainer.prompts_per_step, cfg.seed, cfg.data.shuffle)
    counters = Counters()
    models = [(name, model.model, cfg.model.path)]
    saving = build_saving(cfg, start, models, {"counters": counters}, sampler, requests, record)
    for line in saving.resume(start):
        record.note(line)
    record.timers.pop()
    return Trainer(
        source=ExampleBatches(data.train, sampler),
        learner=SupervisedLearner(model, record),
        publisher=NoPublisher(),
        evaluator=_held_out(cfg, data, model),
        checkpointer=saving.checkpointer,
        recorder=record,
        max_bad_updates=cfg.trainer.max_bad_updates,
        counters=counters,
    )


def _load_data(cfg: Config) -> _Data:
    tokenizer = load_tokenizer(cfg.model.tokenizer_path or cfg.model.path)
    positions = load_spec(cfg.model.path, "lm" if cfg.algorithm.kind == "sft" else "sequence").hf_config
    load = partial(
        load_examples,
        tokenizer=tokenizer,
        max_tokens=min(longest_example(cfg), positions.max_position_embeddings),
        drop_longer=cfg.data.overlong_prompts == "drop",
        data=cfg.data,
    )

    def columns(files: list[str], field: str) -> list[dict[str, str]]:
        return [wanted_columns(cfg, prompt_key) for prompt_key, _ in file_keys(cfg.data, files, field)]

    train = load(cfg.data.train, columns=columns(cfg.data.train, "data.train"))
    if len(train) < cfg.trainer.prompts_per_step:
        raise ConfigError(
            f"data.train has {len(train)} examples, fewer than trainer.prompts_per_step={cfg.trainer.prompts_per_step}: "
            "a step would hold an example twice. Lower it, or add data."
        )
    evaluated = columns(cfg.data.eval, "data.eval")
    held_out = load(cfg.data.eval, columns=evaluated, field="data.eval") if cfg.data.eval else []
    return _Data(tokenizer, train, held_out[: cfg.evaluate.max_prompts])


def _held_out(cfg: Config, data: _Data, model: SupervisedActor | RewardModelTrainer) -> HeldOut:
    build = partial(HeldOut, data.held_out, cfg.evaluate.every, cfg.trainer.prompts_per_step)
    if isinstance(model, SupervisedActor):
        return build(partial(likelihood, model), likelihood_metrics)
    return build(partial(preference, model), preference_metrics)
