"""The options that a response chooses in a question with several."""

from __future__ import annotations

import re
from typing import Any

from rlhf_mcore.rewards.answers import MAX_LINE_CHARS, answer_lines, fits, last_box, truth_text, within

_CHOICE_IS = re.compile(
    r"\b(?:answer|choice|option)\s{0,4}(?:is)?\s{0,4}:?\s{0,4}(?=[*_(\[\\$]{0,8}[A-Ja-j](?![A-Za-z]))", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[\n;]|\.(?=\s|$)|,?\s(?:because|since|as|which)\s")
_CHOICE_NOISE = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|[*_`${}\\]")
_CHOICES = re.compile(r"[(\[]?([A-J])[)\].]?(?:\s{0,4}(?:,|;|&|and\b)?\s{0,4}[(\[]?([A-J])[)\].]?){0,9}", re.IGNORECASE)
_CHOICE_AND_TEXT = re.compile(r"(?:[(\[]([A-J])[)\]]|([A-J])[.):])\s{0,4}(?=\S)", re.IGNORECASE)
# In what follows a choice: another one, or that it is none.
_OTHER_CHOICE = re.compile(
    r"[(\[][A-J][)\]]|(?<![A-Za-z])[A-J][):]|\bor\b\s{0,4}(?:option\s{0,4})?[A-J]\b|/\s{0,4}[A-J]\b", re.IGNORECASE
)
_OTHER_LETTER = re.compile(r"(?:^|[\s,;/])[B-HJ]\.\s")
_IS_NONE = re.compile(
    r"(?:is|are|was|seems?)?\s{0,4}(?:not|n't|wrong|incorrect|false|maybe|perhaps|possibly)\b|(?:or|and|/|\||\?)\s*$",
    re.IGNORECASE,
)


def chosen_letters(text: str) -> str:
    """Return the options that a response chooses, sorted ("B", "AC"), or "".

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
    """Return the letters A to J that an answer is, sorted; "" where it is something else."""
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


def multiple_choice(response: str, ground_truth: Any) -> float:
    """Grade 1 if the letters that the response chooses (see ``chosen_letters``) are those of the ground truth: "B", "A, C"."""
    truth = truth_text(ground_truth)
    expected = letters_of(truth) or chosen_letters(truth)
    return float(bool(expected) and fits(response) and chosen_letters(response) == expected)
