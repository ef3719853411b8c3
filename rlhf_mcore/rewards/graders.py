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
from typing import Any, Protocol, runtime_checkable

from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import registering
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.rewards.answers import (
    MAX_RESPONSE_CHARS,
    answer_lines,
    boxes,
    fits,
    last_answer,
    last_boxed,
    marked_number,
    marked_numbers,
    number_of,
    truth_answer,
    truth_text,
    within,
)
from rlhf_mcore.rewards.forms import canonical, names_differ, read_answer
from rlhf_mcore.rewards.latex import MAX_NUMBER_CHARS, parse_number
from rlhf_mcore.rewards.pools import Pools, Verdict, local_pool

__all__ = [
    "GRADERS",
    "MAX_RESPONSE_CHARS",
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


@grader("exact_match")
def exact_match(response: str, ground_truth: Any) -> float:
    """Grade 1 if the response equals the ground truth up to whitespace around it. An empty ground truth matches nothing."""
    truth = truth_text(ground_truth)
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
    truth = truth_text(ground_truth)
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


def _register_deferred(name: str) -> None:
    """Register a rule with its default options that is built when somebody asks for it: a run loads the rules that it uses."""

    @cache
    def build() -> Grader:
        return _build(RuleConfig(name))

    def grade(response: str, ground_truth: Any = None) -> float:
        return build()(response, ground_truth)

    grader(name)(grade)


for _name in ("math", "code", "multiple_choice", "regex", "length", "language"):
    _register_deferred(_name)
# What a response has to hold for a rule to find an answer in it.
ANSWERS: dict[str, Callable[[str], Any]] = {
    "final_number": marked_number,
    "boxed": last_boxed,
    "answer_line": answer_lines,
    "math": last_answer,
    "multiple_choice": lambda response: _letters_in(response),
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
    built = _build(rule, workers, sandbox, pools)
    if rule.name == "code":
        from rlhf_mcore.rewards.code import CodeGrader

        assert isinstance(built, CodeGrader)
        return built.check()
    return built


def _build(
    rule: RuleConfig, workers: int | None = None, sandbox: SandboxConfig | None = None, pools: Pools = local_pool
) -> Grader:
    """Import the module of a rule, and build its grader."""
    if rule.name == "code":
        from rlhf_mcore.rewards.code import CodeGrader

        return CodeGrader(rule, sandbox, workers, pools)
    if rule.name == "math":
        from rlhf_mcore.rewards.mathematics import MathGrader

        return MathGrader(workers, pools)
    if rule.name == "multiple_choice":
        from rlhf_mcore.rewards.choice_letters import multiple_choice

        return multiple_choice
    if rule.name not in ("regex", "length", "language"):
        return GRADERS[rule.name]
    from rlhf_mcore.rewards.shape import Language, Length, Pattern

    if rule.name == "regex":
        return Pattern(rule.pattern)
    if rule.name == "length":
        return Length(rule.min_chars, rule.max_chars, rule.margin_chars)
    return Language(tuple(rule.scripts))


def _program_in(response: str) -> str:
    from rlhf_mcore.rewards.code_tests import code_of

    return code_of(response).strip()


def _letters_in(response: str) -> str:
    from rlhf_mcore.rewards.choice_letters import chosen_letters

    return chosen_letters(response)


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
    ours, truth = read_answer(answer), read_answer(truth_answer(truth_text(ground_truth)))
    return float(bool(truth.spelling) and ours.spelling == truth.spelling and not names_differ(truth, ours))
