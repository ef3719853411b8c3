r"""Find the answers that a response marks: ``#### 42`` (GSM8K, arXiv 2110.14168), ``\boxed{42}`` (MATH, arXiv 2103.03874),
``Answer: 42`` (DAPO, arXiv 2503.14476).

Every scan takes linear time in the text length, for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rlhf_mcore.rewards.forms import read_answer
from rlhf_mcore.rewards.latex import is_other_number, leading_number, parse_number

MAX_RESPONSE_CHARS = 2**18  # 64k tokens of four characters
MAX_LINE_CHARS = 300  # length of the line after a mark
_MAX_TRUTH_BITS = 4096  # size of an integer; str() raises for a huge integer
MAX_MARKS = 1000  # per kind of mark; earlier marks are ignored

_MARKER = re.compile(r"(?<!#)####(?!#)\s{0,16}")
_ANSWER = re.compile(r"(?<![A-Za-z])answer[*_`]{0,4}[ \t]{0,4}:\s{0,16}", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,16}\{|\\.|[{}]", re.DOTALL)
_DECORATION = re.compile(r"(?<![0-9)])\*\*|\*\*(?![0-9(])|^[*_]{1,8}|[*_]{1,8}$|`|\\[()\[\]]")
_LABEL = re.compile(r"(?:the\s{1,4})?(?:final\s{1,4})?answer\s{0,4}:\s{0,4}", re.IGNORECASE)
_END = re.compile(r"\n|####")
_DIGIT = re.compile(r"[0-9]")
# The start of a remark about a number: "because 7 * 6 is 42", "(7 * 6)", ", which is more than 40".
_REMARK = re.compile(r",?\s(?:because|since|as|which|so|after|where)\s|\s\((?=[^()]*\)\s*\.?$)|,\s(?=[A-Za-z])")
_NAMES_OR_COMPUTES = re.compile(
    r"[A-Za-z]?|[A-Za-z\s]{2,}|(?=.*[0-9)]\s*[-+*/\u00d7\u00f7])[-0-9.,\s+*/()$\u00d7\u00f7]+"
)  # left of an equals sign
_PROSE = re.compile(r"\s(?:[A-Za-z]{2}|[aIL]\b|[a-z]{1,2}\.)[A-Za-z\s.,'/-]*")
_SYMBOLS = re.compile("[\x00-\x1f\u2600-\u27bf\ufe0f\U0001f000-\U0001faff]+")  # for example a check mark
# Patterns for multiple-choice questions:
_CHOICE_IS = re.compile(
    r"\b(?:answer|choice|option)\s{0,4}(?:is)?\s{0,4}:?\s{0,4}(?=[*_(\[\\$]{0,8}[A-Ja-j](?![A-Za-z]))", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[\n;]|\.(?=\s|$)|,?\s(?:because|since|as|which)\s")
_CHOICE_NOISE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|[*_`${}\\]")
_CHOICES = re.compile(r"[(\[]?([A-J])[)\].]?(?:\s{0,4}(?:,|;|&|and\b)?\s{0,4}[(\[]?([A-J])[)\].]?){0,9}", re.IGNORECASE)
_CHOICE_AND_TEXT = re.compile(r"(?:[(\[]([A-J])[)\]]|([A-J])[.):])\s{0,4}(?=\S)", re.IGNORECASE)
# Text after a choice that names another choice or withdraws this one.
_OTHER_CHOICE = re.compile(
    r"[(\[][A-J][)\]]|(?<![A-Za-z])[A-J][):]|\bor\b\s{0,4}(?:option\s{0,4})?[A-J]\b|/\s{0,4}[A-J]\b", re.IGNORECASE
)
_OTHER_LETTER = re.compile(r"(?:^|[\s,;/])[B-HJ]\.\s")
_IS_NONE = re.compile(
    r"(?:is|are|was|seems?)?\s{0,4}(?:not|n't|wrong|incorrect|false|maybe|perhaps|possibly)\b|(?:or|and|/|\||\?)\s*$",
    re.IGNORECASE,
)


def fits(response: str) -> bool:
    """Return whether a response is short enough to scan."""
    return len(response) <= MAX_RESPONSE_CHARS


def boxes(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of the content of every balanced box, in closing order. Escaped braces do not count."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return
    open_braces: list[int] = []  # content starts of boxes; -1 for a brace without a box
    for match in _BRACE.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                yield start, match.start()
        elif token.endswith("{") and token != "\\{":
            open_braces.append(match.end() if len(token) > 1 else -1)


def last_box(text: str) -> tuple[int, int] | None:
    r"""Return the start and end of the content of the balanced ``\boxed{...}`` that opens last (the innermost one)."""
    return max(boxes(text), default=None)


def last_boxed(text: str) -> str | None:
    r"""Return the content of the balanced ``\boxed{...}`` that opens last, or None."""
    box = last_box(text)
    return None if box is None else text[box[0] : box[1]]


def marked_lines(text: str) -> list[tuple[int, str]]:
    """Return the start and content of the text after each ``####`` (without a fifth ``#``) on its line, in order."""
    return _lines(_MARKER, text)


def marked_numbers(text: str) -> Iterator[tuple[int, Fraction]]:
    """Yield the numbers after ``####`` with their starts, from the last to the first.

    ``#### 2. Solve`` is a heading, and ``#### 18 or 19`` is ambiguous. Neither counts as a number.
    """
    for start, line in reversed(marked_lines(text)):
        number = _number_of_line(line)
        if number is not None:
            yield start, number


def answer_lines(text: str) -> list[tuple[int, str]]:
    """Return the start and content of the text after each ``Answer:`` on its line, in order, without empty lines."""
    return [(start, line) for start, line in _lines(_ANSWER, text) if line]


def marked_number(text: str) -> Fraction | None:
    r"""Return the number after the last ``####`` or in the last box, whichever comes later. A box without a number is ignored."""
    marked, box = next(marked_numbers(text), None), last_box(text)
    if box is not None and (marked is None or box[0] > marked[0]):
        number = number_of(text[box[0] : box[1]])
        if number is not None:
            return number
    return None if marked is None else marked[1]


def last_answer(text: str) -> str | None:
    """Return the answer that is marked last: a number after ``####``, a box or an ``Answer:`` line.

    If there is none, return the text after the last ``####``, or None.
    """
    lines = marked_lines(text)
    number = next(((start, line) for start, line in reversed(lines) if _number_of_line(line) is not None), None)
    box = last_box(text)
    candidates = [each for each in (number, *answer_lines(text)[-1:]) if each is not None]
    if box is not None:
        candidates.append((box[0], text[box[0] : box[1]]))
    if not candidates:
        return lines[-1][1] or None if lines else None
    return unbox(max(candidates)[1])


def unbox(answer: str) -> str:
    """Return the content of the last box in an answer, or the answer if it contains no box."""
    inner = last_boxed(answer)
    return answer if inner is None else inner


def number_of(text: str) -> Fraction | None:
    r"""Return the number that an answer gives in any notation (``x = 45``, ``\dfrac12``, ``18\text{ dollars}``), or None."""
    number = parse_number(text)
    return read_answer(text).value if number is None else number


def _number_of_line(line: str) -> Fraction | None:
    """Return the number that a marked line gives, or None. Words may follow it, unless they change the number."""
    line = line[label.end() :] if (label := _LABEL.match(line)) else line
    if not _DIGIT.search(line) or "boxed" in line:
        return None
    line = _SYMBOLS.sub("", line).strip()
    number = number_of(line)
    if number is not None:
        return number
    remark = _REMARK.search(line)
    if remark is not None:
        said = line[remark.end() :].rstrip(" .)")
        if is_other_number(said.split(" ")[0]) or number_of(said) is not None:
            return None
        number = number_of(line[: remark.start()])
        if number is not None:
            return number
        line = line[: remark.start()]
    left, _, right = line.rpartition("=")
    leading = leading_number(right.strip())
    if leading is None or not _NAMES_OR_COMPUTES.fullmatch(left) or _DIGIT.search(leading[1]):
        return None
    words = leading[1].rstrip().removesuffix(".").rstrip(" ,;")
    return (
        leading[0]
        if not words or (words[0] == " " and _PROSE.fullmatch(words) and not is_other_number(words))
        else None
    )


def _lines(mark: re.Pattern[str], text: str) -> list[tuple[int, str]]:
    """Return the start and content of the text after the last ``MAX_MARKS`` marks, up to the line end or another ``####``."""
    starts = [match.end() for match in mark.finditer(text)][-MAX_MARKS:]
    lines = [_END.split(text[start : start + MAX_LINE_CHARS], maxsplit=1)[0] for start in starts]
    return [(start, _DECORATION.sub("", line).strip()) for start, line in zip(starts, lines, strict=True)]


def truth_answer(truth: str) -> str:
    """Return the answer that a worked solution marks. If it marks none, return the whole text."""
    answer = last_answer(truth)
    return truth if answer is None else answer


def truth_text(ground_truth: Any) -> str:
    """Return the ground truth as stripped text; empty for None and for texts that are too long for an answer."""
    if ground_truth is None or (isinstance(ground_truth, int) and ground_truth.bit_length() > _MAX_TRUTH_BITS):
        return ""
    text = str(ground_truth).strip()
    return text if fits(text) else ""


def chosen_letters(text: str) -> str:
    """Return the options that a response chooses, sorted ("B", "AC"), or "".

    The options are read from the first of these that exists:

    - ``<answer>``;
    - the last box or ``Answer:`` line, whichever comes later;
    - the text after the last "answer is", "option" or "choice";
    - the whole text, if it contains only a choice.

    "B", "(b)", "**B.** Paris", "A, C" and "A and C" are choices. "A or B" is not.
    """
    opened = text.rfind("<answer>")
    if opened >= 0:
        return letters_of(text[opened + len("<answer>") :].partition("</answer>")[0])
    box, line = last_box(text), (answer_lines(text) or [(-1, "")])[-1]
    if box is not None and box[0] > line[0]:
        return letters_of(text[box[0] : box[1]])
    if line[1]:
        return letters_of(unbox(line[1]))
    ends = [match.end() for match in _CHOICE_IS.finditer(text)][-1:]
    if ends:
        sentence = _SENTENCE_END.split(text[ends[0] : ends[0] + MAX_LINE_CHARS], maxsplit=1)[0]
        return letters_of(sentence)
    return letters_of(text) if "\n" not in text.strip() else ""


def letters_of(answer: str) -> str:
    """Return the letters A to J that form an answer, sorted, or "" if the answer contains anything else."""
    if len(answer) > MAX_LINE_CHARS:
        return ""
    answer = " ".join(_CHOICE_NOISE.sub("", answer).split())
    if _CHOICES.fullmatch(answer):
        letters = re.findall("[A-J]", re.sub(r"\band\b", "", answer, flags=re.IGNORECASE).upper())
        return "".join(sorted(set(letters))) if len(set(letters)) == len(letters) else ""
    match = _CHOICE_AND_TEXT.match(answer)
    rest = "" if match is None else answer[match.end() :]
    if match is None or any(search(rest) for search in (_OTHER_CHOICE.search, _OTHER_LETTER.search, _IS_NONE.match)):
        return ""
    return (match[1] or match[2]).upper()
