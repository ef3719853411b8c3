r"""Rule graders: functions ``(response, ground_truth) -> float in [0, 1]`` over text written by a model.

The text is hostile by assumption. Nothing here evaluates or executes it; lengths and exponents are capped before any
arithmetic, every scan is linear in the length, and no response makes a grader raise. A response longer than
``MAX_RESPONSE_CHARS`` scores 0. ``math`` alone parses an answer symbolically, in a worker process, and ``code`` alone runs one, in
a sandbox.

A ground truth may be a number, an answer in LaTeX or plain text, or a worked solution that marks its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from rlhf_mcore.config import choices
from rlhf_mcore.config.choices import registering
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.rewards.answers import (
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
    truth_answer,
    truth_text,
    unbox,
)
from rlhf_mcore.rewards.code import CodeGrader
from rlhf_mcore.rewards.code_tests import find_code
from rlhf_mcore.rewards.forms import canonical, names_differ, read_answer
from rlhf_mcore.rewards.latex import MAX_NUMBER_CHARS
from rlhf_mcore.rewards.mathematics import MathGrader
from rlhf_mcore.rewards.pool import Pools, local_pool
from rlhf_mcore.rewards.shape import LanguageGrader, LengthGrader, PatternGrader

Grader = Callable[[str, Any], float]
GRADERS: dict[str, Grader] = {}  # of rules without options
grader = registering(GRADERS, choices.GRADERS)  # a decorator that registers a rule
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
    return _same(unbox(lines[0][1]), ground_truth) if lines else 0.0


@grader("format")
def answer_format(response: str, ground_truth: Any = None) -> float:
    r"""Grade 1 if the response marks exactly one answer: one ``#### number`` or one ``\boxed{...}`` that is not empty.

    If there is neither, one line ``Answer: ...`` does. Right or wrong does not matter, so ``ground_truth`` is ignored. A nested
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
    truth = truth_text(ground_truth)
    expected = letters_of(truth) or chosen_letters(truth)
    return float(bool(expected) and fits(response) and chosen_letters(response) == expected)


# What a rule needs to find in a response; nothing found counts as no answer.
ANSWERS: dict[str, Callable[[str], Any]] = {
    "final_number": marked_number,
    "boxed": last_boxed,
    "answer_line": answer_lines,
    "math": last_answer,
    "multiple_choice": chosen_letters,
    "code": lambda response: find_code(response).strip(),
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
        return CodeGrader(rule, sandbox, workers, pools).check()
    if rule.name == "math":
        return MathGrader(workers, pools)
    if rule.name == "regex":
        return PatternGrader(rule.pattern)
    if rule.name == "length":
        return LengthGrader(rule.min_chars, rule.max_chars, rule.margin_chars)
    return LanguageGrader(tuple(rule.scripts)) if rule.name == "language" else GRADERS[rule.name]


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
