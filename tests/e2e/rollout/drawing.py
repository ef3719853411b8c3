"""Trajectories of an engine, without the loop around it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.rollout import Engine
from rlhf_mcore.trainer.rollouts import RolloutWorker
from rlhf_mcore.types import Prompt, Sampling, Trajectory


def worker_of(engine: Engine, tokenizer_dir: str | None = None) -> RolloutWorker:
    """Without a tokenizer responses have no text."""
    if tokenizer_dir is None:
        return RolloutWorker(engine, engine.rank, lambda rows: [""] * len(rows))
    decode = partial(load_tokenizer(tokenizer_dir).batch_decode, skip_special_tokens=True)
    return RolloutWorker(engine, engine.rank, decode)


def generate(engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
    """Responses without their texts."""
    return worker_of(engine).generate(prompts, sampling, step=step)
