"""The client of a reward server: what ``rlhf-mcore serve-reward`` is, or a server of the user's that answers alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.rewards.function import PooledReward
from rlhf_mcore.rewards.http_pool import HttpPool, Limits, token_of
from rlhf_mcore.rewards.wire import MAX_ANSWER_BYTES, read_answers, request_of


@dataclass(frozen=True, slots=True)
class Scores:
    """Batches of items, and their scores. See ``rlhf_mcore.rewards.wire``."""

    max_answer_bytes: int = MAX_ANSWER_BYTES

    def encode(self, items: Sequence[bytes]) -> bytes:
        """The request for some items."""
        return request_of(items)

    def decode(self, answer: Any, count: int) -> list[dict[str, Any]]:
        """Their scores."""
        return read_answers(answer, count)


def remote_reward(cfg: RewardConfig) -> PooledReward:
    """The server that ``reward.remote`` names.

    Raises:
        ConfigError: its token is not there.
    """
    own = cfg.remote
    assert own.url is not None
    limits = Limits("reward.remote", own.batch_size, own.concurrency, own.timeout_s, own.deadline_s, own.retries)
    name = f"reward.remote.url={own.url}"
    pool = HttpPool(name, own.url, token_of(own.token_env, "reward.remote.token_env"), Scores(), limits)
    return PooledReward(name, pool, cfg.on_error, with_prompt=True)
