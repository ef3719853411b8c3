"""The rule ``math``, whose formulas are compared in a worker process, judges every pair of tests/answers.py."""

from __future__ import annotations

from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.mathematics import MathGrader
from tests.answers import PAIRS


def test_math_accepts_what_is_the_same_and_nothing_else() -> None:
    grader = MathGrader()
    grades = run(grader.grade([(f"So \\[\\boxed{{{answer}}}\\]", truth) for truth, answer, _ in PAIRS]))
    wrong = [(pair, verdict) for pair, verdict in zip(PAIRS, grades, strict=True) if verdict != (float(pair[2]), None)]
    assert wrong == []
