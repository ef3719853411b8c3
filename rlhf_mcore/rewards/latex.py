r"""One spelling for answers that mean the same: numbers, fractions, units, lists, and what LaTeX leaves to taste.

Only spellings are unified; nothing is computed beyond reading a number. Text is hostile by assumption: every pass is linear in
a length that is capped first, and numbers are capped before any arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

MAX_ANSWER_CHARS = 1000  # what is longer is compared as it stands, without spaces
MAX_BRACES = 100  # as is what is nested by a machine
MAX_NUMBER_CHARS = 64
MAX_EXPONENT = 1000

_UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u2013": "-",
        "\u00a0": " ",
        "\u202f": " ",
        "\u00d7": r"\times ",
        "\u00b7": r"\cdot ",
        "\u00f7": r"\div ",
        "π": r"\pi ",
        "θ": r"\theta ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "±": r"\pm ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "\u2208": r"\in ",
        "√": r"\sqrt ",
        "°": r"^\circ",
        "²": "^2",
        "³": "^3",
    }
)
_CURRENCY = r"(?:\\?\$|[€£¥₹])"
# Each removes or unifies what has no meaning of its own.
_PLAIN: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"\{,\}", ","),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|phantom\{[^{}]*\})", ""),
        (r"(?<!\\)\\[()\[\]]", ""),
        (rf"{_CURRENCY}(?:\s*USD)?", ""),
        (r"(?<!\\)\\[!,;:]", ""),
        (r"\\(?:quad|qquad)(?![A-Za-z])|(?<!\\)\\ |~", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\leq(?:slant)?(?![A-Za-z])|<=", r"\\le "),
        (r"\\geq(?:slant)?(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=", r"\\ne "),
        (r"\\[lc]dots(?![A-Za-z])|\.\.\.", r"\\dots "),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})", ""),
        (r"\\degrees?(?![A-Za-z])", ""),
        (r"\\infin(?![A-Za-z])", r"\\infty"),
    )
)
_WRAPPER = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)\*?\s*"
_WRAPPED = re.compile(_WRAPPER + r"\{([^{}]*)\}")
_JOINED = re.compile(r"\s*(?:(?:" + _WRAPPER + r"\{\s*,?\s*(?:and|or)\s*\})|(?<![A-Za-z\\]),?\s(?:and|or)\s)\s*")
_UNIT_TEXT = re.compile(r"[A-Za-z][A-Za-z .'/-]*")
_NO_UNIT = re.compile(r"\b(?:or|and|to|not|than|least|most|if|per\s*cent\s*of)\b")
_POWER = r"(?:\s*\^\s*(?:[23]|\{\s*[23]\s*\}))?"
_UNITS = re.compile(
    r"(?<=[0-9)}])\s*(?:sq(?:uare|\.)?\s+|cubic\s+)?(?:units?|degrees?|dollars?|cents?|percent|pct|"
    r"(?:kilo|centi|milli)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|[ckm]m|kg|mph|km/h|m/s|inch(?:es)?|foot|feet|ft|yards?|miles?|"
    r"seconds?|minutes?|min|hours?|hrs?|days?|weeks?|months?|years?|pounds?|lbs?|ounces?|oz|people|students?|ways?|radians?|USD)"
    + _POWER
    + r"\s*\.?$"
)
_NAME = r"(?:[A-Za-z]{1,20}|\\[A-Za-z]{1,12}|[A-Za-z](?:_(?:\w|\{\w{1,8}\}))?|[A-Za-z]\([A-Za-z0-9]\)|\\?angle\s?[A-Z]{1,3})"
_DEFINES = re.compile(rf"\s*{_NAME}\s*(?:=|\\in(?![A-Za-z]))(?!=)\s*")
_COMPUTES = re.compile(r"[0-9.\s+*/()^-]+=(?!.*(?<![A-Za-z\\])[A-Za-z](?![A-Za-z]))")  # and is no equation of variables
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_ROOT = re.compile(r"\\sqrt\s*(?![{\[\sA-Za-z])(\S)|\\sqrt\s+([A-Za-z0-9])")
_SHORT_SCRIPT = re.compile(r"([\^_])\s*\{\s*(\w)\s*\}(?=\s*([0-9])?)")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_WORDS = re.compile(r"[A-Za-z]{2,}")
_BETWEEN_DIGITS = re.compile(r"(?<=[0-9])\s+(?=[0-9])")
_GROUPED = re.compile(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+")
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)\s?(?:(?P<whole>[0-9]+)[ ](?=[0-9]+/))?"
    r"(?P<top>(?:[0-9]+(?:,[0-9]{3}(?![0-9]))*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"(?:/(?P<bottom>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)))?"
)
_CLOSING = {"(": ")", "[": "]", "\\{": "\\}"}


def canonical(text: str) -> str:
    r"""The one spelling of an answer: "1/2" for ``\dfrac12``, ``\frac{1}{2}``, 0.5 and ``x = 1/2``; "" for nothing.

    Units, currency, percent signs and degrees are dropped; a list without brackets and a set are sorted. A comma is a
    thousands separator only where it groups three digits, and no list is around it.
    """
    if len(text) > MAX_ANSWER_CHARS or text.count("{") > MAX_BRACES:
        return "".join(text.split())
    text = text.strip()
    # Once before units are dropped, so that a number is read as parse_number reads it.
    number = parse_number(text)
    if number is not None:
        return _spelled(number)
    text = text.translate(_UNICODE)
    for pattern, plain in _PLAIN:
        text = pattern.sub(plain, text)
    text = _JOINED.sub(", ", text)
    text = _without_units(text)
    if len(_EQUALS.findall(text)) == 1 or r"\in" in text:
        text = text[match.end() :] if (match := _DEFINES.match(text) or _COMPUTES.match(text)) else text
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
    text = _SHORT_SCRIPT.sub(lambda match: match[1] + match[2] + " " * bool(match[3]), text)
    return _canonical_list(_fractions(text))


def parse_number(text: str) -> Fraction | None:
    r"""The number that ``text`` is as a whole, or None: 1,234.5, -3/4, 1 1/2, 2e3, ``\$5``, 50%.

    Currency signs, thousands separators (``,`` in front of three digits, ``{,}``, ``\!``, ``\,``), a final ``%`` and a final dot are
    dropped. None also for more than ``MAX_NUMBER_CHARS`` characters or an exponent beyond +-``MAX_EXPONENT``.
    """
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = re.sub(r"\{,\}", ",", re.sub(r"\\[!,]", "", text)).replace("\u2212", "-")
    text = re.sub(rf"^([-+]?)\s?{_CURRENCY}\s?|\s?{_CURRENCY}$", r"\1", text.strip("$"))
    match = _NUMBER.fullmatch(text.removesuffix("%").removesuffix("\\").strip())
    return None if match is None else _value(match)


def leading_number(text: str) -> tuple[Fraction, str] | None:
    """The number that ``text`` begins with, and what follows it; None where there is none."""
    shown = re.match(rf"([-+\u2212]?)\s?{_CURRENCY}?\s?", text)
    assert shown is not None
    rest = text[shown.end() :]
    sign = "-" if shown[1] == "\u2212" else shown[1]
    match = _NUMBER.match(rest.replace("\u2212", "-", 1) if rest.startswith("\u2212") else rest)
    if match is None or (sign and match["sign"]):
        return None
    value = _value(match)
    end = match.end() - match[0].endswith(".")  # a dot at the end belongs to what follows: 2. Solve
    return None if value is None else (-value if sign == "-" else value, rest[end:])


def _value(match: re.Match[str]) -> Fraction | None:
    """The value of a match of ``_NUMBER``, or None where it exceeds the caps, which are looked at first."""
    top, bottom = match["top"], match["bottom"] or "1"
    digits, _, exponent = top.lower().partition("e")
    if len(match[0]) > MAX_NUMBER_CHARS or abs(int(exponent or 0)) > MAX_EXPONENT:
        return None
    integral = digits.partition(".")[0]
    if "," in integral and not _GROUPED.fullmatch(integral):
        return None
    divisor = Fraction(Decimal(bottom))
    if divisor == 0:
        return None
    value = Fraction(int(match["whole"] or 0)) + Fraction(Decimal(top.replace(",", ""))) / divisor
    return -value if match["sign"] == "-" else value


def _spelled(number: Fraction) -> str:
    return str(number.numerator) if number.denominator == 1 else f"{number.numerator}/{number.denominator}"


def _without_units(text: str) -> str:
    """Units at the end are dropped, and other texts stand without the command around them."""
    text = re.sub(r"\\?%\s*\.?\s*$", "", text)
    while (start := text.rfind("\\")) > 0:
        last = re.compile(_WRAPPER + r"\{([^{}]*)\}" + _POWER + r"\s*[./]?\s*$").match(text, start)
        unit = last[1].strip() if last is not None else ""
        if (
            last is None
            or not text[:start].strip()
            or (unit and not _UNIT_TEXT.fullmatch(unit))
            or _NO_UNIT.search(unit)
        ):
            break
        text = text[:start].rstrip()
    return _UNITS.sub("", _WRAPPED.sub(r"\1", text).strip().rstrip("."))


def _fractions(text: str) -> str:
    r"""``\frac{a}{b}`` as a/b, with parentheses where they are needed."""
    start = text.find(r"\frac")
    if start < 0:
        return text
    top, end = _argument(text, start + len(r"\frac"))
    bottom, end = _argument(text, end)
    top, bottom = _fractions(top), _fractions(bottom)
    if not re.fullmatch(r"-?[^-+,=<>]*", re.sub(r"\([^()]*\)", "", top)):
        top = f"({top})"
    if not re.fullmatch(r"[0-9.]+|[A-Za-z]|\\[A-Za-z]+(?:\{[^{}]*\})?", bottom):
        bottom = f"({bottom})"
    before = text[:start].rstrip()
    gap = " " if before[-1:].isdigit() and top[:1].isdigit() else ""  # a mixed number, 1 1/2
    return f"{before}{gap}{top}/{bottom}{_fractions(text[end:])}"


def _argument(text: str, start: int) -> tuple[str, int]:
    """What a TeX command at ``start`` takes as its next argument, and where that ends."""
    while start < len(text) and text[start].isspace():
        start += 1
    if text[start : start + 1] == "\\":
        match = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})?").match(text, start)
        end = match.end() if match else start + 2
        return text[start:end], end
    if text[start : start + 1] != "{":
        return text[start : start + 1], min(start + 1, len(text))
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + 1 : end].strip(), end + 1
    return text[start + 1 :], len(text)


def _canonical_list(text: str) -> str:
    text = text.strip()
    number = parse_number(text)
    if number is not None:
        return _spelled(number)
    opening = next((mark for mark in _CLOSING if text.startswith(mark)), None)
    inner = None
    if opening is not None and any(text.endswith(mark) for mark in (")", "]", r"\}")):
        closing = r"\}" if text.endswith(r"\}") else text[-1]
        inside = text[len(opening) : -len(closing)]
        inner = inside if _is_balanced(inside) else None
    parts = _split(text if inner is None else inner)
    if inner is not None and opening is not None and (len(parts) > 1 or opening == r"\{"):
        spelled = [_canonical_part(part) for part in parts]
        if opening == r"\{":
            spelled.sort()
        return f"{opening}{', '.join(spelled)}{closing}"
    if len(parts) > 1:
        return ", ".join(sorted(_canonical_list(part) for part in parts))
    return _canonical_part(text)


def _canonical_part(text: str) -> str:
    text = text.strip()
    number = parse_number(text)
    if number is not None:
        return _spelled(number)
    if text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        text = text[1:-1]
    text = "".join(_BETWEEN_DIGITS.sub("\0", text).split()).replace("\0", " ")
    if choice := _CHOICE.fullmatch(text):
        return choice[1]
    return text.lower() if _WORDS.fullmatch(text) else text


def _is_balanced(text: str) -> bool:
    return _depths(text, lambda place: None)


def _split(text: str) -> list[str]:
    """The elements of a list, cut at the commas that no bracket is around."""
    cuts: list[int] = []
    if not _depths(text, cuts.append):
        return [text]
    parts = [text[start + 1 : end] for start, end in pairwise([-1, *cuts, len(text)])]
    return parts if all(part.strip() for part in parts) else [text]


def _depths(text: str, found: Callable[[int], None]) -> bool:
    """Call ``found`` with the place of every comma outside brackets. Returns whether brackets are balanced, of any kinds."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return False
        if letter == "," and depth == 0:
            found(place)
    return depth == 0
