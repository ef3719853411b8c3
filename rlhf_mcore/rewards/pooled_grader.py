"""Graders whose questions worker processes answer: what is parsed or run there must not hold or end the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf_mcore.rewards.pool import Outcome, Pools, WorkerPool, default_workers, local_pool

Verdict = tuple[float, "str | None"]  # a grade, and why there is none: timeout | error


class PooledGrader(ABC):
    """Grades many responses at a time. A question that occurs several times is asked once.

    Args:
        workers: processes; None: this rank's share of the cores. They are started when there is something to ask.
        pools: makes them.
    """

    def __init__(self, workers: int | None = None, pools: Pools = local_pool) -> None:
        self._workers, self._pools = workers or default_workers(), pools
        self._pool: WorkerPool | None = None

    def __call__(self, response: str, ground_truth: Any) -> float:
        return self.grade([(response, ground_truth)])[0][0]

    def grade(self, pairs: Sequence[tuple[str, Any]]) -> list[Verdict]:
        """Submit, and wait."""
        return self.submit(pairs)()

    def submit(self, pairs: Sequence[tuple[str, Any]]) -> Callable[[], list[Verdict]]:
        """Begin with responses and their ground truths. What is returned waits for the verdicts, in order.

        If there is no grade in time, "timeout" or "error" stands beside a 0.
        """
        questions = [self.question(*pair) for pair in pairs]
        asked = list(dict.fromkeys(each for each in questions if isinstance(each, bytes)))
        collect = self.start().submit(asked) if asked else list

        def finish() -> list[Verdict]:
            verdicts = dict(zip(asked, map(self._verdict, collect()), strict=True))
            return [verdicts[each] if isinstance(each, bytes) else each for each in questions]

        return finish

    def close(self) -> None:
        """End the worker processes and their programs."""
        if self._pool is not None:
            self._pool.close()

    def start(self) -> WorkerPool:
        """Return the pool, which is made once."""
        if self._pool is None:
            self._pool = self.make_pool()
        return self._pool

    @abstractmethod
    def question(self, response: str, ground_truth: Any) -> bytes | Verdict:
        """Return the item that a worker is asked, or the verdict if no worker is needed."""

    @abstractmethod
    def make_pool(self) -> WorkerPool:
        """Make the pool. Nothing is started yet."""

    @abstractmethod
    def read_verdict(self, answer: Mapping[str, Any]) -> Verdict:
        """Return the verdict that a worker has answered with."""

    def _verdict(self, outcome: Outcome | None) -> Verdict:
        assert outcome is not None, "no item is left out unless a failure is to stop the others"
        if outcome.lost:
            return 0.0, "timeout" if outcome.timed_out else "error"
        return self.read_verdict(outcome.answer)
