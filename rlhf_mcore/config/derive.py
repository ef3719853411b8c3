"""Values that follow from others: the one place where "null means ..." is decided."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

from rlhf_mcore.config.schema import Config


def default_world_size(cfg: Config) -> int:
    """Number of processes of a run: ``trainer.world_size``, else the smallest that both layouts divide."""
    if cfg.trainer.world_size is not None:
        return cfg.trainer.world_size
    layout = cfg.actor.layout
    experts = (layout.tp if layout.etp is None else layout.etp) * layout.ep * layout.pp
    return math.lcm(layout.tp * layout.pp * layout.cp, experts, cfg.rollout.layout.tp)


def balanced_stages(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage, as equal as can be."""
    borders = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return [high - low for low, high in pairwise(borders)]


def updates_per_run(cfg: Config) -> int:
    """Number of optimizer updates of the actor over the whole run."""
    trainer = cfg.trainer
    minibatch_size = trainer.minibatch_size or trainer.prompts_per_step
    return trainer.num_steps * trainer.ppo_epochs * (trainer.prompts_per_step // minibatch_size)


def resolve(cfg: Config) -> Config:
    """A copy of a valid configuration with its derived fields filled in.

    ``model.dtype: auto`` stays: the platform decides it at run time. So does ``trainer.world_size``: under the
    user's own torchrun it is not ours to say.
    """
    cfg = copy.deepcopy(cfg)
    sampling, trainer = cfg.rollout.sampling, cfg.trainer
    if trainer.minibatch_size is None:
        trainer.minibatch_size = trainer.prompts_per_step
    if cfg.rollout.max_model_len is None:
        cfg.rollout.max_model_len = cfg.data.max_prompt_tokens + max_new_tokens(cfg)
    _resolve_algorithm(cfg)
    if cfg.evaluate.max_new_tokens is None:
        cfg.evaluate.max_new_tokens = sampling.max_new_tokens
    if cfg.actor.optimizer.schedule.total_updates is None:
        cfg.actor.optimizer.schedule.total_updates = updates_per_run(cfg)
    if cfg.model.tokenizer_path is None:
        cfg.model.tokenizer_path = cfg.model.path
    return cfg


def _resolve_algorithm(cfg: Config) -> None:
    algorithm, longest = cfg.algorithm, cfg.rollout.sampling.max_new_tokens
    if algorithm.constant_length is None:
        algorithm.constant_length = longest
    if algorithm.overlong.max_tokens is None:
        algorithm.overlong.max_tokens = longest
    if algorithm.overlong.cache_tokens is None:
        algorithm.overlong.cache_tokens = max(algorithm.overlong.max_tokens // 5, 1)
    if algorithm.kl.controller.steps is None:
        algorithm.kl.controller.steps = cfg.trainer.num_steps


def needs_critic(cfg: Config) -> bool:
    """Whether advantages are computed from values."""
    if cfg.algorithm.use_critic == "auto":
        return cfg.algorithm.advantage == "gae"
    return cfg.algorithm.use_critic == "true"


def max_new_tokens(cfg: Config) -> int:
    """The longest response that training or evaluation asks for."""
    return max(cfg.rollout.sampling.max_new_tokens, cfg.evaluate.max_new_tokens or 0)
