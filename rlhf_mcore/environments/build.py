"""From a run's configuration to its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlhf_mcore.data.tokenizer import load_tokenizer
from rlhf_mcore.environments.episodes import EpisodeLimits, Episodes
from rlhf_mcore.environments.generator import EpisodeGenerator
from rlhf_mcore.environments.reward import EnvironmentReward
from rlhf_mcore.environments.sessions import Sessions
from rlhf_mcore.environments.turn_text import TurnText
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.rewards.pool import WorkerLimits, WorkerPool, default_workers
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.trainer.rollouts import RolloutWorker, episode_request

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlhf_mcore.config.schema import Config, EnvironmentConfig
    from rlhf_mcore.protocols import EngineRank, RewardFunction, StreamingGenerator
    from rlhf_mcore.rewards.function import Pools
    from rlhf_mcore.trainer.rollouts import Decode


def build_graders(cfg: Config, pools: Pools = WorkerPool) -> RewardFunction:
    """What scores the responses of a run, but for a reward model. ``pools`` makes the workers of graders.

    Raises:
        ConfigError: naming the key of ``reward``.
    """
    if cfg.environment.function is None:
        return build_reward(cfg.reward, pools)
    score = cfg.environment.score
    return EnvironmentReward(None if score == "environment" else build_reward(cfg.reward, pools), adds=score == "sum")


@dataclass(frozen=True, slots=True)
class EpisodeOrder:
    """What an engine's episodes are built from, in the process of its first rank.

    ``folder`` is where the run was started: files are named from there. ``num_engines`` may share the cores of a machine.
    """

    own: EnvironmentConfig
    chat_template: str  # data.apply_chat_template
    tokenizer_dir: str
    fails: bool
    overlap: bool
    folder: str
    num_engines: int
    variables: Mapping[str, str] = field(repr=False)  # those of environment.env

    @classmethod
    def of(cls, cfg: Config, num_engines: int) -> EpisodeOrder:
        """The environment of a run."""
        own, in_time = cfg.environment, cfg.trainer.max_staleness > 0 and not cfg.rollout.deterministic_order
        return cls(
            own,
            cfg.data.apply_chat_template,
            cfg.model.tokenizer_path or cfg.model.path,
            fails=cfg.reward.on_error == "fail",
            overlap=in_time if own.overlap is None else own.overlap,
            folder=os.getcwd(),
            num_engines=num_engines,
            variables={name: os.environ[name] for name in own.env if name in os.environ},
        )

    def sessions(self) -> Sessions:
        """The processes of the environment; none is started yet."""
        own = self.own
        assert own.function is not None
        os.environ.update(self.variables)
        workers = own.workers or default_workers(self.num_engines)
        limits = WorkerLimits(workers, own.timeout_s, own.memory_gib, tuple(own.env))
        return Sessions(own.function, own.options or {}, limits, self.folder)

    def build(self) -> Episodes:
        """The episodes."""
        own = self.own
        text = TurnText(load_tokenizer(self.tokenizer_dir), self.chat_template, keep=own.rewritten_history == "keep")
        bounds = EpisodeLimits(own.max_turns, own.max_tokens, own.max_seconds)
        return Episodes(self.sessions(), text, bounds, fails=self.fails, overlap=self.overlap)


def check_environment(cfg: Config) -> None:
    """Load the environment, where there is one, once in a process of its own.

    Raises:
        ConfigError: naming ``environment.function`` or its options.
    """
    if cfg.environment.function is not None:
        sessions = EpisodeOrder.of(cfg, 1).sessions()
        try:
            sessions.check()
        finally:
            sessions.close_all()


def episode_worker(cfg: Config, generator: StreamingGenerator, engine: EngineRank, decode: Decode) -> RolloutWorker:
    """This rank's engine in the environment. Collective over the world."""
    order = EpisodeOrder.of(cfg, engine.num_engines)
    episodes = on_every_rank(lambda: order.build() if engine.is_lead else None)
    plays = EpisodeGenerator(generator, episodes, _engine_group(engine))
    return RolloutWorker(plays, engine, decode, episode_request)


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
