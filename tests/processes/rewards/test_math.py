"""Test the rule `math`: equality beyond spelling, and answers that try to hang, fill the memory or deceive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from rlhf_mcore.config.schema import RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards import mathematics
from rlhf_mcore.rewards.graders import answer_format, boxed_answer
from rlhf_mcore.rewards.mathematics import MathGrader
from rlhf_mcore.rewards.reward import RuleReward
from rlhf_mcore.types import Prompt, Score, Trajectory
from tests.episodes import single_turn

EQUAL = [
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"(x+1)^2", r"x^2+2x+1"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"0.5", r"50\%"),
    (r"1000000", r"10^6"),
    (r"120", r"5!"),
    (r"1024", r"2^{10}"),
    (r"x=1 \text{ or } x=2", r"1, 2"),
    (r"1<x<2", r"(1,2)"),
    (r"\{1,2\}", r"2, 1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\frac{x}{2}+\frac{1}{2}", r"\frac{x+1}{2}"),
    (r"\sin^2 x + \cos^2 x", r"1"),
    (r"\frac{1}{2x}", r"\frac{0.5}{x}"),
    (r"(\frac{1}{\sqrt2}, -3)", r"(\frac{\sqrt{2}}{2}, -3)"),
]
DIFFERENT = [
    (r"2\pi", r"6.28"),
    (r"\frac{1}{3}", r"0.333"),
    (r"4", r"x+1=4"),
    (r"5", r"1,5"),
    (r"18", r"18 \text{ or } 19"),
    (r"(1,2)", r"(2,1)"),
    (r"[1,2]", r"(1,2)"),
    (r"x+1", r"x+2"),
    (r"x>5", r"x<5"),
    (r"\text{Evelyn}", r"\text{Angela}"),
    (r"2", r""),
    (r"2", r"\text{I do not know}"),
    (r"1", r"0,1"),
    (r"3", r"\frac{3}{"),
]
# Each would take minutes or gigabytes. All but the last two are rejected before parsing.
BOMBS = [
    r"5^{5^{5^{5^5}}}",
    r"9^9^9^9",
    r"9^{9^{9^9}}",
    r"(9^9)^{9999999}",
    r"2^{99999999999}",
    r"10**10**10",
    r"99999999!",
    r"9!!!!!!",
    r"\binom{999999999}{499999999}",
    "(" * 150 + "1" + ")" * 150,
    r"\frac{1}{" * 30 + "1" + "}" * 30,
    "9" * 390,
    r"\sqrt{" * 1000,
    "x+" * 10_000 + "x",
    r"\int_0^{\infty} \frac{x^{13}\sin(x^7)e^{-x^3}}{1+x^{17}+\cos x}dx",
    r"x^{999}y^{999}(x+y+z)^{999}",
]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mathematics, "CPU_S", 0.7)
        made = MathGrader(workers=1)
        yield made
        made.close()


@pytest.mark.parametrize(("truth", "answer"), EQUAL)
def test_what_is_equal_passes_in_all_notations(grader: MathGrader, truth: str, answer: str) -> None:
    assert boxed_answer(f"\\boxed{{{answer}}}", truth) == 0.0  # mathematical equality
    assert grader(f"So \\[\\boxed{{{answer}}}\\]", truth) == 1.0
    assert grader(f"So\nAnswer: ${answer}$", f"Because of this and that, \\boxed{{{truth}}}.") == 1.0
    assert grader(f"So\n#### {answer}", truth) == 1.0


@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_what_is_not_equal_fails(grader: MathGrader, truth: str, answer: str) -> None:
    assert grader(f"\\boxed{{{answer}}}", truth) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"\boxed{3} no, \boxed{x+2}", 1.0),  # the last box counts
        (r"\boxed{x+2} no, \boxed{3}", 0.0),
        ("#### 2. Solve\nAnswer: 2 + x", 1.0),
        ("x + 2", 0.0),  # without a box
        ("", 0.0),
        (r"\boxed{}", 0.0),
    ],
)
def test_the_last_mark_counts(grader: MathGrader, response: str, expected: float) -> None:
    assert grader(response, "x+2") == expected


@pytest.mark.parametrize("bomb", BOMBS, ids=[bomb[:30] for bomb in BOMBS])
def test_a_bomb_is_no_answer(grader: MathGrader, bomb: str) -> None:
    ((grade, failure),) = run(grader.grade([(f"\\boxed{{{bomb}}}", "x+1")]))
    assert grade == 0.0
    assert failure == ("timeout" if bomb in BOMBS[-2:] else None)
    assert run(grader.grade([(r"\boxed{\frac{2x+2}{2}}", "x+1")])) == [(1.0, None)]  # as usual


def test_a_worker_that_is_stuck_is_replaced_and_only_its_answer_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics, "TIMEOUT_S", 2.0)
    monkeypatch.setattr(mathematics, "CPU_S", 1000.0)
    grader = MathGrader(workers=1)
    pairs = [(r"\boxed{\frac{2x+2}{2}}", "x+1"), (f"\\boxed{{{BOMBS[-1]}}}", "x+1"), (r"\boxed{x+x}", "2x")]
    assert run(grader.grade(pairs)) == [(1.0, None), (0.0, "timeout"), (1.0, None)]
    grader.close()


def test_answers_are_judged_once_and_in_order(grader: MathGrader) -> None:
    pairs = [(f"\\boxed{{{i % 5} + x}}", f"x+{i % 3}") for i in range(60)]
    assert [grade for grade, _ in run(grader.grade(pairs))] == [float(i % 5 == i % 3) for i in range(60)]


def test_the_trainer_never_imports_sympy() -> None:
    program = (
        "import sys\nfrom rlhf_mcore.rewards.mathematics import MathGrader\n"
        r"assert MathGrader()(r'\boxed{\sqrt{8}}', r'2\sqrt{2}') == 1.0" + "\n"
        "assert not {'sympy', 'math_verify', 'numpy', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_rule_counts_what_it_is_told_to(grader: MathGrader, monkeypatch: pytest.MonkeyPatch) -> None:
    def trajectory(text: str) -> Trajectory:
        return single_turn(Prompt("p", 0, [1], "Q", ground_truth=r"\sqrt{8}"), 0, [1], [0.0], text, "stop", 0)

    rows = [trajectory(r"\boxed{2\sqrt{2}}"), trajectory(r"\boxed{3}"), trajectory("")]
    rows.append(trajectory(f"\\boxed{{{BOMBS[-1]}}}"))
    reward = RuleReward(
        [RuleConfig(name="math", correct=1.0, incorrect=-1.0), RuleConfig(name="format", weight=0.5)], workers=1
    )
    monkeypatch.setattr(
        reward, "_grader", lambda rule: grader if rule.name == "math" else answer_format
    )  # sympy is already imported
    assert run(reward.score(rows)) == [
        Score(1.5, {"math": 1.0, "format": 1.0}),
        Score(-0.5, {"math": 0.0, "format": 1.0}),
        Score(-1.0, {"math": 0.0, "format": 0.0}),
        Score(-0.5, {"math": 0.0, "format": 1.0}, "timeout"),
    ]
