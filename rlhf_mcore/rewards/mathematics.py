r"""The rule ``math``: compare the last marked answer of a response with the ground truth as mathematics.

This module decides the cases that the forms of two answers settle. math-verify decides the rest in worker processes, within
a deadline. The trainer never imports sympy.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_mcore.rewards.answers import fits, last_answer, truth_answer, truth_text
from rlhf_mcore.rewards.forms import (
    COMMAND,
    LIST,
    ORDERED,
    SET,
    AnswerForm,
    bracket_depth,
    letters,
    names_differ,
    read_answer,
)
from rlhf_mcore.rewards.pool import WorkerLimits, WorkerPool, encode_item
from rlhf_mcore.rewards.pooled_grader import PooledGrader, Verdict

if TYPE_CHECKING:
    from rlhf_mcore.rewards.worker import Call

MAX_CHARS = 400  # twice the longest answer of MATH
MAX_DEPTH = 12  # nesting depth of brackets
MAX_DIGITS = 40  # in a row
PRECISION = 60  # digits to which irrational numbers are compared; a smaller value counts as 0
CPU_S = 3.0  # per item; a typical item takes a few milliseconds
TIMEOUT_S = 60.0  # for computations that ignore the CPU timer, such as a power of two large numbers
MEMORY_GIB = 4.0
# Short texts with huge values: powers of powers, large exponents, factorials and binomials of large numbers.
_EXPLOSIVE = re.compile(
    r"[0-9)}]\s*(?:\^|\*\*)[\s{(+-]*[0-9.]+[\s})]*(?:\^|\*\*|!)"  # 9^{9^9}, 9^9!
    r"|(?:\^|\*\*)[\s{(+-]*[0-9]{4}"
    r"|[0-9]{4}[\s)}]*!|!\s*[)}]*\s*!"
    r"|binom\s*\{?\s*[0-9]{5}"
)

Ask = Callable[[str, str], bool]  # returns whether two LaTeX expressions, relations or equations are equal


class MathGrader(PooledGrader):
    r"""Grades 1 if the response's last marked answer is mathematically equal to the ground truth, according to math-verify.

    The answer is the number after a ``####``, the content of a box or the text after ``Answer:``, whichever comes last. An
    answer that is too long, too deeply nested or grows too fast equals nothing.
    """

    def question(self, response: str, ground_truth: Any) -> bytes | Verdict:
        """See ``PooledGrader``. No worker is needed if the forms of the two answers settle the question."""
        answer = last_answer(response) if fits(response) else None
        truth = truth_answer(truth_text(ground_truth))
        if not answer or not truth:
            return 0.0, None
        forms = read_answer(truth), read_answer(answer)
        if is_same(*forms, ask=lambda *_: False):
            return 1.0, None
        if not is_same(*forms, ask=lambda *_: True) or is_too_much(truth) or is_too_much(answer):
            return 0.0, None
        return encode_item({"truth": truth, "answer": answer})

    def make_pool(self) -> WorkerPool:
        """See ``PooledGrader``."""
        limits = WorkerLimits(self._workers, TIMEOUT_S, MEMORY_GIB, retries=0)
        return self._pools("reward rule 'math'", "math", {"cpu_s": CPU_S}, limits)

    def read_verdict(self, answer: Mapping[str, Any]) -> Verdict:
        """See ``PooledGrader``."""
        return (0.0, "timeout") if "expired" in answer else (float(answer["equal"]), None)


def is_too_much(text: str) -> bool:
    """Return whether an answer is too expensive to parse, judged by its text only."""
    if len(text) > MAX_CHARS or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text) or _EXPLOSIVE.search(text):
        return True
    return bracket_depth(text) > MAX_DEPTH


# ------------------------------------------------------------------------------------------------------------- comparing
def is_same(truth: AnswerForm, answer: AnswerForm, ask: Ask) -> bool:
    """Return whether two answers are mathematically the same. ``ask`` decides the questions that need a solver.

    With a constant ``ask`` the result shows what is certain: True if ``ask`` returns False, or False if ``ask`` returns True.
    """
    if not truth.spelling or not answer.spelling:
        return False
    if names_differ(truth, answer):
        return _are_equations(truth, answer) and ask(truth.as_equation, answer.as_equation)
    if truth.spelling == answer.spelling:
        return True
    if "text" in (truth.kind, answer.kind):
        return False
    if truth.value is not None and answer.value is not None:
        return _are_equal_numbers(truth, answer)
    if "equation" in (truth.kind, answer.kind):
        return _are_equations(truth, answer) and ask(truth.as_equation, answer.as_equation)
    if truth.parts and answer.parts:
        return _are_same_collections(truth, answer, ask)
    for one, other in ((truth, answer), (answer, truth)):
        if one.brackets == SET and len(one.parts) == 1 and one.parts[0].spelling != r"\emptyset":
            return is_same(one.parts[0], other, ask) if one is truth else is_same(other, one.parts[0], ask)
    if {truth.kind, answer.kind} & {"relation", "collection"} and not (_is_range(truth) and _is_range(answer)):
        return False
    return not _is_other_case(truth, answer) and ask(truth.source, answer.source)


def _are_equations(truth: AnswerForm, answer: AnswerForm) -> bool:
    """Return whether both answers are equations. "x = 3" is a value, and does not equal an equation with solution 3."""
    return all(
        each.kind == "equation" or (each.name and each.kind == "expression" and each.has_variables)
        for each in (truth, answer)
    )


def _are_equal_numbers(truth: AnswerForm, answer: AnswerForm) -> bool:
    """Return whether two numbers are equal. 50% equals both 50 and 1/2."""
    assert truth.value is not None and answer.value is not None
    if truth.is_percent == answer.is_percent:
        return truth.value == answer.value
    percent, other = (truth.value, answer.value) if truth.is_percent else (answer.value, truth.value)
    return other in (percent, percent / 100)


def _is_other_case(truth: AnswerForm, answer: AnswerForm) -> bool:
    """Return whether a letter is upper case in one answer and lower case in the other."""
    ours, theirs = ({*letters(each.source), *COMMAND.findall(each.source)} for each in (truth, answer))
    return bool({name.lower() for name in ours - theirs} & {name.lower() for name in theirs - ours})


def _is_range(answer: AnswerForm) -> bool:
    """Return whether an answer is an interval, a union of intervals, or an equivalent relation."""
    return (
        answer.kind == "relation"
        or answer.brackets in ORDERED[:4]
        or bool(re.search(r"\\(?:cup|cap|mathbb|setminus)", answer.source))
    )


def _are_same_collections(truth: AnswerForm, answer: AnswerForm, ask: Ask) -> bool:
    ours, theirs = _assignments(truth), _assignments(answer)
    if ours is not None and theirs is not None:
        return ours.keys() == theirs.keys() and all(is_same(ours[name], theirs[name], ask) for name in ours)
    if (ours is None) != (theirs is None):
        values, other = (ours, answer) if ours is not None else (theirs, truth)
        if values is None or other.brackets != "()" or len(other.parts) != len(values):
            return False
        pairs = [(values[name], part) for name, part in zip(sorted(values), other.parts, strict=True)]
        return all(is_same(a, b, ask) if other is answer else is_same(b, a, ask) for a, b in pairs)
    if truth.brackets in ORDERED or answer.brackets in ORDERED:
        same_shape = truth.brackets == answer.brackets and len(truth.parts) == len(answer.parts)
        return same_shape and all(is_same(a, b, ask) for a, b in zip(truth.parts, answer.parts, strict=True))
    return _are_matched(truth.parts, answer.parts, ask)


def _assignments(answer: AnswerForm) -> dict[str, AnswerForm] | None:
    """Return the values of several variables by name (x = 1, y = 2), or None if the answer is something else."""
    if answer.brackets == "()" and answer.name.startswith("("):
        return dict(zip(answer.name[1:-1].split(","), answer.parts, strict=False))
    names = [part.name for part in answer.parts]
    is_assignment = answer.brackets in (LIST, SET, "()") and all(names) and len(set(names)) == len(names) > 1
    return {part.name: replace(part, name="") for part in answer.parts} if is_assignment else None


def _are_matched(ours: Sequence[AnswerForm], theirs: Sequence[AnswerForm], ask: Ask) -> bool:
    """Return whether the elements of two collections can be paired one to one (Kuhn's augmenting paths)."""
    if len(ours) != len(theirs):
        return False
    taken: dict[int, int] = {}  # index in theirs -> index in ours

    def take(index: int, seen: set[int]) -> bool:
        for other in range(len(theirs)):
            if other in seen or (ours[index].brackets == SET) != (theirs[other].brackets == SET):
                continue
            if is_same(ours[index], theirs[other], ask):
                seen.add(other)
                if other not in taken or take(taken[other], seen):
                    taken[other] = index
                    return True
        return False

    return all(take(index, set()) for index in range(len(ours)))


# --------------------------------------------------------------------------------------------------- in a worker process
class _Expired(BaseException):
    """The time for an item is over. A BaseException, so that no ``except Exception`` hides it."""


def load_math(cpu_s: float) -> Call:
    """Load math-verify. It answers an item ``{"truth", "answer"}`` with ``{"equal"}``, or ``{"expired"}`` after ``cpu_s`` seconds.

    The limit counts CPU seconds, so that a verdict does not depend on the load of the machine.
    """
    with open(os.devnull, "wb") as nowhere:  # the parser prints invalid input, which the model controls
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, simplify
    from sympy.core.random import seed

    # LaTeX only, because the extraction of plain expressions may take part of a text for the whole. Units are already removed, so
    # a letter at the end that looks like a unit (2t, 5c) is a variable.
    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    targets = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)]

    def ask(truth: str, answer: str) -> bool:
        ours, theirs = (
            parse(f"${text}$", targets, "no_fallback", parsing_timeout=None)[:1] for text in (truth, answer)
        )
        if not ours or not theirs or isinstance(ours[0], str) or isinstance(theirs[0], str):
            return False
        if isinstance(ours[0], Eq) and isinstance(theirs[0], Eq):  # equal if one equation is a multiple of the other
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
        signal.setitimer(signal.ITIMER_PROF, cpu_s, 1.0)  # repeated, in case library code catches the first exception
        try:
            return {"equal": is_same(read_answer(item["truth"]), read_answer(item["answer"]), ask)}
        except MemoryError:
            raise
        except _Expired:
            return {"expired": True}
        except Exception:  # an answer that cannot be parsed or compared is not equal
            return {"equal": False}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    call({"truth": r"\frac{1}{2}", "answer": "0.5"})  # fills the parser's tables, which takes longer than an item
    return call
