"""From a run's configuration to its environment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from rlhf_mcore.environments.episodes import EpisodeLimits, Episodes
from rlhf_mcore.environments.reward import EnvironmentReward
from rlhf_mcore.environments.rollouts import EpisodeWorker
from rlhf_mcore.environments.sessions import Sessions
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.rewards.pool import WorkerLimits, WorkerPool, default_workers
from rlhf_mcore.rewards.reward import build_reward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.protocols import EngineRank, RewardFunction, StreamingGenerator
    from rlhf_mcore.rewards.function import Pools


def build_graders(cfg: Config, pools: Pools = WorkerPool) -> RewardFunction:
    """What scores the responses of a run, but for a reward model. ``pools`` makes the workers of graders.

    Raises:
        ConfigError: naming the key of ``reward``.
    """
    if cfg.environment.function is None:
        return build_reward(cfg.reward, pools)
    score = cfg.environment.score
    return EnvironmentReward(None if score == "environment" else build_reward(cfg.reward, pools), adds=score == "sum")


def build_episodes(cfg: Config, tokenizer: PreTrainedTokenizerBase) -> Episodes:
    """The environment that ``cfg`` names, which is loaded once to see that it can be.

    Raises:
        ConfigError: naming ``environment.function`` or its options.
    """
    own = cfg.environment
    assert own.function is not None
    limits = WorkerLimits(own.workers or default_workers(), own.timeout_s, own.memory_gib, tuple(own.env))
    sessions = Sessions(own.function, own.options or {}, limits)
    sessions.check()
    text = TurnText(tokenizer, cfg.data.apply_chat_template, keep=own.rewritten_history == "keep")
    bounds = EpisodeLimits(own.max_turns, own.max_tokens, own.max_seconds)
    return Episodes(sessions, text, bounds, fails=cfg.reward.on_error == "fail")


def episode_worker(
    cfg: Config,
    generator: StreamingGenerator,
    engine: EngineRank,
    tokenizer: PreTrainedTokenizerBase,
    decode: Callable[[Sequence[Sequence[int]]], list[str]],
) -> EpisodeWorker:
    """This rank's engine in the environment. Collective over the world."""
    episodes = on_every_rank(lambda: build_episodes(cfg, tokenizer) if engine.is_lead else None)
    return EpisodeWorker(generator, engine, decode, episodes, _engine_group(engine), cfg.environment.overlap)


def _engine_group(engine: EngineRank) -> dist.ProcessGroup | None:
    """The ranks of this rank's engine, where it has several. Collective over the world."""
    size = dist.get_world_size() // engine.num_engines
    if size == 1:
        return None
    groups = [
        dist.new_group(list(range(first, first + size)), backend="gloo")
        for first in range(0, dist.get_world_size(), size)
    ]
    return groups[engine.engine_index]
