r"""Rule graders: functions ``(response, ground_truth) -> float in [0, 1]`` over text written by a model.

The text is hostile by assumption. Nothing here evaluates or executes it; lengths and exponents are capped before any
arithmetic, every scan is linear in the length, and no response makes a grader raise. A response longer than
``MAX_RESPONSE_CHARS`` scores 0. ``math`` alone parses an answer symbolically, in a worker process, and ``code`` alone runs one, in
a sandbox.

A ground truth may be a number, an answer in LaTeX or plain text, or a worked solution that marks its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import registering
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.rewards.answers import (
    MAX_RESPONSE_CHARS,
    answer_lines,
    boxes,
    chosen_letters,
    fits,
    last_answer,
    last_boxed,
    letters_of,
    marked_number,
    marked_numbers,
    number_of,
    within,
)
from rlhf_mcore.rewards.forms import canonical, is_same, names_differ, read_answer
from rlhf_mcore.rewards.latex import MAX_NUMBER_CHARS, parse_number
from rlhf_mcore.rewards.pools import Pools, Verdict, local_pool
from rlhf_mcore.rewards.shape import Language, Length, Pattern

if TYPE_CHECKING:
    from rlhf_mcore.rewards.symbolic import Equivalence

__all__ = [
    "GRADERS",
    "MAX_RESPONSE_CHARS",
    "MathGrader",
    "answer_format",
    "answer_line",
    "answer_of",
    "boxed",
    "exact_match",
    "final_number",
    "last_boxed",
    "parse_number",
]

Grader = Callable[[str, Any], float]
GRADERS: dict[str, Grader] = {}  # with the options that a rule has by default
grader = registering(GRADERS, choices.GRADERS)  # a decorator: what it decorates is the rule of that name


@runtime_checkable
class BatchGrader(Protocol):
    """A grader with processes of its own, which judges many responses at a time."""

    def __call__(self, response: str, ground_truth: Any) -> float: ...

    def submit(self, pairs: Sequence[tuple[str, Any]]) -> Callable[[], list[Verdict]]:
        """Begin with responses and their ground truths. What is returned waits for the verdicts, in order."""
        ...

    def close(self) -> None: ...


_BLANK = re.compile(r"\s*")
_MAX_TRUTH_BITS = 4096  # of an int: str() of a huge one raises


@grader("exact_match")
def exact_match(response: str, ground_truth: Any) -> float:
    """Grade 1 if the response equals the ground truth up to whitespace around it. An empty ground truth matches nothing."""
    truth = _truth_text(ground_truth)
    return float(bool(truth) and fits(response) and response.strip() == truth)


@grader("final_number")
def final_number(response: str, ground_truth: Any) -> float:
    r"""Grade 1 if the response's answer is a number equal to the ground truth.

    The answer is the number behind the last ``####`` that has one, or the content of the last ``\boxed{}`` where that is a number;
    the later of the two. Units, currency, thousands separators, ``%`` and a trailing dot do not count; equality is exact
    (4.50 = 4.5 = 9/2, 1e3 = 1000).
    """
    if not fits(response):
        return 0.0
    truth = _truth_text(ground_truth)
    marked = marked_number(truth)
    expected = number_of(truth) if marked is None else marked
    return float(expected is not None and marked_number(response) == expected)


@grader("boxed")
def boxed(response: str, ground_truth: Any) -> float:
    r"""Grade 1 if the content of the last balanced ``\boxed{}`` is the ground truth in another spelling (see ``canonical``).

    An empty box matches nothing.
    """
    return _same(last_boxed(response), ground_truth) if fits(response) else 0.0


@grader("answer_line")
def answer_line(response: str, ground_truth: Any) -> float:
    """Grade 1 if what follows the last ``Answer:``, on its line, is the ground truth in another spelling (see ``canonical``).

    It is what the prompts of DAPO-Math-17k (Yu et al. 2025, arXiv 2503.14476) ask for.
    """
    lines = answer_lines(response)[-1:] if fits(response) else []
    return _same(within(lines[0][1]), ground_truth) if lines else 0.0


@grader("format")
def answer_format(response: str, ground_truth: Any = None) -> float:
    r"""Grade 1 if the response marks exactly one answer: one ``#### number`` or one ``\boxed{...}`` that is not empty.

    Where there is neither, one line ``Answer: ...`` does. Right or wrong does not matter, so ``ground_truth`` is ignored. A nested
    box is a second one.
    """
    if not fits(response):
        return 0.0
    places = list(boxes(response))
    if any(_BLANK.fullmatch(response, start, end) for start, end in places):
        return 0.0
    num_marks = len(places) + sum(1 for _ in marked_numbers(response))
    return float((num_marks or len(answer_lines(response))) == 1)


@grader("multiple_choice")
def multiple_choice(response: str, ground_truth: Any) -> float:
    """Grade 1 if the letters that the response chooses (see ``chosen_letters``) are those of the ground truth: "B", "A, C"."""
    truth = _truth_text(ground_truth)
    expected = letters_of(truth) or chosen_letters(truth)
    return float(bool(expected) and fits(response) and chosen_letters(response) == expected)


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
            truth = _truth_answer(_truth_text(ground_truth))
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


@cache
def _programs() -> Grader:
    """Build the rule ``code`` with its default options. What it is built on is imported when it is used."""
    from rlhf_mcore.rewards.code import CodeGrader

    return CodeGrader()


grader("math")(MathGrader())
grader("code")(lambda response, ground_truth: _programs()(response, ground_truth))
grader("regex")(Pattern())
grader("length")(Length())
grader("language")(
    lambda response, ground_truth: Language()(response)
)  # made when it is asked for: it needs google-re2
# What a response has to hold for a rule to find an answer in it.
ANSWERS: dict[str, Callable[[str], Any]] = {
    "final_number": marked_number,
    "boxed": last_boxed,
    "answer_line": answer_lines,
    "math": last_answer,
    "multiple_choice": chosen_letters,
    "code": lambda response: _program_in(response),
}


def build_grader(
    rule: RuleConfig,
    workers: int | None = None,
    sandbox: SandboxConfig | None = None,
    pools: Pools = local_pool,
) -> Grader:
    """Build the grader of a rule with the rule's own options. ``workers``: processes of those that need some, made by ``pools``.

    Raises:
        ConfigError: an option that the grader does not take, or a sandbox that this machine does not give.
    """
    if rule.name == "code":
        from rlhf_mcore.rewards.code import CodeGrader

        return CodeGrader(rule, sandbox, workers, pools).check()
    if rule.name == "math":
        return MathGrader(workers, pools)
    if rule.name == "regex":
        return Pattern(rule.pattern)
    if rule.name == "length":
        return Length(rule.min_chars, rule.max_chars, rule.margin_chars)
    if rule.name == "language":
        return Language(tuple(rule.scripts))
    return GRADERS[rule.name]


def _program_in(response: str) -> str:
    from rlhf_mcore.rewards.code_tests import code_of

    return code_of(response).strip()


def finds_answer(name: str, response: str) -> bool:
    """Return whether a rule found an answer in a response, right or wrong; True for rules that look for none."""
    return name not in ANSWERS or (fits(response) and bool(ANSWERS[name](response) not in (None, "", [])))


def answer_of(response: str) -> str:
    """Return what a response votes for in a majority, or "" for nothing.

    What ``final_number`` would compare, else the content of the last box, else the last marked answer or the whole response where
    that has at most ``MAX_NUMBER_CHARS`` characters; each in one spelling (4.5, 4.50 and 9/2 are one vote).
    """
    if not fits(response):
        return ""
    number = marked_number(response)
    if number is not None:
        return str(number.numerator) if number.denominator == 1 else f"{number.numerator}/{number.denominator}"
    content = last_boxed(response)
    answer = (last_answer(response) or response) if content is None else content
    return canonical(answer) if content is not None or len(answer) <= MAX_NUMBER_CHARS else ""


def _same(answer: str | None, ground_truth: Any) -> float:
    """Grade 1 if an answer and a ground truth have one spelling."""
    if answer is None:
        return 0.0
    ours, truth = read_answer(answer), read_answer(_truth_answer(_truth_text(ground_truth)))
    return float(bool(truth.spelling) and ours.spelling == truth.spelling and not names_differ(truth, ours))


def _truth_answer(truth: str) -> str:
    """Return the answer that a worked solution marks, or the whole text."""
    answer = last_answer(truth)
    return truth if answer is None else answer


def _truth_text(ground_truth: Any) -> str:
    """Return the ground truth as stripped text; empty for None and for what is too long to be an answer."""
    if ground_truth is None or (isinstance(ground_truth, int) and ground_truth.bit_length() > _MAX_TRUTH_BITS):
        return ""
    text = str(ground_truth).strip()
    return text if fits(text) else ""
