"""The rule ``math``: answers are compared as mathematics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mcore.rewards.answers import (
    fits,
    last_answer,
    truth_answer,
    truth_text,
)
from rlhf_mcore.rewards.comparison import is_same
from rlhf_mcore.rewards.forms import read_answer
from rlhf_mcore.rewards.pools import Pools, Verdict, local_pool

if TYPE_CHECKING:
    from rlhf_mcore.rewards.symbolic import Equivalence


class MathGrader:
    r"""1 if what a response marks last as its answer is mathematically equal to the ground truth, as math-verify judges it.

    The answer is the number behind a ``####``, the content of a box or what follows ``Answer:``, whichever is last. What spelling
    alone decides is decided here; the rest is parsed in worker processes, within a deadline (``rewards.symbolic``).
    """

    def __init__(self, workers: int | None = None, pools: Pools = local_pool) -> None:
        self._workers, self._pools = workers, pools
        self._equivalence: Equivalence | None = None

    def __call__(self, response: str, ground_truth: Any) -> float:
        return self.grade([(response, ground_truth)])[0][0]

    def grade(self, pairs: Sequence[tuple[str, Any]]) -> list[Verdict]:
        """Submit, and wait."""
        return self.submit(pairs)()

    def submit(self, pairs: Sequence[tuple[str, Any]]) -> Callable[[], list[Verdict]]:
        """Begin to grade. Where there is no grade in time, "timeout" or "error" stands beside a 0."""
        grades: list[Verdict] = [(0.0, None)] * len(pairs)
        open_questions: dict[tuple[str, str], list[int]] = {}
        for index, (response, ground_truth) in enumerate(pairs):
            answer = last_answer(response) if fits(response) else None
            truth = truth_answer(truth_text(ground_truth))
            if not answer or not truth:
                continue
            forms = read_answer(truth), read_answer(answer)
            if is_same(*forms, ask=lambda *_: False):
                grades[index] = (1.0, None)
            elif is_same(*forms, ask=lambda *_: True):
                open_questions.setdefault((truth, answer), []).append(index)
        if open_questions and self._equivalence is None:
            from rlhf_mcore.rewards.symbolic import Equivalence

            self._equivalence = Equivalence(self._workers, self._pools)
        judged = self._equivalence.submit(list(open_questions)) if self._equivalence is not None else list

        def finish() -> list[Verdict]:
            for indices, verdict in zip(open_questions.values(), judged(), strict=True):
                for index in indices:
                    grades[index] = verdict
            return grades

        return finish

    def close(self) -> None:
        """End the worker processes."""
        if self._equivalence is not None:
            self._equivalence.close()
