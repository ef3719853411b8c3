r"""Parse an answer into its form: number, text, expression, relation, equation, or a collection of answers.

An answer that is not clearly mathematics is a text, and equals only its own spelling. Dates, times, ranges, numerals in another
base and approximations are texts, because their arithmetic reading would be a different value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

from rlhf_mcore.rewards.latex import (
    WRAPPED,
    parse_number,
    plain,
    read_number,
    unwrap,
    without_percent,
    without_unit,
)

MAX_ANSWER_CHARS = 1000  # longer answers are compared as written, without spaces
MAX_BRACES = 100  # machine-generated nesting is compared as written
MAX_DEPTH = 20

LIST, SET, MATRIX = "", "{}", "matrix"
ORDERED = ("()", "[]", "[)", "(]", MATRIX)
_OPENING = {"(": "(", "[": "[", "\\{": "{"}
_NAME = (
    r"(?:[A-Za-z]{1,20}|\\[A-Za-z]{1,12}|[A-Za-z](?:_(?:\w|\{\w{1,8}\}))?|[A-Za-z]\([A-Za-z0-9]\)|\\?angle\s?[A-Z]{1,3}"
    r"|\(\s?[A-Za-z](?:\s?,\s?[A-Za-z]){1,3}\s?\))"
)
_DEFINES = re.compile(rf"\s*({_NAME})\s*(?:=|\\in(?![A-Za-z]))(?!=)\s*")
_COMPUTES = re.compile(
    r"(?=[^=]*[0-9)}]\s*(?:[+/^-]|\\cdot|\\times|\\div)|[^=]*\\(?:frac|sqrt))(?:[0-9.\s+/(){}^-]|\\(?:cdot|times|div|frac|sqrt)(?![A-Za-z]))+="
)
_EQUALS = re.compile(r"(?<![<>!:\\])=")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
COMMAND = re.compile(r"\\[A-Za-z]+")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_WORDS = re.compile(r"[A-Za-z]{2,}")
_SPACE = re.compile(r"((?<=[0-9])\s+(?=[0-9]))|\s+")
_BETWEEN_DIGITS = re.compile(r"(?<![_^][0-9])(?<=[0-9])\s+(?=[0-9])")
_DECIMAL = re.compile(r"(?<![\w.^_\\])([0-9]*)\.([0-9]+)(?![0-9.])")
_MATRIX = re.compile(r"\\begin\{[pbB]?matrix\}(.*)\\end\{[pbB]?matrix\}", re.DOTALL)
_NEW_ROW = re.compile(r"\\\\(?:\s*\[[0-9.]+[a-z]{2}\])?|\\cr(?![A-Za-z])")
_KNOWN = re.compile(
    r"\\(?:frac|sqrt|pi|infty|emptyset|alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|vartheta|iota|kappa|lambda|mu|"
    r"nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|sin|cos|tan|cot|sec|"
    r"csc|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|lg|exp|max|min|gcd|lcm|cdot|times|div|cup|cap|setminus|in|binom|le|"
    r"ge|ne|mathbb|int|sum|prod|lim|to|partial|lfloor|rfloor|lceil|rceil)"
)
_TOKEN = re.compile(
    r"\\begin\{vmatrix\}|\\end\{vmatrix\}|\\mathbb\s*\{[A-Z]\}|\\[{}]|(\\[A-Za-z]+)|[0-9]+(?:\.[0-9]*)?|\.[0-9]+|[A-Za-z]{1,2}(?![A-Za-z])"
    r"|(?<=[0-9A-Za-z)}])!|[-+/^_=<>|(),{}\[\]]|\s+"
)
_NO_MATHEMATICS = re.compile(  # for a whole text without spaces
    r"[0-9]+-[0-9]+(?:-[0-9]+)*"  # a range, a date
    r"|[0-9]+(?:[/.][0-9]+){2,}"  # a date
    r"|.*[0-9)]_.*"  # a numeral in another base
    r"|.*(?<![0-9.])0[xXbBoO][0-9A-Fa-f].*"
    r"|.*[0-9][eE][-+]?[0-9].*"
    r"|[A-Za-z]{2}"  # more likely initials or a word than a product
    r"|(?:[=+/^_]|\\cdot|\\times).*|.*(?:[-=+/^_<>]|\\cdot|\\times|\\div|\\le|\\ge|\\ne)",  # unfinished
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The parsed form of an answer. Answers that differ only in spelling share one ``spelling``; "" for an empty answer."""

    kind: str  # number | text | expression | equation | relation | collection
    spelling: str
    source: str = ""  # LaTeX for a solver
    value: Fraction | None = None  # for a number
    is_percent: bool = False
    parts: tuple[AnswerForm, ...] = ()  # the elements of a collection
    brackets: str = LIST  # for a collection: LIST, SET, MATRIX (parts are rows), or one of (), [], [), (]
    name: str = ""  # the x in x = 3

    @property
    def has_variables(self) -> bool:
        return bool(letters(self.source) - {"e", "i"})

    @property
    def as_equation(self) -> str:
        return f"{self.name}={self.source}" if self.name else self.source


@lru_cache(maxsize=1024)
def read_answer(text: str) -> AnswerForm:
    """Return the form of an answer in LaTeX or plain text."""
    if len(text) > MAX_ANSWER_CHARS or text.count("{") > MAX_BRACES or bracket_depth(text) > MAX_DEPTH:
        return AnswerForm("text", "".join(text.split()))
    # First, before anything is dropped, so that the result agrees with parse_number.
    value = parse_number(text)
    if value is not None and "%" not in text:
        return _number(value, "")
    return _read(plain(text).rstrip(". "))


def canonical(text: str) -> str:
    r"""Return the canonical spelling of an answer: "1/2" for ``\dfrac12``, ``\frac{1}{2}``, 0.5 and ``x = 1/2``; "" if empty.

    Units, currency, percent signs and degrees are dropped. A list without brackets and a set are sorted. A comma is a
    thousands separator only if it groups three digits and is not inside a list.
    """
    return read_answer(text).spelling


# --------------------------------------------------------------------------------------------------------------- reading
def _read(text: str) -> AnswerForm:
    """Return the form of plain text."""
    answer = _quantity(text)
    if answer is not None:
        return answer
    if len(_EQUALS.findall(text)) == 1 or r"\in" in text:
        match = _DEFINES.match(text)
        if match is not None:
            name, value = "".join(match[1].split()), text[match.end() :]
            if not letters(name) & letters(value) or len(letters(name)) > 1:
                return replace(_read(value), name=name)
        elif (match := _COMPUTES.match(text)) is not None:
            result = _read(text[match.end() :].strip())
            if result.kind != "text" and not result.has_variables:
                return result
    opening = next((mark for mark in _OPENING if text.startswith(mark)), None)
    if opening is not None and text.endswith((")", "]", r"\}")):
        closing = r"\}" if text.endswith(r"\}") else text[-1]
        inside = text[len(opening) : -len(closing)]
        if _is_balanced(inside):
            parts = _split(inside)
            brackets = _OPENING[opening] + closing[-1]
            if brackets in (SET, *ORDERED) and (len(parts) > 1 or brackets == SET):
                return _collection(brackets, [_read(part.strip()) for part in parts], text, (opening, closing))
    parts = _split(text)
    if len(parts) > 1:
        return _collection(LIST, [_read(part.strip()) for part in parts], text, ("", ""))
    return _leaf(text)


def _quantity(text: str) -> AnswerForm | None:
    """Return the number that plain text gives, with a percent sign or a unit, or None."""
    rest, is_percent = without_percent(unwrap(text))
    number, factor = without_unit(rest)
    value = read_number(number)
    if value is None and "," not in number:
        value = read_number(_spell(number))
    return None if value is None else _number(value * factor, text, is_percent)


def _number(value: Fraction, text: str, is_percent: bool = False) -> AnswerForm:
    spelling = str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"
    sign, digits = "-" * (value < 0), abs(value.numerator)
    source = f"{sign}{digits}" if value.denominator == 1 else rf"{sign}\frac{{{digits}}}{{{value.denominator}}}"
    return AnswerForm("number", spelling, source, value, is_percent)


def _collection(brackets: str, parts: list[AnswerForm], text: str, marks: tuple[str, str]) -> AnswerForm:
    spelled = [f"{part.name}={part.spelling}" if part.name else part.spelling for part in parts]
    if brackets in (LIST, SET):
        spelled.sort()
    return AnswerForm(
        "collection", f"{marks[0]}{', '.join(spelled)}{marks[1]}", text, parts=tuple(parts), brackets=brackets
    )


def _leaf(text: str) -> AnswerForm:
    """Return the form of text that is neither a number nor a bracketed collection."""
    if text.startswith("{") and text.endswith("}") and _is_balanced(text[1:-1]):
        return _read(text[1:-1].strip())
    if (match := _MATRIX.fullmatch(text)) is not None and r"\begin" not in match[1]:
        rows = [[_read(cell.strip()) for cell in row.split("&")] for row in _NEW_ROW.split(match[1]) if row.strip()]
        lines = tuple(_collection("()", row, "", ("(", ")")) for row in rows)
        return AnswerForm("collection", "".join(text.split()), text, parts=lines, brackets=MATRIX)
    is_worded = any(len(each[1].strip()) > 1 for each in WRAPPED.finditer(text))
    flat = unwrap(text).removeprefix("+")
    core, factor = without_unit(without_percent(flat)[0])
    if factor != 1:
        core = flat
    spelling = _spell(core)
    if (choice := _CHOICE.fullmatch(spelling)) is not None:
        spelling = choice[1]
    if factor != 1 or (is_worded and _WORDS.search(COMMAND.sub("", core))) or not _is_mathematics(core):
        words = re.sub(r"(?<=[A-Za-z])\.", "", spelling)
        return AnswerForm("text", words.lower() if _WORDS.search(words) else spelling)
    source = _DECIMAL.sub(lambda match: rf"\frac{{{match[1]}{match[2]}}}{{1{'0' * len(match[2])}}}", core)
    if core.count(r"\pm") == 1:
        both = [_read(re.sub(r"^\s*\+", "", core.replace(r"\pm", sign)).strip()) for sign in "+-"]
        return AnswerForm("collection", spelling, source, parts=tuple(both))
    kind = "relation" if _RELATION.search(core) else "equation" if _EQUALS.search(core) else "expression"
    return AnswerForm(kind, spelling, source)


def _is_mathematics(text: str) -> bool:
    """Return whether plain text seems to be a formula throughout: known commands, single letters, digits and signs only."""
    if _NO_MATHEMATICS.fullmatch("".join(text.split())) or _BETWEEN_DIGITS.search(text) or text.count("|") % 2:
        return False
    place, has_matrix = 0, r"\begin{vmatrix}" in text
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            if not has_matrix or not text.startswith(("&", "\\\\"), place):
                return False
            place += 1 + (text[place] == "\\")
            continue
        if match[1] is not None and not _KNOWN.fullmatch(match[1]) and match[1] != r"\pm":
            return False
        place = match.end()
    return True


def _spell(text: str) -> str:
    """Return the spelling of a leaf: fractions as a/b, and spaces only between digits."""
    text = _SPACE.sub(lambda match: " " * bool(match[1]), _fractions(text).strip())
    return text.lower() if _WORDS.fullmatch(text) else text


def letters(text: str) -> set[str]:
    """Return the LaTeX letters that are variables or constants such as e."""
    return set(re.findall("[A-Za-z]", COMMAND.sub(" ", text)))


def _fractions(text: str) -> str:
    r"""Replace ``\frac{a}{b}`` by a/b, with parentheses if needed."""
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
    """Return the next argument of a TeX command that ends at ``start``, and the index of the argument's end."""
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


def bracket_depth(text: str) -> int:
    """Return the maximum nesting depth of brackets of all kinds."""
    return max(accumulate((letter in "([{") - (letter in ")]}") for letter in text), default=0)


def _split(text: str) -> list[str]:
    """Split a list into its elements, at the commas outside brackets."""
    commas = _find_commas(text)
    if not commas:
        return [text]
    parts = [text[start + 1 : end] for start, end in pairwise([-1, *commas, len(text)])]
    return parts if all(part.strip() for part in parts) else [text]


def _is_balanced(text: str) -> bool:
    return _find_commas(text) is not None


def _find_commas(text: str) -> list[int] | None:
    """Return the indices of the commas outside brackets of any kind, or None if brackets are not balanced."""
    depth, commas = 0, []
    for index, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth < 0:
            return None
        if letter == "," and depth == 0:
            commas.append(index)
    return commas if depth == 0 else None


def names_differ(truth: AnswerForm, answer: AnswerForm) -> bool:
    """Return whether two answers give values to different variables, such as x = 3 and y = 3."""
    ours, theirs = truth.name.lower(), answer.name.lower()
    return ours != theirs and len(ours) == len(theirs) == 1
