"""Test graders: recognised answers, equal answers, and hostile text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.rewards.answers import MAX_RESPONSE_CHARS, last_boxed
from rlhf_mcore.rewards.graders import (
    answer_format,
    answer_line,
    answer_of,
    boxed_answer,
    exact_match,
    final_number,
)
from rlhf_mcore.rewards.latex import parse_number
from tests.graders import GRADERS

MEGABYTE = 2**20


def test_exact_match() -> None:
    for response, truth, expected in [
        ("Paris", "Paris", 1.0),
        (" Paris\n", "Paris ", 1.0),
        ("paris", "Paris", 0.0),
        ("It is Paris", "Paris", 0.0),
        ("7", 7, 1.0),
        ("", "", 0.0),  # an empty response must not score because the answer is missing
        ("", None, 0.0),
        ("None", None, 0.0),
    ]:
        assert exact_match(response, truth) == expected


def test_final_number() -> None:
    for response, truth, expected in [
        # the marker
        ("2 + 40 = 42\n#### 42", "42", 1.0),
        ("#### 41", "42", 0.0),
        ("42", "42", 0.0),  # not marked
        ("", "42", 0.0),
        ("####42", "42", 1.0),
        ("####\n42", "42", 1.0),
        ("#### 1\n#### 2", "2", 1.0),  # the last marker counts
        ("#### 1\n#### 2", "1", 0.0),
        ("#### 42\n#### Notes", "42", 1.0),  # a heading is not an answer
        ("##### 42", "42", 0.0),  # a heading of level five
        ("######## 42", "42", 0.0),
        ("#### 42 because 7 * 6 is 42, not 43", "42", 1.0),
        ("#### The answer is 42", "42", 0.0),
        ("**#### 42**", "42", 1.0),
        # notations of a number
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### $1,234.50.", "1234.5", 1.0),
        ("#### \\$18", "18", 1.0),
        ("#### 42.", "42", 1.0),
        ("#### +42", "42", 1.0),
        ("#### -42", "42", 0.0),
        ("#### -42", -42, 1.0),
        ("#### -$42", "-42", 1.0),
        ("#### $-42", "-42", 1.0),
        ("#### --42", "-42", 0.0),
        ("#### \u221242", "-42", 1.0),  # the typographic minus
        ("#### 42%", "42", 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 0.50", 0.5, 1.0),
        ("#### 42", 42.0, 1.0),
        ("#### 1e3", "1000", 1.0),
        ("#### -0", "0", 1.0),
        ("#### 5 eggs", "5", 1.0),
        # exact decimals, no floating point
        ("#### 0.1000000000000000000000000000000000001", "0.1", 0.0),
        ("#### -1234567890123456789012345678901234567891", "-1234567890123456789012345678901234567890", 0.0),
        ("#### 9007199254740993", "9007199254740992", 0.0),
        # a number within something else is not the answer
        ("#### 3/4", "3", 0.0),
        ("#### 12:30", "12", 0.0),
        ("#### 2^10", "2", 0.0),
        ("#### 2**10", "2", 0.0),
        ("#### 1.2.3", "1.2", 0.0),
        # a box, if no marker is present
        ("so \\boxed{42}", "42", 1.0),
        ("so \\boxed{ \\$1{,}234.0 }", "1234", 1.0),
        ("so \\boxed{1,\\!000}", "1000", 1.0),
        ("so \\boxed{50\\%}", "50", 1.0),
        ("\\boxed{1} no, \\boxed{2}", "2", 1.0),
        ("\\boxed{1} no, \\boxed{2}", "1", 0.0),
        ("\\boxed{x = 42}", "42", 1.0),
        ("\\boxed{x + 1 = 42}", "42", 0.0),  # an equation to solve
        ("\\boxed{}", "0", 0.0),
        ("#### \\boxed{42}", "42", 1.0),
        ("\\boxed{1}\n#### 2", "2", 1.0),  # the marker takes precedence
        ("\\boxed{1}\n#### 2", "1", 0.0),
        # text around a number
        ("#### **18**", "18", 1.0),
        ("#### Answer: 18", "18", 1.0),
        ("#### **Answer:** 18", "18", 1.0),
        ("#### \\(18\\)", "18", 1.0),
        ("#### $18$", "18", 1.0),
        ("#### \u20ac18", "18", 1.0),
        ("#### \u20ac1,800.00", "1800", 1.0),
        ("#### -\u20ac18", "-18", 1.0),
        ("#### `18`", "18", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("#### x = 18", "18", 1.0),
        ("#### 6 * 3 = 18", "18", 1.0),
        ("#### 1/2", "0.5", 1.0),
        ("#### \\frac{1}{2}", "1/2", 1.0),
        ("#### 1 1/2", "1.5", 1.0),
        ("\\boxed{18\\text{ dollars}}", "18", 1.0),
        ("\\boxed{18 \\mathrm{~cm}^2}", "18", 1.0),
        ("\\boxed{48^\\circ}", "48", 1.0),
        ("\\boxed{\\dfrac12}", "0.5", 1.0),
        # several numbers are not a number
        ("#### 18 or 19", "18", 0.0),
        ("#### 18 or 19", "19", 0.0),
        ("#### 18 dollars or 19 dollars", "18", 0.0),
        ("#### 18, 19", "18", 0.0),
        ("#### 18-19", "18", 0.0),
        ("#### 18 to 19", "18", 0.0),
        ("#### 18 \\pm 1", "18", 0.0),
        ("#### 5 dollars and 30 cents", "5", 0.0),
        ("#### 6 * 3", "6", 0.0),
        ("#### 6 + 3", "6", 0.0),
        ("\\boxed{18 \\text{ or } 19}", "18", 0.0),
        # a comma
        ("\\boxed{0,1}", "1", 0.0),
        ("\\boxed{0,1}", "01", 0.0),
        ("\\boxed{1,2,3}", "123", 0.0),
        ("\\boxed{12,34}", "1234", 0.0),
        ("\\boxed{1, 234}", "1234", 0.0),
        ("#### 1,23", "123", 0.0),
        ("#### 1,234,567", "1234567", 1.0),
        ("#### 0,123", "123", 0.0),
        # headings
        ("#### 2. Solve\n... \\boxed{7}", "7", 1.0),
        ("#### 2. Solve\n... \\boxed{7}", "2", 0.0),
        ("\\boxed{7}\n#### 2. Check", "7", 1.0),
        ("#### 2) Solve", "2", 0.0),
        ("#### 2: Solve", "2", 0.0),
        ("#### Step 2", "2", 0.0),
        ("#### 3 steps are left\n\\boxed{7}", "7", 1.0),  # the later mark counts
        # ground truths
        ("#### 72", "48/2 = 24, 48 + 24 = 72\n#### 72", 1.0),
        ("#### 72", "Hence \\boxed{72}.", 1.0),
        ("#### 72", None, 0.0),
        ("#### 72", "", 0.0),
        ("#### 72", "seventy-two", 0.0),
        ("no number", "seventy-two", 0.0),
        ("#### 1", True, 0.0),
    ]:
        assert final_number(response, truth) == expected


def test_boxed() -> None:
    for response, truth, expected in [
        ("\\boxed{x^2 + 1}", "x^2+1", 1.0),
        ("\\boxed{x^2 + 1}", "x^2 + 2", 0.0),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("\\boxed{\\frac{1}{2}}", "so it is \\boxed{\\frac12}, or \\boxed{\\frac{1}{2}}", 1.0),
        ("\\boxed{1,000.0}", "1000", 1.0),
        ("\\boxed{5}", "#### 5", 1.0),
        ("\\boxed {5}", "5", 1.0),
        ("\\boxed{A} then \\boxed{B}", "B", 1.0),
        ("\\boxed{A} then \\boxed{B", "A", 1.0),  # the last balanced box
        ("\\boxed{\\{1, 2\\}}", "\\{1,2\\}", 1.0),  # escaped braces do not count
        ("\\boxed{\\{1, 2}", "\\{1,2", 1.0),
        ("\\boxed{}", "", 0.0),
        ("\\boxed{ }", "5", 0.0),
        ("5", "5", 0.0),
        ("boxed{5}", "5", 0.0),
        ("\\\\boxed{5}", "5", 0.0),  # a line break, then a word
        ("\\boxed{5}", None, 0.0),
        ("\\boxed{0,1}", "1", 0.0),
        ("\\boxed{1,0}", "0,1", 1.0),
        ("\\fbox{5}", "5", 1.0),
        ("\\boxed{None}", None, 0.0),
    ]:
        assert boxed_answer(response, truth) == expected


def test_answer_line() -> None:
    for response, truth, expected in [
        ("so\nAnswer: 34", "34", 1.0),
        ("so\nAnswer: 34", 34, 1.0),
        ("so\nAnswer: 35", "34", 0.0),
        ("so 34", "34", 0.0),
        ("", "34", 0.0),
        ("Answer:", "34", 0.0),
        ("Answer: ", "", 0.0),
        ("Answer: $34$.", "34", 1.0),
        ("**Answer:** 34", "34", 1.0),
        ("**Answer**: \\(34\\)", "34", 1.0),
        ("Final answer: \\boxed{34}", "34", 1.0),
        ("Answer:\n34", "34", 1.0),
        ("answer: 1,234", "1234", 1.0),
        ("Answer: 1\nAnswer: 34", "34", 1.0),  # the last tag counts
        ("Answer: 34\nAnswer: 1", "34", 0.0),
        ("Answer: 34 or 35", "34", 0.0),
        ("Answer: \\dfrac{1}{2}", "1/2", 1.0),
        ("Answer: \\sqrt2", "\\sqrt{2}", 1.0),
        ("Answer 34", "34", 0.0),
        ("#### 34", "34", 0.0),
        ("\\boxed{34}", "34", 0.0),
        ("Answer: " + "3" * 2**19, "34", 0.0),
    ]:
        assert answer_line(response, truth) == expected


def test_answer_format() -> None:
    for response, expected in [
        ("Answer: 34", 1.0),
        ("Answer: 34\nAnswer: 35", 0.0),
        ("Answer: 34\n#### 34", 1.0),
        ("#### 2. Solve\n\\boxed{5}", 1.0),
        ("so\n#### 42", 1.0),
        ("so \\boxed{x}", 1.0),
        ("#### Plan\nthink\n#### 42", 1.0),
        ("42", 0.0),
        ("", 0.0),
        ("#### 41\n#### 42", 0.0),
        ("\\boxed{1} \\boxed{2}", 0.0),
        ("\\boxed{42}\n#### 42", 0.0),
        ("\\boxed{\\boxed{42}}", 0.0),
        ("\\boxed{}", 0.0),
        ("\\boxed{42", 0.0),
        ("#### ", 0.0),
    ]:
        assert answer_format(response, "irrelevant") == expected


def test_numbers_are_capped():
    assert parse_number("1" * 60) == int("1" * 60)
    assert parse_number("1" * 65) is None
    assert parse_number("1" + "{,}000" * 10) == 10**30
    assert parse_number("1" + "{,}000" * 11) is None  # the length limit applies before any clean-up
    assert parse_number("1e1000") == 10**1000
    assert parse_number("1e1001") is None
    assert parse_number("1e-1001") is None
    assert parse_number("1e" + "9" * 40) is None
    assert parse_number("\u0664\u0662") is None  # digits of another script


def test_a_ground_truth_too_long_to_print_matches_nothing():
    huge = 10**5000  # its str() raises
    assert [grade("#### 1 \\boxed{1}", huge) for grade in (exact_match, final_number, boxed_answer)] == [0.0] * 3


def test_nested_boxes_open_last():
    assert last_boxed("\\boxed{a \\boxed{b} c}") == "b"
    assert last_boxed("}}{ \\boxed{{a}{b}} {") == "{a}{b}"


HOSTILE = {
    "tower": "\\boxed{5^{5^{5^{5^{5}}}}}",
    "power": "#### 9**9**9**9",
    "nul": "#### 5\x00\n\\boxed{5\x00}",
    "surrogate": "\ud800#### \udfff \\boxed{\ud800}",
    "code": "#### __import__('os').system('true')",
    "exponent": "#### 1e" + "9" * 100_000,
    "digits": "#### " + "9" * 200_000,
    "commas": "#### " + "1," * 100_000,
    "hashes": "#" * 200_000,
    "markers": "#### " * 50_000,
    "spaces": "####" + " " * 200_000 + "5",
    "open boxes": "\\boxed{" * 30_000,
    "deep boxes": "\\boxed{" * 20_000 + "}" * 20_000,
    "box spaces": ("\\boxed" + " " * 200) * 1000,
    "backslashes": "\\" * 200_000,
    "braces": "{}" * 100_000 + "\\boxed{}}",
    "latex": "\\boxed{" + "\\frac{" * 20_000 + "}" * 20_000 + "}",
    "numbers on one line": "#### 5 or 6 " * 20_000,
    "a megabyte": "1" * MEGABYTE,
    "a megabyte of boxes": "\\boxed{5}" * (MEGABYTE // 9),
}


# Well-formed wrong answers, or correct answers followed by NUL.
PAID = {("format", "tower"), ("format", "latex"), ("final_number", "nul"), ("format", "surrogate")}


@pytest.mark.timeout(120)  # quadratic or exponential scanning would take hours
def test_hostile_text_raises_nothing_and_earns_nothing_undue() -> None:
    for name in HOSTILE:
        for grader in [name for name in GRADERS if name not in ("regex", "length", "language")]:
            assert GRADERS[grader](HOSTILE[name], "5") == float((grader, name) in PAID)


def test_nul_and_surrogates_are_ordinary_characters():
    assert final_number("#### 5\x00", "5") == 1.0
    assert boxed_answer("\\boxed{5\x00}", "5") == 0.0
    assert boxed_answer("\\boxed{\ud800}", "\ud800") == 1.0
    assert answer_format("\ud800 \\boxed{\ud800}") == 1.0


def test_a_response_beyond_the_cap_scores_zero():
    for mark in ("#### 5", "\\boxed{5}"):
        fits = mark.rjust(MAX_RESPONSE_CHARS)
        assert max(final_number(fits, "5"), boxed_answer(fits, "5")) == 1.0
        assert [grade(" " + fits, "5") for grade in GRADERS.values()] == [0.0] * len(GRADERS)


PIECES = [
    "####",
    " ",
    "5",
    "-",
    ".",
    ",",
    "e9",
    "\\boxed",
    "{",
    "}",
    "\\",
    "$",
    "/",
    "\n",
    "x",
    "\x00",
    "\ud800",
    "\u0665",
]
soup = st.one_of(st.lists(st.sampled_from(PIECES), max_size=30).map("".join), st.text(max_size=50))


@settings(max_examples=40, deadline=None)
@given(response=soup, truth=soup)
def test_no_text_raises(response: str, truth: str):
    for name, grade in GRADERS.items():
        score = grade(response, truth)
        assert score in (0.0, 1.0) or (name == "language" and 0 <= score <= 1), name


@settings(max_examples=40, deadline=None)
@given(value=st.decimals(-(10**9), 10**9, places=3), noise=st.text(alphabet="abc xyz\n", max_size=30))
def test_any_number_survives_its_notations(value, noise: str):
    for written in (f"{value}", f"{value:,}", f"{value}0", f"${abs(value)}" if value >= 0 else f"-${abs(value)}"):
        assert final_number(f"{noise}#### {written}\n{noise}", str(value)) == 1.0
        assert final_number(f"{noise}\\boxed{{{written}}}{noise}", str(value)) == 1.0
        assert boxed_answer(f"{noise}\\boxed{{{written}}}{noise}", str(value)) == 1.0
        assert final_number(f"#### {written}", str(value + 1)) == 0.0


def test_what_a_response_votes_for() -> None:
    for response, answer in [
        ("so #### 42", "42"),
        ("#### 1,000.0", "1000"),
        ("#### 4.50", "9/2"),
        ("#### -.5", "-1/2"),
        (r"\boxed{4.5}", "9/2"),
        (r"\boxed{\frac{1}{2} \pi}", r"1/2\pi"),
        (r"\boxed{\dfrac12\pi}", r"1/2\pi"),
        ("so\nAnswer: $34$", "34"),
        (r"\boxed{ }", ""),
        (" B \n", "B"),
        ("", ""),
        ("I cannot say, because this question has more than one answer, and both are wrong.", ""),
        (r"\boxed{5^{5^{5^{5^5}}}}", "5^{5^{5^{5^5}}}"),
        ("#### 1e1000" + "0" * 60, ""),
        ("#### 42" + " " * MAX_RESPONSE_CHARS, ""),
    ]:
        assert answer_of(response) == answer
