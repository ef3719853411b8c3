"""Mathematical equality of two answers, judged by math-verify in worker processes. The trainer never imports sympy."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from rlhf_mcore.rewards.items import WorkerLimits
from rlhf_mcore.rewards.pools import Pools, Verdict, default_workers, local_pool

if TYPE_CHECKING:
    from rlhf_mcore.rewards.worker import Call

MAX_CHARS = 400  # the longest answer of MATH has half of that
MAX_DEPTH = 12  # of brackets
MAX_DIGITS = 40  # in a row
PRECISION = 60  # digits to which irrational numbers are compared; what is smaller counts as 0
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


class Equivalence:
    """Compares answers in LaTeX or plain text with ground truths.

    Args:
        workers: processes; None: this rank's share of the cores. They are started when there is something to compare.
        pools: makes them, as ``rewards.pools.Pools``.
    """

    def __init__(self, workers: int | None = None, pools: Pools = local_pool) -> None:
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
        collect = self._pool.submit(items) if items else list

        def finish() -> list[Verdict]:
            for index, outcome in zip(asked, collect(), strict=True):
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
    """Return whether an answer is beyond what is worth parsing. Looks at the text only."""
    if len(text) > MAX_CHARS or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text) or _EXPLOSIVE.search(text):
        return True
    return max(accumulate((letter in "([{") - (letter in ")]}") for letter in text), default=0) > MAX_DEPTH


# --------------------------------------------------------------------------------------------------- in a worker process
class _Expired(BaseException):
    """The time for an item is over. No ``except Exception`` on the way swallows it."""


def load_math(cpu_s: float) -> Call:
    """Load math-verify, which judges items ``{"truth", "answer"}``: ``{"equal"}``, or ``{"expired"}`` after ``cpu_s`` seconds.

    The seconds are those of the processor, so that a verdict does not depend on what else the machine is doing.
    """
    with open(os.devnull, "wb") as nowhere:  # the parser prints what it does not understand, which is up to the model
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, simplify
    from sympy.core.random import seed

    from rlhf_mcore.rewards.comparison import is_same
    from rlhf_mcore.rewards.forms import read_answer

    # As LaTeX alone: the extraction of plain expressions takes a part of a text for the whole. Units are gone; what looks like one
    # at the end (2t, 5c) is a variable.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    targets = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)]

    def ask(truth: str, answer: str) -> bool:
        ours, theirs = (
            parse(f"${text}$", targets, "no_fallback", parsing_timeout=None)[:1] for text in (truth, answer)
        )
        if not ours or not theirs or isinstance(ours[0], str) or isinstance(theirs[0], str):
            return False
        if isinstance(ours[0], Eq) and isinstance(theirs[0], Eq):  # one equation is a multiple of the other
            sides = [each.lhs.doit() - each.rhs.doit() for each in (ours[0], theirs[0])]
            return bool(simplify(sides[0] / sides[1]).is_number)
        return bool(
            verify(ours, theirs, numeric_precision=PRECISION, allow_set_relation_comp=True, timeout_seconds=None)
        )

    def expire(*_: Any) -> None:
        raise _Expired

    signal.signal(signal.SIGPROF, expire)

    def call(item: Mapping[str, str]) -> dict[str, Any]:
        seed(0)
        signal.setitimer(signal.ITIMER_PROF, cpu_s, 1.0)  # again each second, should something swallow it
        try:
            return {"equal": is_same(read_answer(item["truth"]), read_answer(item["answer"]), ask)}
        except MemoryError:
            raise
        except _Expired:
            return {"expired": True}
        except Exception:  # what cannot be parsed or compared is not equal
            return {"equal": False}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    call({"truth": r"\frac{1}{2}", "answer": "0.5"})  # fills the parser's tables, which takes longer than an item
    return call
