"""Compare the rule ``code`` with verl's score of programs (``prime_code``), which verl uses for apps, taco,
codecontests and codeforces.

They differ on purpose in two cases. verl accepts the first element of a list in place of the list, and blanks at the
ends of some lines matter to it. Ours rejects such an element and ignores such blanks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.config.questions import SOURCES
from rlhf_mcore.config.schema import SandboxConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.rewards.code import CodeGrader

THEIRS = """
import contextlib, json, os, sys
sys.path.insert(0, sys.argv[1])
import prime_code
with contextlib.redirect_stdout(sys.stderr):
    scores = [float(prime_code.compute_score(code, json.dumps(truth), continuous=True)[0]) for code, truth in json.load(sys.stdin)]
print(json.dumps(scores))
os._exit(0)
"""
SUMS = {"inputs": [f"{i} {i + 1}\n" for i in range(12)], "outputs": [f"{2 * i + 1}\n" for i in range(12)]}
ROOTS = {"inputs": ["2\n", "9\n"], "outputs": ["1.41421356\n", "3.0\n"]}
GRID = {"inputs": ["2\n", "3\n"], "outputs": ["1 2\n3 4\n", "1 2 3\n4 5 6\n7 8 9\n"]}
CALLS = {"inputs": ["[1, 2]\n3", "[]\n5"], "outputs": ["6", "5"], "fn_name": "total"}
GRID_CODE = (
    "n = int(input())\nfor i in range(n):\n    print(*range(i * n + 1, i * n + n + 1), sep={sep!r}, end={end!r})"
)
CASES: list[tuple[str, dict[str, Any], float]] = [
    ("a, b = map(int, input().split())\nprint(a + b)", SUMS, 1.0),
    ("import sys\ndef main():\n    print(sum(map(int, sys.stdin.read().split())))\nif __name__ == '__main__':\n    main()", SUMS, 1.0),
    ("a, b = map(int, input().split())\nprint(a + b if a < 3 else 0)", SUMS, 0.3),
    ("a, b = map(int, input().split())\nprint(a + b if a < 10 else 0)", SUMS, 1.0),
    ("print('x')", SUMS, 0.0),
    ("print(1 /", SUMS, 0.0),
    ("raise ValueError", SUMS, 0.0),
    ("print(float(input()) ** 0.5)", ROOTS, 1.0),
    ("print(round(float(input()) ** 0.5, 2))", ROOTS, 0.5),
    (GRID_CODE.format(sep=" ", end="\n"), GRID, 1.0),
    (GRID_CODE.format(sep=" ", end=" "), GRID, 0.0),
    ("def total(items, start):\n    return sum(items) + start", CALLS, 1.0),
    ("class Solution:\n    def total(self, items: List[int], x):\n        return reduce(lambda a, b: a + b, items, x)", CALLS, 1.0),
]  # fmt: skip


def test_scores_are_verls() -> None:
    folder = Path(sys.prefix, "oracles", "verl", "utils", "reward_score")
    if not folder.is_dir():
        pytest.skip("verl is not installed (./launch/setup.sh installs it)")
    asked = json.dumps([(f"```python\n{code}\n```", truth) for code, truth, _ in CASES])
    done = subprocess.run(
        [sys.executable, "-c", THEIRS, str(folder)], input=asked, capture_output=True, text=True, timeout=500
    )
    theirs = json.loads(done.stdout.strip().splitlines()[-1])
    (rule,) = SOURCES["apps"]
    grader = CodeGrader(rule, SandboxConfig())
    ours = run(grader.grade([(f"```python\n{code}\n```", truth) for code, truth, _ in CASES]))
    grader.close()
    expected = [score for *_, score in CASES]
    assert [score for score, _ in ours] == pytest.approx(expected)
    assert theirs == pytest.approx(expected)
