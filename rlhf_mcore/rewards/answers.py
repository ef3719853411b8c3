r"""Where a response marks its answer: ``#### 42`` (GSM8K, arXiv 2110.14168), ``\boxed{42}`` (MATH, arXiv 2103.03874), ``Answer: 42``
(DAPO, arXiv 2503.14476).

Every scan is linear in the length of the text, whatever is in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

from rlhf_mcore.rewards.latex import canonical, leading_number, parse_number

MAX_RESPONSE_CHARS = 2**18  # 64k tokens of four characters
MAX_LINE_CHARS = 300  # of the line after a mark
MAX_MARKS = 1000  # of a kind: earlier ones are not looked at

_MARKER = re.compile(r"(?<!#)####(?!#)\s{0,16}")
_ANSWER = re.compile(r"(?<![A-Za-z])answer[*_`]{0,4}[ \t]{0,4}:\s{0,16}", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,16}\{|\\.|[{}]", re.DOTALL)
_DECORATION = re.compile(r"(?<![0-9)])\*\*|\*\*(?![0-9(])|^[*_]{1,8}|[*_]{1,8}$|`|\\[()\[\]]")
_LABEL = re.compile(r"(?:the\s{1,4})?(?:final\s{1,4})?answer\s{0,4}:\s{0,4}", re.IGNORECASE)
_END = re.compile(r"\n|####")
_DIGIT = re.compile(r"[0-9]")
# What makes the number before it a part of something else: 3/4, 2^10, 2 * 3, 7:30, 1.2.3.
_CONTINUES = re.compile(r"(?:\s?(?:\*\*?|[/^+\u00d7\u00f7\u00b7]|\\(?:times|cdot|div)(?![A-Za-z]))\s?|[:.])[-0-9({\\$]")
_HEADING = re.compile(r"[.):]\s+\S|[):]\S")  # 2. Solve, 3) Check
# Another number that it may be as well: 18 or 19, 18, 19, 18-19, 18 dollars and 5 cents.
_ALTERNATIVE = re.compile(
    r"\s?(?:[,;~&|\u00b1\u2013\u2014-]|\\pm)\s?\\?[$€£]?[0-9(]|[^0-9\n]{0,40}?(?<![A-Za-z])(?:or|and|to|through|versus|vs)(?![A-Za-z])[^0-9\n]{0,40}[0-9]"
)

_CHOICE_IS = re.compile(
    r"\b(?:answer|choice|option)\s{0,4}(?:is)?\s{0,4}:?\s{0,4}(?=[*_(\[\\$]{0,8}[A-Ja-j](?![A-Za-z]))", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[\n;]|\.(?=\s|$)|,?\s(?:because|since|as|which)\s")
_CHOICE_NOISE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|[*_`${}\\]")
_CHOICES = re.compile(r"[(\[]?([A-J])[)\].]?(?:\s{0,4}(?:,|;|&|and\b)?\s{0,4}[(\[]?([A-J])[)\].]?){0,9}", re.IGNORECASE)
_CHOICE_AND_TEXT = re.compile(r"[(\[]([A-J])[)\]]\s{0,4}\S|([A-J])[.):]\s{0,4}\S", re.IGNORECASE)


def fits(response: str) -> bool:
    """Whether a response is short enough to be looked at."""
    return len(response) <= MAX_RESPONSE_CHARS


def boxes(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of the content of every balanced box, in closing order. Escaped braces are not braces."""
    if "\\boxed" not in text and "\\fbox" not in text:
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


def last_box(text: str) -> tuple[int, int] | None:
    r"""Start and end of the content of the balanced ``\boxed{...}`` that opens last. Of nested boxes that is the innermost."""
    return max(boxes(text), default=None)


def last_boxed(text: str) -> str | None:
    r"""Content of the balanced ``\boxed{...}`` that opens last, or None."""
    found = last_box(text)
    return None if found is None else text[found[0] : found[1]]


def marked_lines(text: str) -> list[tuple[int, str]]:
    """Start and content of what stands behind each ``####`` (and no fifth ``#``) on its line, in order."""
    return _lines(_MARKER, text)


def marked_numbers(text: str) -> Iterator[tuple[int, Fraction]]:
    """The numbers among them, the last one first: ``#### 2. Solve`` is a heading and no number, and neither is ``#### 18 or 19``."""
    for start, line in reversed(marked_lines(text)):
        number = _number_of_line(line)
        if number is not None:
            yield start, number


def answer_lines(text: str) -> list[tuple[int, str]]:
    """Start and content of what stands behind each ``Answer:`` on its line, in order; empty ones are left out."""
    return [(start, line) for start, line in _lines(_ANSWER, text) if line]


def marked_number(text: str) -> Fraction | None:
    r"""The number behind a ``####``, or the content of the last box where that is a number; the later of the two."""
    found, box = next(marked_numbers(text), None), last_box(text)
    if box is not None and (found is None or box[0] > found[0]):
        number = number_of(text[box[0] : box[1]])
        if number is not None:
            return number
    return None if found is None else found[1]


def last_answer(text: str) -> str | None:
    """What is marked last: a number behind ``####``, a box, a line ``Answer:``; without any, what is behind the last ``####``."""
    lines = marked_lines(text)
    found = next(((start, line) for start, line in reversed(lines) if _number_of_line(line) is not None), None)
    box = last_box(text)
    candidates = [each for each in (found, *answer_lines(text)[-1:]) if each is not None]
    if box is not None:
        candidates.append((box[0], text[box[0] : box[1]]))
    if not candidates:
        return lines[-1][1] or None if lines else None
    return within(max(candidates)[1])


def chosen_letters(text: str) -> str:
    """The options that a response chooses, sorted ("B", "AC"), or "".

    They are what it marks last: in ``<answer>``, a box, behind ``Answer:``; else what follows the last "answer is", "option" or
    "choice"; else the whole text where that is nothing but a choice. "B", "(b)", "**B.** Paris", "A, C" and "A and C" are choices,
    "A or B" is none.
    """
    opened = text.rfind("<answer>")
    if opened >= 0:
        return letters_of(text[opened + len("<answer>") :].partition("</answer>")[0])
    box, line = last_box(text), (answer_lines(text) or [(-1, "")])[-1]
    if box is not None and box[0] > line[0]:
        return letters_of(text[box[0] : box[1]])
    if line[1]:
        return letters_of(within(line[1]))
    ends = [match.end() for match in _CHOICE_IS.finditer(text)][-1:]
    if ends:
        sentence = _SENTENCE_END.split(text[ends[0] : ends[0] + MAX_LINE_CHARS], maxsplit=1)[0]
        return letters_of(sentence)
    return letters_of(text) if "\n" not in text.strip() else ""


def letters_of(answer: str) -> str:
    """The letters A to J that an answer is, sorted; "" where it is something else."""
    if len(answer) > MAX_LINE_CHARS:
        return ""
    answer = " ".join(_CHOICE_NOISE.sub("", answer).split())
    if _CHOICES.fullmatch(answer):
        letters = re.findall("[A-J]", re.sub(r"\band\b", "", answer, flags=re.IGNORECASE).upper())
        return "".join(sorted(set(letters))) if len(set(letters)) == len(letters) else ""
    match = _CHOICE_AND_TEXT.match(answer)
    return (match[1] or match[2]).upper() if match else ""


def within(answer: str) -> str:
    """The content of the box in an answer, where there is one."""
    inner = last_boxed(answer)
    return answer if inner is None else inner


def number_of(text: str) -> Fraction | None:
    r"""The number that an answer is in whatever notation (``x = 45``, ``\dfrac12``, ``18\text{ dollars}``), or None."""
    return parse_number(text) or parse_number(canonical(text))


def _number_of_line(line: str) -> Fraction | None:
    """The number that a marked line gives as the answer. Words may follow it, but no other number that it may be as well."""
    line = line[label.end() :] if (label := _LABEL.match(line)) else line
    if not _DIGIT.search(line) or "boxed" in line:
        return None
    number = number_of(line)
    if number is not None:
        return number
    found = leading_number(line.rpartition("=")[2].strip())
    if found is None or any(pattern.match(found[1]) for pattern in (_CONTINUES, _HEADING, _ALTERNATIVE)):
        return None
    return found[0]


def _lines(mark: re.Pattern[str], text: str) -> list[tuple[int, str]]:
    """Start and content of what follows the last ``MAX_MARKS`` marks, up to the end of the line or another ``####``."""
    starts = [match.end() for match in mark.finditer(text)][-MAX_MARKS:]
    lines = [_END.split(text[start : start + MAX_LINE_CHARS], maxsplit=1)[0] for start in starts]
    return [(start, _DECORATION.sub("", line).strip()) for start, line in zip(starts, lines, strict=True)]
