"""Mathematical equality of two answers, judged by math-verify in worker processes. The trainer never imports sympy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate

from rlhf_mcore.rewards.pools import Pools, local_pool

MAX_CHARS = 400  # the longest answer of MATH has half of that
MAX_DEPTH = 12  # of brackets
MAX_DIGITS = 40  # in a row
CPU_S = 3.0  # of an item; an ordinary one takes some milliseconds
TIMEOUT_S = 60.0  # for what does not look at the clock, such as a power of two large numbers
MEMORY_GIB = 4.0
# What small text makes large: powers of powers, large exponents, factorials and binomials of large numbers.
_EXPLOSIVE = re.compile(
    r"[0-9)}]\s*(?:\^|\*\*)[\s{(+-]*[0-9.]+[\s})]*(?:\^|\*\*|!)"  # 9^{9^9}, 9^9!
    r"|(?:\^|\*\*)[\s{(+-]*[0-9]{4}"
    r"|[0-9]{4}[\s)}]*!|!\s*[)}]*\s*!"
    r"|binom\s*\{?\s*[0-9]{5}"
)

Verdict = tuple[float, "str | None"]  # 1 or 0, and why there is none: timeout | error


class Equivalence:
    """Compares answers in LaTeX or plain text with ground truths.

    Args:
        workers: processes; None: this rank's share of the cores. They are started when there is something to compare.
        pools: makes them, as ``rewards.pools.Pools``.
    """

    def __init__(self, workers: int | None = None, pools: Pools = local_pool) -> None:
        from rlhf_mcore.rewards.pool import WorkerLimits, default_workers

        limits = WorkerLimits(workers or default_workers(), TIMEOUT_S, MEMORY_GIB, retries=0)
        self._pool = pools("reward rule 'math'", "math", {"cpu_s": CPU_S}, limits)
        self.close = self._pool.close

    def submit(self, pairs: Sequence[tuple[str, str]]) -> Callable[[], list[Verdict]]:
        """Begin with pairs (ground truth, answer). What is returned waits, and has a verdict for each.

        What is too long, too deep or grows too fast is not equal to anything.
        """
        verdicts: list[Verdict] = [(0.0, None)] * len(pairs)
        asked = [index for index, pair in enumerate(pairs) if not any(map(is_too_much, pair))]
        items = [json.dumps({"truth": pairs[i][0], "answer": pairs[i][1]}).encode("ascii") for i in asked]
        job = self._pool.submit(items) if items else None

        def finish() -> list[Verdict]:
            for index, outcome in zip(asked, job.outcomes() if job is not None else [], strict=True):
                assert outcome is not None
                if outcome.timed_out or "expired" in outcome.answer:
                    verdicts[index] = (0.0, "timeout")
                elif outcome.lost:
                    verdicts[index] = (0.0, "error")
                else:
                    verdicts[index] = (float(outcome.answer["equal"]), None)
            return verdicts

        return finish


def is_too_much(text: str) -> bool:
    """Whether an answer is beyond what is worth parsing. Looks at the text only."""
    if len(text) > MAX_CHARS or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text) or _EXPLOSIVE.search(text):
        return True
    return max(accumulate((letter in "([{") - (letter in ")]}") for letter in text), default=0) > MAX_DEPTH
