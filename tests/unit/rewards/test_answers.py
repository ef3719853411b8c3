"""Check that different answers score 0 under every rule that compares spellings (tests/answers.py)."""

from __future__ import annotations

import pytest

from rlhf_mcore.rewards.forms import read_answer
from rlhf_mcore.rewards.mathematics import is_same
from tests.answers import PAIRS
from tests.graders import GRADERS


def test_the_table_is_long() -> None:
    assert sum(is_same for *_, is_same in PAIRS) >= 400
    assert sum(not is_same for *_, is_same in PAIRS) >= 600


@pytest.mark.parametrize(("rule", "response"), [("boxed", "So \\boxed{%s}"), ("answer_line", "So\nAnswer: %s")])
def test_no_rule_of_spellings_accepts_what_is_not_the_same(rule: str, response: str) -> None:
    wrong = [pair for pair in PAIRS if not pair[2] and GRADERS[rule](response % pair[1], pair[0])]
    assert wrong == []


@pytest.mark.parametrize("response", ["So \\boxed{%s}", "So\n#### %s"])
def test_final_number_accepts_no_other_number(response: str) -> None:
    truths = [pair for pair in PAIRS if not pair[2] and "=" not in pair[0]]  # the rule ignores names
    assert [pair for pair in truths if GRADERS["final_number"](response % pair[1], pair[0])] == []


@pytest.mark.timeout(60)  # backtracking would take years
def test_no_answer_takes_long_to_read() -> None:
    for piece in (
        "a",
        "a ",
        "a-",
        "ab^2",
        "1",
        "1 ",
        "1,",
        "(",
        "(1,",
        r"\{",
        "=",
        "x=",
        r"\pm ",
        ".",
        "5 million ",
        "or ",
        "5 or ",
        "|",
        "^2",
        "_",
        "[",
        "$",
        "~",
    ):
        for start, end in (
            ("", ""),
            ("5 ", "^2b"),
            ("5 abc", "!"),
            (r"\text{", "}"),
            ("x=", "=1"),
            ("(", ")"),
            ("5 (", ") ok"),
        ):
            answer = start + piece * (990 // len(piece)) + end
            assert GRADERS["boxed"](f"\\boxed{{{answer}}}", "5") == 0.0
            assert GRADERS["final_number"](f"#### {answer}", "7") == 0.0
            assert is_same(read_answer("5"), read_answer(answer), lambda *_: True) in (True, False)
