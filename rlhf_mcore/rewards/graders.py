r"""Rule graders: pure functions ``(response, ground_truth) -> float in [0, 1]`` over text written by a model.

The text is hostile by assumption. Nothing here evaluates, executes or symbolically parses it; lengths and exponents
are capped before any arithmetic, every scan is linear in the length, and no response makes a grader raise. A response
longer than ``MAX_RESPONSE_CHARS`` scores 0.

Two notations mark an answer: ``#### 42`` (GSM8K, arXiv 2110.14168) and ``\boxed{42}`` (MATH, arXiv 2103.03874). A
ground truth may be a number, a plain string, or a worked solution that ends in one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

Grader = Callable[[str, Any], float]

MAX_RESPONSE_CHARS = 2**18  # 64k tokens of four characters
MAX_NUMBER_CHARS = 64
MAX_EXPONENT = 1000
_MAX_TRUTH_BITS = 4096  # of an int: str() of a huge one raises

_MARKER = re.compile(r"(?<!#)####(?!#)\s{0,16}")
_NUMBER = re.compile(
    "(?P<sign>[-+\u2212]?)"
    r"\s?(?:\\?\$)?\s?"
    "(?P<sign2>[-+\u2212]?)"
    r"(?P<mantissa>[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]+)?"
)
_BRACE = re.compile(r"\\boxed\s{0,16}\{|\\.|[{}]", re.DOTALL)
_LATEX_SPACING = re.compile(r"\{,\}|\\[!,]")
# What makes the number before it a part of something else: 3/4, 2^10, 2*3, 7:30, 1.2.3. But **#### 42** is only bold.
_CONTINUES = re.compile(r"(?:\*\*?|[/^:.])[0-9({\\]")


def exact_match(response: str, ground_truth: Any) -> float:
    """1 if the response equals the ground truth up to whitespace around it. An empty ground truth matches nothing."""
    truth = _truth_text(ground_truth)
    return float(bool(truth) and _fits(response) and response.strip() == truth)


def final_number(response: str, ground_truth: Any) -> float:
    r"""1 if the response's answer is a number equal to the ground truth.

    The answer is the number that directly follows the last ``####`` to be followed by one, else the whole content of
    the last ``\boxed{}``. Thousands separators, ``$``, ``%`` at the end, a trailing dot and a plus sign do not count;
    equality is exact and decimal (4.50 = 4.5, 1e3 = 1000).
    """
    if not _fits(response):
        return 0.0
    expected = _truth_number(_truth_text(ground_truth))
    return float(expected is not None and _marked_number(response) == expected)


def boxed(response: str, ground_truth: Any) -> float:
    r"""1 if the content of the response's last balanced ``\boxed{}`` equals the ground truth.

    Both are compared as numbers if both are numbers, else as text with all whitespace removed. An empty box matches
    nothing.
    """
    if not _fits(response):
        return 0.0
    answer = last_boxed(response)
    if answer is None or not answer.strip():
        return 0.0
    truth = _truth_text(ground_truth)
    number, expected = parse_number(answer), _truth_number(truth)
    if number is not None and expected is not None:
        return float(number == expected)
    truth_box = last_boxed(truth)
    return float(_without_spaces(answer) == _without_spaces(truth if truth_box is None else truth_box))


def answer_format(response: str, ground_truth: Any = None) -> float:
    r"""1 if the response marks exactly one answer: one ``#### number`` or one ``\boxed{...}`` that is not empty.

    Right or wrong does not matter, so ``ground_truth`` is ignored. A nested box is a second one.
    """
    if not _fits(response):
        return 0.0
    num_boxes = 0
    for start, end in _boxes(response):
        if not response[start:end].strip():
            return 0.0
        num_boxes += 1
    return float(num_boxes + sum(1 for _ in _marked(response)) == 1)


GRADERS: dict[str, Grader] = {
    "exact_match": exact_match,
    "final_number": final_number,
    "boxed": boxed,
    "format": answer_format,
}


def parse_number(text: str) -> Decimal | None:
    r"""The number that ``text`` is as a whole, or None.

    Currency signs, thousands separators (``,``, ``{,}``, ``\!``, ``\,``), a final ``%`` and a final dot are dropped.
    None also for more than ``MAX_NUMBER_CHARS`` characters or an exponent beyond +-``MAX_EXPONENT``.
    """
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = _LATEX_SPACING.sub("", text).strip("$").removesuffix("%").removesuffix("\\").strip()
    match = _NUMBER.fullmatch(text)
    return None if match is None else _to_decimal(match)


def last_boxed(text: str) -> str | None:
    r"""Content of the balanced ``\boxed{...}`` that opens last, or None. Of nested boxes that is the innermost."""
    found = max(_boxes(text), default=None)
    return None if found is None else text[found[0] : found[1]]


def answer_of(response: str) -> str:
    """What a response votes for in a majority, or "" for nothing.

    The number that ``final_number`` would compare, in one spelling (4.5 and 4.50 are both 9/2); else the content of the
    last box, else a whole response of at most ``MAX_NUMBER_CHARS`` characters, both without whitespace.
    """
    if not _fits(response):
        return ""
    number = _marked_number(response)
    if number is not None:
        numerator, denominator = number.as_integer_ratio()
        return str(numerator) if denominator == 1 else f"{numerator}/{denominator}"
    content = last_boxed(response)
    text = _without_spaces(response if content is None else content)
    return text if content is not None or len(text) <= MAX_NUMBER_CHARS else ""


def _boxes(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of the content of every balanced box, in closing order. Escaped braces are not braces."""
    if "\\boxed" not in text:
        return
    open_braces: list[int] = []  # where the content starts; -1: a brace that is not a box
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                yield start, match.start()
        elif token.endswith("{") and token != "\\{":
            open_braces.append(match.end() if len(token) > 1 else -1)


def _marked(text: str) -> Iterator[Decimal]:
    """The numbers that directly follow a ``####`` (and no fifth ``#``), in order."""
    for marker in _MARKER.finditer(text):
        match = _NUMBER.match(text, marker.end())
        if match is None or _CONTINUES.match(text, match.end()):
            continue
        number = _to_decimal(match)
        if number is not None:
            yield number


def _marked_number(text: str) -> Decimal | None:
    """The number after the last ``####`` that has one, else the content of the last box as a number."""
    numbers = list(_marked(text))
    if numbers:
        return numbers[-1]
    content = last_boxed(text)
    return None if content is None else parse_number(content)


def _truth_number(truth: str) -> Decimal | None:
    marked = _marked_number(truth)
    return parse_number(truth) if marked is None else marked


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _to_decimal(match: re.Match[str]) -> Decimal | None:
    """The value of a match of ``_NUMBER``, or None where it exceeds the caps (checked first: Decimal cannot raise)."""
    sign = match["sign"] or match["sign2"]
    mantissa, exponent = match["mantissa"], match["exponent"] or "e0"
    if (match["sign"] and match["sign2"]) or len(mantissa) + len(exponent) > MAX_NUMBER_CHARS:
        return None
    if abs(int(exponent[1:])) > MAX_EXPONENT:
        return None
    value = Decimal(mantissa.replace(",", "") + exponent)
    # copy_negate, because unary minus rounds to 28 digits.
    return value.copy_negate() if sign in ("-", "\u2212") else value


def _fits(response: str) -> bool:
    return len(response) <= MAX_RESPONSE_CHARS


def _truth_text(ground_truth: Any) -> str:
    """The ground truth as stripped text; empty for None and for what is too long to be an answer."""
    if ground_truth is None or (isinstance(ground_truth, int) and ground_truth.bit_length() > _MAX_TRUTH_BITS):
        return ""
    text = str(ground_truth).strip()
    return text if _fits(text) else ""
