r"""Rule graders: functions ``(response, ground_truth) -> float in [0, 1]`` over model output.

Treat the text as hostile. Nothing here evaluates or executes it. Lengths and exponents are capped before any arithmetic,
every scan takes linear time, and no response makes a grader raise. A response longer than ``MAX_RESPONSE_CHARS`` scores 0.
Only ``math`` parses an answer symbolically, in a worker process. Only ``code`` runs a response, in a sandbox.

Regular expressions run on RE2 (google-re2), whose run time is linear in the text length for every expression. Python's ``re``
backtracks, so one response could stall the trainer.

A ground truth may be a number, an answer in LaTeX or plain text, or a worked solution that marks its answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from rlhf_mcore.config import choices
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.plugins import registering
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
from rlhf_mcore.rewards.code import CodeGrader, find_code
from rlhf_mcore.rewards.forms import canonical, names_differ, read_answer
from rlhf_mcore.rewards.latex import MAX_NUMBER_CHARS
from rlhf_mcore.rewards.mathematics import MathGrader
from rlhf_mcore.rewards.pool import Pools, local_pool

Grader = Callable[[str, Any], float]
GRADERS: dict[str, Grader] = {}  # rules without options
grader = registering(GRADERS, choices.GRADERS)  # decorator that registers a rule
_BLANK = re.compile(r"\s*")
MAX_PATTERN_CHARS = 2000
_COMMAND = re.compile(r"\\[A-Za-z]+")  # LaTeX commands use Latin letters in every language
_WORD = re.compile(r"[^\W\d_]+")


# ------------------------------------------------------------------------------------------------ the form of a response
class PatternGrader:
    """Grades 1 if an RE2 regular expression matches anywhere in the response.

    ``^`` and ``$`` match the ends of the whole text, and ``.`` matches any character, including a newline.

    Args:
        pattern: the expression; None: the ground truth of each prompt is the expression.

    Raises:
        ConfigError: the expression is not valid RE2. RE2 does not support look-around and back-references.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self._pattern = pattern
        if pattern is not None:
            _compile(pattern)

    def __call__(self, response: str, ground_truth: Any = None) -> float:
        pattern = ground_truth if self._pattern is None else self._pattern
        if not isinstance(pattern, str) or not pattern or not fits(response):
            return 0.0
        try:
            return float(_compile(pattern).search(response.encode(errors="replace")) is not None)
        except ConfigError:
            if self._pattern is not None:
                raise
            return 0.0  # the ground truth is not a valid expression; `reward-test` reports it


class LengthGrader:
    """Grades 1 for ``min_chars`` to ``max_chars`` characters; outside linearly less, 0 at a distance of ``margin_chars``."""

    def __init__(self, min_chars: int = 0, max_chars: int | None = None, margin_chars: int = 0) -> None:
        self._min, self._max, self._margin = min_chars, max_chars, margin_chars

    def __call__(self, response: str, ground_truth: Any = None) -> float:
        if not fits(response):
            return 0.0
        distance = max(self._min - len(response), len(response) - (len(response) if self._max is None else self._max))
        if distance <= 0:
            return 1.0
        return max(0.0, 1.0 - distance / self._margin) if self._margin else 0.0


class LanguageGrader:
    """Grades the share of a response's letters that belong to the given scripts; 1 for a response without letters.

    Scripts are distinguished, not languages. English and French both use Latin. Fenced code, LaTeX commands and single Latin
    letters (variables) are ignored.

    Args:
        scripts: Unicode script names, such as Latin, Han, Cyrillic. Japanese uses three: Han, Hiragana, Katakana.

    Raises:
        ConfigError: RE2 does not know a script.
    """

    def __init__(self, scripts: tuple[str, ...] = ("Latin",)) -> None:
        if unknown := [name for name in scripts if not re.fullmatch("[A-Za-z_]+", name)]:
            raise ConfigError(
                f"scripts={unknown} are not script names; use Unicode names, such as Latin, Han or Cyrillic"
            )
        self._letters = _compile("[" + "".join(rf"\p{{{name}}}" for name in scripts) + "]+")

    def __call__(self, response: str, ground_truth: Any = None) -> float:
        if not fits(response):
            return 0.0
        prose = _COMMAND.sub(" ", " ".join(response.split("```")[::2]))
        words = [word for word in _WORD.findall(prose) if len(word) > 1 or not word.isascii()]
        total = sum(map(len, words))
        own = self._letters.findall(" ".join(words).encode(errors="replace"))
        return sum(len(run.decode()) for run in own) / total if total else 1.0


@lru_cache(maxsize=4096)
def _compile(pattern: str) -> Any:
    """Compile an expression over UTF-8 bytes.

    Raises:
        ConfigError: the expression is too long or invalid, or google-re2 is not installed.
    """
    try:
        import re2
    except ImportError as error:
        raise ConfigError("the reward rules 'regex' and 'language' need google-re2: pip install google-re2") from error
    options = re2.Options()
    options.log_errors, options.dot_nl = False, True
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ConfigError(f"the pattern {pattern[:60]!r}... has more than {MAX_PATTERN_CHARS} characters; shorten it")
    try:
        return re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ConfigError(
            f"the pattern {pattern[:200]!r} is not a valid RE2 expression ({reason}); it supports no look-around or back-references"
        ) from error


# ---------------------------------------------------------------------------------------------- the answer in a response
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
def boxed_answer(response: str, ground_truth: Any) -> float:
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
