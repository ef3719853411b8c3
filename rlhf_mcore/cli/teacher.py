"""From a checked configuration to the teacher of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rlhf_mcore.algorithms.distillation import Divergence
from rlhf_mcore.config.schema import Config
from rlhf_mcore.mcore.model_spec import load_spec
from rlhf_mcore.mcore.overrides import Overrides
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.roles.model import RoleModel
from rlhf_mcore.roles.policy import Actor
from rlhf_mcore.roles.teacher import OTHERS, Average, Context, Teacher
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from rlhf_mcore.cli.models import ModelBuilder

SAVED_AS = "teacher"


def build_teacher(models: ModelBuilder, actor: Actor, tokenizer: PreTrainedTokenizerBase) -> Teacher:
    """Build the teacher, and give the actor its divergence where that is part of the loss. Collective over the world."""
    cfg, geometry = models.cfg.teacher, actor.model.spec.geometry
    if cfg.divergence != "k1":
        actor.divergence = Divergence(cfg.divergence, cfg.beta, cfg.coef)
    found: dict[str, RoleModel] = {OTHERS: actor.model}
    average = None
    if cfg.weights == "average":
        model = _average(models, actor)
        found, average = {OTHERS: model}, Average(model, actor.model, cfg.decay)
    elif cfg.weights == "path":
        assert cfg.path is not None, "checked"
        paths = {OTHERS: cfg.path, **(cfg.sources or {})}
        found = {source: _of_path(models, path, source) for source, path in paths.items()}
    return Teacher(
        found,
        models.cfg.rollout.sampling.temperature,
        geometry.vocab_size,
        None if cfg.divergence == "k1" else min(cfg.top_k, geometry.vocab_size),
        _context(models.cfg, found, tokenizer),
        average,
    )


def _of_path(models: ModelBuilder, path: str, source: str) -> RoleModel:
    cfg, field = models.cfg.teacher, "teacher.path" if source == OTHERS else f"teacher.sources[{source}]"
    layout = ParallelLayout.of(cfg.layout, cfg.ranks, dist.get_world_size())
    overrides = Overrides.of("teacher", cfg)
    name = SAVED_AS if source == OTHERS else f"{SAVED_AS}[{source}]"
    return models.frozen(load_spec(path, field=field), path, layout, overrides, cfg, name=name, dtype=cfg.dtype)


def _average(models: ModelBuilder, actor: Actor) -> RoleModel:
    """Build a copy of the actor in its layout: in bf16 a small share of a step would be rounded away, so it is in fp32."""
    cfg, spec = models.cfg, load_spec(models.cfg.model.path)
    overrides = Overrides("actor.megatron", cfg.actor.megatron or {})
    dtype = "fp32" if cfg.teacher.dtype in (None, "auto") else cfg.teacher.dtype
    options = {"name": SAVED_AS, "dtype": dtype, "saved_as": SAVED_AS}
    return models.frozen(spec, cfg.model.path, actor.model.layout, overrides, cfg.teacher, **options)


def _context(cfg: Config, models: dict[str, RoleModel], tokenizer: PreTrainedTokenizerBase) -> Context | None:
    if cfg.teacher.context is None:
        return None
    from rlhf_mcore.data.context import PromptContext

    spec, trainer = cfg.teacher.context, cfg.trainer
    positions = min(model.spec.hf_config.max_position_embeddings for model in models.values())
    longest = min(positions, trainer.forward_tokens or 2 * trainer.max_tokens_per_microbatch)
    render = on_every_rank(lambda: PromptContext(spec, tokenizer, longest - cfg.rollout.sampling.max_new_tokens))

    def of_prompts(prompts: Sequence[Prompt]) -> list[list[int]]:
        return on_every_rank(lambda: render(prompts))

    return of_prompts
