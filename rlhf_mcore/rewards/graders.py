r"""Rule graders: functions ``(response, ground_truth) -> float in [0, 1]`` over model output.

Treat the text as hostile. Nothing here evaluates or executes it. Lengths and exponents are capped before any arithmetic,
every scan takes linear time, and no response makes a grader raise. A response longer than ``MAX_RESPONSE_CHARS`` scores 0.
Only ``math`` parses an answer symbolically, in a worker process. Only ``code`` runs a response, in a sandbox.

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
GRADERS: dict[str, Grader] = {}  # rules without options
grader = registering(GRADERS, choices.GRADERS)  # decorator that registers a rule
_BLANK = re.compile(r"\s*")


@grader("exact_match")
def exact_match(response: str, ground_truth: Any) -> float:
    """Grade 1 if the response equals the ground truth, ignoring outer whitespace. An empty ground truth matches nothing."""
    truth = truth_text(ground_truth)
    return float(bool(truth) and fits(response) and response.strip() == truth)


@grader("final_number")
def final_number(response: str, ground_truth: Any) -> float:
    r"""Grade 1 if the response's answer is a number equal to the ground truth.

    The answer is the last number after a ``####`` or the number in the last ``\boxed{}``, whichever comes later. Units,
    currency, thousands separators, ``%`` and a trailing dot are ignored. Numbers are compared exactly (4.50 = 4.5 = 9/2, 1e3
    = 1000).
    """
    if not fits(response):
        return 0.0
    truth = truth_text(ground_truth)
    marked = marked_number(truth)
    expected = number_of(truth) if marked is None else marked
    return float(expected is not None and marked_number(response) == expected)


@grader("boxed")
def boxed(response: str, ground_truth: Any) -> float:
    r"""Grade 1 if the last balanced ``\boxed{}`` contains the ground truth in any spelling (see ``canonical``).

    An empty box matches nothing.
    """
    return _same(last_boxed(response), ground_truth) if fits(response) else 0.0


@grader("answer_line")
def answer_line(response: str, ground_truth: Any) -> float:
    """Grade 1 if the text after the last ``Answer:``, on its line, is the ground truth in any spelling (see ``canonical``).

    The prompts of DAPO-Math-17k (Yu et al. 2025, arXiv 2503.14476) ask for this format.
    """
    lines = answer_lines(response)[-1:] if fits(response) else []
    return _same(unbox(lines[0][1]), ground_truth) if lines else 0.0


@grader("format")
def answer_format(response: str, ground_truth: Any = None) -> float:
    r"""Grade 1 if the response marks exactly one answer: one ``#### number`` or one nonempty ``\boxed{...}``.

    If it contains neither, one ``Answer: ...`` line is enough. Correctness does not matter, so ``ground_truth`` is ignored.
    A nested box counts as a second box.
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
    """Grade 1 if the response chooses the letters of the ground truth, such as "B" or "A, C" (see ``chosen_letters``)."""
    truth = truth_text(ground_truth)
    expected = letters_of(truth) or chosen_letters(truth)
    return float(bool(expected) and fits(response) and chosen_letters(response) == expected)


# By rule: finds the answer in a response. An empty result means that the response has no answer.
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
    """Build the grader of a rule, with the rule's options.

    ``workers`` is the number of processes for graders that need some, and ``pools`` builds them.

    Raises:
        ConfigError: the grader does not support an option, or this machine lacks the required sandbox.
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
    """Return whether a rule found an answer in a response, correct or not. True for rules that need no answer."""
    return name not in ANSWERS or (fits(response) and bool(ANSWERS[name](response) not in (None, "", [])))


def answer_of(response: str) -> str:
    """Return the answer for which a response votes in a majority, or "" if it has none.

    The answer is the first of these that exists: the number that ``final_number`` compares, the content of the last box, the
    last marked answer, the whole response. The last two may have at most ``MAX_NUMBER_CHARS`` characters. The result is in
    canonical spelling, so that 4.5, 4.50 and 9/2 are the same vote.
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
    """Grade 1 if an answer and a ground truth have the same spelling."""
    if answer is None:
        return 0.0
    ours, truth = read_answer(answer), read_answer(truth_answer(truth_text(ground_truth)))
    return float(bool(truth.spelling) and ours.spelling == truth.spelling and not names_differ(truth, ours))
