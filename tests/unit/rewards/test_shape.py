"""Multiple choice, and graders of a response's shape: expressions in linear time, length, scripts."""

from __future__ import annotations

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RuleConfig
from rlhf_mcore.rewards.answers import MAX_RESPONSE_CHARS
from rlhf_mcore.rewards.graders import build_grader, multiple_choice
from tests.graders import GRADERS

CHOSEN = {
    "B": "B",
    "(b)": "B",
    "**B.** Paris": "B",
    "Answer: (A) Paris": "A",
    "Final answer: $\\text{(E)}$": "E",
    "so \\boxed{\\text{B}}": "B",
    "Answer: A. No, \\boxed{C}": "C",
    "<think>A or B?</think><answer>D</answer>": "D",
    "The answer is (C).": "C",
    "I think the correct answer is: **D**": "D",
    "The answer is A because B is wrong": "A",
    "The best option is C, since A and B fail.": "C",
    "The answer is A. No: the answer is B": "B",
    "A, C": "AC",
    "C and A": "AC",
    "ABD": "ABD",
    "Answer: (B) Vitamin C.": "B",
    "Answer: B. A. Smith": "B",
}
NO_CHOICE = ["", "A or B", "Answer: B or C", "A dog", "answer is a dog", "A. Paris\nB. London", "A, A", "I am not sure"]
NO_CHOICE += [
    "(A) 5 or (B) 6",
    "The answer is (A) or (B)",
    "The answer is (A)/(B)",
    "Answer: (A) 5, (B) 6",
    "Answer: B. Paris or C. Rome",
]
NO_CHOICE += [
    r"\boxed{(A) 5 \text{ or } (B) 6}",
    "Answer: (A) or B",
    "Answer: A) 5 or B",
    "(A) is wrong",
    "Answer: (B) maybe",
    "A. or B.",
]


@pytest.mark.parametrize("response", CHOSEN)
def test_a_choice_is_right_for_its_letters_only(response: str) -> None:
    right = CHOSEN[response]
    truths = ["A", "B", "C", "D", "E", "AC", "ABD"]
    assert [truth for truth in truths if multiple_choice(response, truth)] == [right]
    spelled = ", ".join(f"({letter})" for letter in right)
    assert multiple_choice(response, spelled) == 1.0


@pytest.mark.parametrize("response", NO_CHOICE)
def test_what_chooses_nothing_is_wrong(response: str) -> None:
    assert [multiple_choice(response, truth) for truth in ("A", "B", "C", "", "Paris", 2, None)] == [0.0] * 7


def test_a_truth_may_have_its_text() -> None:
    assert multiple_choice("Answer: B", "(B) Paris") == multiple_choice("Answer: B", "B. Paris") == 1.0


def test_an_expression_is_found_anywhere_and_sees_newlines() -> None:
    think = build_grader(RuleConfig(name="regex", pattern=r"^<think>.*</think>\s*<answer>.*</answer>$"))
    assert think("<think>a\nb</think>\n<answer>1</answer>", None) == 1.0
    assert think("so <think>a</think><answer>1</answer>", None) == 0.0
    assert think("", None) == 0.0
    assert GRADERS["regex"]("it is 42 m", r"\b42\b") == 1.0  # without a pattern, the ground truth is one
    assert [GRADERS["regex"]("it is (", truth) for truth in ("(", "", None, 3)] == [0.0] * 4


@pytest.mark.parametrize("pattern", [r"^(a+)+$", r"^(a|aa)+$", r"(.*a){20}$", r"(x+x+)+y"])
@pytest.mark.timeout(10)  # a backtracking engine needs more than the age of the universe
def test_an_expression_takes_linear_time(pattern: str) -> None:
    grade = build_grader(RuleConfig(name="regex", pattern=pattern))
    assert [grade(letter * (MAX_RESPONSE_CHARS - 1) + "!", None) for letter in "ax"] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [("(a", "missing"), ("(?=a)b", "no look-around"), (r"(a)\1", "no look-around or back-references")],
)
def test_what_is_no_expression_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"RE2.*{reason}"):
        build_grader(RuleConfig(name="regex", pattern=pattern))


def test_length_falls_outside_of_its_bounds() -> None:
    grade = build_grader(RuleConfig(name="length", min_chars=10, max_chars=20, margin_chars=5))
    assert [grade("x" * n, None) for n in (4, 5, 8, 10, 20, 21, 25, 26)] == [0.0, 0.0, 0.6, 1.0, 1.0, 0.8, 0.0, 0.0]
    hard = build_grader(RuleConfig(name="length", max_chars=3))
    assert [hard("x" * n, None) for n in (0, 3, 4)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("scripts", "text", "share"),
    [
        (["Latin"], "The sum is 4.", 1.0),
        (["Latin"], "été", 1.0),
        (["Latin"], "ab 汉字", 0.5),
        (["Han"], "答案是", 1.0),
        (["Han"], r"答案是 \frac{x}{y}, x = 2", 1.0),  # commands and variables are of no language
        (["Han"], "答案\n```python\nprint(answer)\n```\n是", 1.0),
        (["Han"], "答案 is", 0.5),
        (["Han", "Hiragana", "Katakana"], "答えはテスト", 1.0),
        (["Cyrillic"], "ответ ab", 5 / 7),
        (["Latin"], "42", 1.0),
        (["Latin"], "ab\ud800", 1.0),
    ],
)
def test_language_is_a_share_of_letters(scripts: list[str], text: str, share: float) -> None:
    assert build_grader(RuleConfig(name="language", scripts=scripts))(text, None) == pytest.approx(share)


@pytest.mark.parametrize("name", ["Klingon", "]", "Latin}"])
def test_an_unknown_script_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"script|RE2"):
        build_grader(RuleConfig(name="language", scripts=[name]))
