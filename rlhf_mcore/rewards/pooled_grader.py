"""Base class of graders that use worker processes, so that parsing or running a response cannot block or end the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.pool import Outcome, Pools, WorkerPool, default_workers, local_pool

Verdict = tuple[float, "str | None"]  # a grade, and the cause if there is none: timeout | error


class PooledGrader(ABC):
    """Grades many responses per call. Equal questions are sent to a worker once.

    Args:
        workers: number of processes; None: this rank's share of the cores. They start with the first question.
        pools: builds the worker pool.
    """

    def __init__(self, workers: int | None = None, pools: Pools = local_pool) -> None:
        self._workers, self._pools = workers or default_workers(), pools
        self._pool: WorkerPool | None = None

    def __call__(self, response: str, ground_truth: Any) -> float:
        [(grade, _)] = run(self.grade([(response, ground_truth)]))
        return grade

    async def grade(self, pairs: Sequence[tuple[str, Any]]) -> list[Verdict]:
        """Return the verdicts of responses with their ground truths, in order.

        A response without a grade in time gets 0 with "timeout" or "error".
        """
        questions = [self.question(*pair) for pair in pairs]
        asked = list(dict.fromkeys(each for each in questions if isinstance(each, bytes)))
        outcomes = await self.start().answer_all(asked) if asked else []
        verdicts = dict(zip(asked, map(self._verdict, outcomes), strict=True))
        return [verdicts[each] if isinstance(each, bytes) else each for each in questions]

    def close(self) -> None:
        """Stop the worker processes and their programs."""
        if self._pool is not None:
            self._pool.close()

    def start(self) -> WorkerPool:
        """Return the pool. The first call builds it."""
        if self._pool is None:
            self._pool = self.make_pool()
        return self._pool

    @abstractmethod
    def question(self, response: str, ground_truth: Any) -> bytes | Verdict:
        """Return the item for a worker, or the verdict if no worker is needed."""

    @abstractmethod
    def make_pool(self) -> WorkerPool:
        """Build the pool. This starts no process yet."""

    @abstractmethod
    def read_verdict(self, answer: Mapping[str, Any]) -> Verdict:
        """Return the verdict in a worker's answer."""

    def _verdict(self, outcome: Outcome | None) -> Verdict:
        assert outcome is not None, "items are skipped only with stop_at_failure"
        if outcome.lost:
            return 0.0, "timeout" if outcome.timed_out else "error"
        return self.read_verdict(outcome.answer)
