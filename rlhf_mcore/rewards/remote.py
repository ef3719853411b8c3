"""The client of a reward server: of ``rlhf-mcore serve-reward``, or of a server of the user's that answers alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_mcore.rewards.http_pool import HttpPool
from rlhf_mcore.rewards.items import Outcome
from rlhf_mcore.rewards.wire import MAX_ANSWER_BYTES, read_scores


class ScorePool(HttpPool):
    """Asks the server that ``reward.remote`` names for scores, as ``rlhf_mcore.rewards.wire`` describes it."""

    max_answer_bytes = MAX_ANSWER_BYTES

    def encode(self, items: Sequence[bytes]) -> bytes:
        """Return the request for some items."""
        return b'{"items":[' + b",".join(items) + b"]}"

    def decode(self, answer: Any, count: int) -> list[Outcome]:
        """Return their scores."""
        return read_scores(answer, count)
