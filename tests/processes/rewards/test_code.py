"""Test the rule ``code``: the forms of tests, equal outputs, and grades from real workers and a real sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig, RuleConfig, SandboxConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.own_processes import has_ended
from rlhf_mcore.rewards import code
from rlhf_mcore.rewards.code import CodeGrader, CodeTest, find_code, read_tests, same_output, same_value
from rlhf_mcore.rewards.reward import build_reward
from rlhf_mcore.rewards.trial import TrialRow, try_reward
from rlhf_mcore.sandbox.run import Level
from rlhf_mcore.sandbox.usage import descendants
from rlhf_mcore.types import Prompt
from tests.commands import wait_for
from tests.messages import expect_error

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ("```python\na\n```", "a\n"),
        ("first\n```py\na\n```\nthen\n```python\nb\n```\nIt prints\n```\n3\n```\nDone.", "b\n"),
        ("```\na\n```\n```text\nb\n```", "b\n"),
        ("print(1)", "print(1)"),
        ("```python\na\nb", "a\nb"),
        ("  ```Python3\n  a\n  ```", "  a\n"),
        ("~~~python\ns = '''```'''\n~~~", "s = '''```'''\n"),
        ("````python\n```\nx\n```\n````", "```\nx\n```\n"),
        ("", ""),
        ("```python", ""),
    ],
)
def test_which_code_is_taken(response: str, text: str) -> None:
    assert find_code(response) == text


@pytest.mark.parametrize(
    ("truth", "tests"),
    [
        ({"inputs": ["1\n", ["2", "3"]], "outputs": ["2\n", ["4"]]},
         [CodeTest("program", "1\n", "2\n"), CodeTest("program", "2\n3", "4")]),
        ('{"inputs": [[1, [2]]], "outputs": [[3]], "fn_name": "f"}', [CodeTest("function", [1, [2]], [3], "f")]),
        ({"inputs": ['"a"\n[1]'], "outputs": ["true"], "fn_name": "f"}, [CodeTest("function", ["a", [1]], True, "f")]),
        ({"inputs": [[{"1": 2}]], "outputs": [{"3": 4}], "fn_name": "f"}, [CodeTest("function", [{1: 2}], {3: 4}, "f")]),
        ({"inputs": [""], "outputs": [""], "assert_case": ["assert f()"]}, [CodeTest("asserts", "assert f()")]),
        ([{"input": "1", "output": "2", "testtype": "stdin"}], [CodeTest("program", "1", "2")]),
        ([{"input": "1", "output": "2", "testtype": "functional", "metadata": {"func_name": "g"}}],
         [CodeTest("function", [1], 2, "g")]),
        ({"test": "def check(candidate):\n    assert candidate()", "entry_point": "f"},
         [CodeTest("asserts", "def check(candidate):\n    assert candidate()\ncheck(f)\n")]),
        ({"test_list": ["assert f(1)", "assert f(2)"], "test_setup_code": "x = 1"},
         [CodeTest("asserts", "x = 1\nassert f(1)"), CodeTest("asserts", "x = 1\nassert f(2)")]),
        (["assert f(1)"], [CodeTest("asserts", "assert f(1)")]),
        ("assert f(1)\nassert f(2)", [CodeTest("asserts", "assert f(1)\nassert f(2)")]),
    ],
    ids=range(11),
)  # fmt: skip
def test_forms_of_tests(truth: Any, tests: list[CodeTest]) -> None:
    assert read_tests(truth) == tests


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        ("42", "it is int, which cannot contain tests"),
        ("forty-two", "'forty-two' asserts nothing"),
        ([], "there are no tests"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "Expecting value"),
        ([{"input": "1", "output": "2", "testtype": "functional"}], "does not name its function"),
        (None, "it is NoneType, which cannot contain tests"),
    ],
)
def test_what_is_no_tests(truth: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_tests(truth)


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2  \r\n\n 3", "1 2\n3\n", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("0.3333333", "0.333333", True),
        ("0.33", "0.333333", False),
        ("1.0", "1", True),
        ("1e0", "1.0", True),
        ("10000001", "10000000", False),
        ("1000000000000000000001", "1000000000000000000000", False),
        ("3.0 x", "3 x", True),
        ("Yes", "YES", False),
        ("2 1", "1 2", False),
        ("nan", "nan", True),
        ("5.0", "1e400", False),
        ("1e401", "1e400", False),
        ("inf", "Infinity", False),
        ("1_000", "1000", False),
        ("9" * 100000 + ".5", "1.5", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_same_output(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) is same


INF = float("inf")


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (3, 3, True), (3, [3], True), ((1, (2,)), [1, [2]], True), ([1, 2], [[1, 2]], True), (1, [1, 2], False),
        (0.1 + 0.2, 0.3, True),
        (3, 3.0, True), ("3", 3, False), (10**400, 1.5, False), ({1: (2,)}, {1: [2]}, True), (None, [], False), ([], [], True),
        (True, 1, True), ([1.0, "a"], [1, "a"], True),
        (5.0, INF, False), (INF, 5.0, False), (-INF, INF, False), (10**400, INF, False), (INF, INF, True),
        ([1.0, 2.0], [INF, INF], False),
    ],
    ids=range(20),
)  # fmt: skip
def test_same_value(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


# --------------------------------------------------------------------------------------------------------------- grades
SQUARES = {"inputs": ["2\n", "3\n", "-4\n", "0\n"], "outputs": ["4\n", "9\n", "16\n", "0\n"]}
RIGHT = "Squares.\n```python\nprint(int(input()) ** 2)\n```"
HALF = "```python\nn = int(input())\nprint(n * n if n in (2, 0) else 'no')\n```"


@pytest.fixture(scope="module")
def graders() -> Iterator[dict[str, CodeGrader]]:
    quick = {"test_s": 0.3, "total_s": 2.0}
    sandbox = SandboxConfig(memory_gib=0.5)
    made = {
        "all": CodeGrader(RuleConfig(name="code", **quick), sandbox, workers=2).check(),
        "share": CodeGrader(RuleConfig(name="code", partial=True, max_tests=3, **quick), sandbox, workers=1).check(),
    }
    yield made
    for grader in made.values():
        grader.close()


def test_all_or_nothing_and_the_share(graders: dict[str, CodeGrader]) -> None:
    pairs = [(RIGHT, SQUARES), (HALF, SQUARES), ("no code", SQUARES), ("", SQUARES)]
    assert run(graders["all"].grade(pairs)) == [(1.0, None), (0.0, None), (0.0, None), (0.0, None)]
    assert run(graders["share"].grade(pairs)) == [(1.0, None), (1 / 3, None), (0.0, None), (0.0, None)]


def test_functions_asserts_and_arrays(graders: dict[str, CodeGrader]) -> None:
    square = "```python\ndef f(n: int) -> List[int]:\n    return n * n\n```"
    truths = [
        {"inputs": [[3], [4]], "outputs": [[9], [16]], "fn_name": "f"},
        {"inputs": np.array(["3"], dtype=object), "outputs": np.array(["9"], dtype=object), "fn_name": "f"},
        ["assert f(3) == 9", "assert f(0) == 0"],
        {
            "test": "def check(candidate):\n    for i in range(9):\n        assert candidate(i) == i ** 2",
            "entry_point": "f",
        },
        ["assert f(3) == 10"],
        {"test": "def check(candidate):\n    assert candidate(3) == 9", "entry_point": "g"},
    ]
    grades = run(graders["all"].grade([(square, truth) for truth in truths]))
    assert grades == [(1.0, None)] * 4 + [(0.0, None)] * 2


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('4')",
        "while True: pass",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(1, 9)",
        "x = bytearray(100 * 10**9)",
        "while True: print('4' * 10**6)",
        "import glob\nfor p in glob.glob('/**/*', recursive=True)[:10**5]:\n    if 'outputs' in p: print(open(p).read())",
    ],
    ids=range(8),
)
def test_fault_24_a_program_that_is_wrong_gets_nothing_and_harms_nothing(
    graders: dict[str, CodeGrader], program: str
) -> None:
    response = f"```python\n{program}\n```"
    assert run(graders["all"].grade([(response, SQUARES), (RIGHT, SQUARES)])) == [(0.0, None), (1.0, None)]


def test_what_a_function_gives_back_is_data_and_nothing_else(graders: dict[str, CodeGrader]) -> None:
    """The returned text would import, build or compute something if it were evaluated outside the sandbox."""
    truth = {"inputs": [[1]], "outputs": [2], "fn_name": "f"}
    written = [
        '{"module": "unittest.__main__"}',
        '{"array": ["S1000000000", ["a", "b"]]}',
        '{"array": ["<i8", 2]}',  # read as 2
        "[" * 10**5,
        '{"set": [' + ",".join(str(i * (2**61 - 1)) for i in range(20000)) + "]}",
        '{"int": "0x2"}',
        '{"lent": 0}',
        "2 2",
    ]
    code = """import os
def f(x):
    for n in {{0, *range(3, 64)}}:
        try: os.write(n, {!r}.encode())
        except OSError: pass
    os._exit(0)"""
    responses = ["```python\n" + code.format(text) + "\n```" for text in written]
    grades = run(graders["all"].grade([(response, truth) for response in responses]))
    assert grades == [
        (0.0, None),
        (0.0, None),
        (1.0, None),
        (0.0, None),
        (0.0, None),
        (1.0, None),
        (0.0, None),
        (0.0, None),
    ]
    packages = "```python\nimport numpy as np\ndef f(x): return np.array([x, 2.5])\n```"
    assert graders["all"](packages, {**truth, "outputs": [[1, 2.5]]}) == 1.0


def test_tests_that_cannot_be_read_are_an_error_and_not_a_wrong_answer(graders: dict[str, CodeGrader]) -> None:
    assert run(graders["all"].grade([(RIGHT, "42"), (RIGHT, object()), (RIGHT, SQUARES)])) == [
        (0.0, "error"),
        (0.0, "error"),
        (1.0, None),
    ]


def test_less_isolation_than_the_minimum_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Level(
        "rlimits", ("rlimits",), ("namespaces: Operation not permitted", "filters: Landlock: not in this kernel")
    )
    monkeypatch.setattr(code, "machine_level", lambda: found)
    cfg = RewardConfig(rules=[RuleConfig(name="code")])
    with pytest.raises(ConfigError) as refused:
        build_reward(cfg)
    assert str(refused.value).startswith(
        "reward.sandbox.minimum=filters: this machine isolates model programs only by rlimits "
        "(namespaces: Operation not permitted; filters: Landlock: not in this kernel): use a kernel with Landlock"
    )
    assert "reward.sandbox.minimum=rlimits; with rlimits alone" in str(refused.value)
    cfg.sandbox.minimum = "rlimits"
    build_reward(cfg).close()
    build_reward(RewardConfig(rules=[RuleConfig(name="math")])).close()  # does not run any code


@pytest.mark.parametrize("level", [pytest.param(None, id="strongest"), "rlimits"])
def test_fault_24_nothing_outlives_a_trainer_that_is_killed(level: str | None, tmp_path: Path) -> None:
    """In the strongest and in the weakest sandbox of this machine, neither processes nor program directories remain."""
    trainer = """
import sys
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.rewards import code
from rlhf_mcore.sandbox.run import Level
if len(sys.argv) > 1:
    code.machine_level = lambda: Level(sys.argv[1], (sys.argv[1],))
sleeper = "```python\\nimport os, time\\nopen('mine', 'w')\\ntry: os.fork()\\nexcept OSError: pass\\ntime.sleep(1000)\\n```"
grader = code.CodeGrader(RuleConfig(name="code", test_s=100, total_s=100), SandboxConfig(minimum="rlimits"), workers=2)
grader(sleeper, {"inputs": ["1"], "outputs": ["1"]})
"""
    command = [sys.executable, "-c", trainer, *([level] if level else [])]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        wait_for(lambda: len(descendants(process.pid)) >= 5, 30)  # a worker, its guard, two sandboxes, a program
        if level:
            wait_for(lambda: any(tmp_path.rglob("mine")), 30)
        time.sleep(0.2)
        below = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
    assert len(below) >= 5
    wait_for(lambda: all(map(has_ended, below)) and not any(tmp_path.iterdir()), 10)


def test_rows_whose_tests_cannot_be_read_are_named_before_a_run() -> None:
    rows = [
        TrialRow(f"rows.jsonl, line {n}", Prompt(str(n), n, [], "", "taco", truth))
        for n, truth in enumerate((SQUARES, "42"))
    ]
    with expect_error(ConfigError, field="data.train", value=("line 1", "'42'", "int")):
        try_reward(RewardConfig(sources={}), rows, "data.train", 2)


def test_a_trial_answers_with_the_solutions_of_rows_and_of_others() -> None:
    solution = {"solution": RIGHT}
    rows = [
        TrialRow("1", Prompt("1", 0, [], "", "taco", SQUARES, extra_info=solution)),
        TrialRow("2", Prompt("2", 1, [], "", "taco", {"inputs": ["2"], "outputs": ["8"]}, extra_info=solution)),
        TrialRow("3", Prompt("3", 2, [], "", "taco", SQUARES)),
    ]
    report = try_reward(RewardConfig(sources={}), rows, "data.train", 3)
    assert [row.place for row in report.tested_rows] == ["1", "2"]
    assert [row.place for row in report.wrong_truths] == ["2"]
    assert (report.paid_empty, [row.place for row in report.paid_others]) == ([], ["1", "3"])
