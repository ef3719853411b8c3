"""Convert rows in the format of the data sets. Tests of code tasks accept only the solution of the data set."""

from __future__ import annotations

import re
from typing import Any

import pytest

from rlhf_mcore.commands.prepare_data.recipes import RECIPES, PreparedExample, RowError, recognise
from rlhf_mcore.config.questions import rules_of
from rlhf_mcore.rewards.code import CodeGrader, CodeTest, read_tests
from tests.unit.data.test_recipes import one, problem

TREE = {
    "message_tree_id": "t",
    "prompt": {
        "message_id": "1",
        "text": "Hi?",
        "role": "prompter",
        "lang": "en",
        "replies": [
            {"text": "worst", "role": "assistant", "rank": 2, "replies": []},
            {
                "text": "best",
                "role": "assistant",
                "rank": 0,
                "replies": [{"text": "And?", "role": "prompter", "lang": "en", "replies": []}],
            },
            {"text": "gone", "role": "assistant", "rank": 1, "deleted": True, "replies": []},
        ],
    },
}


FLAT = [
    {"message_id": "2", "parent_id": "1", "text": "worst", "role": "assistant", "rank": 2},
    {"message_id": "1", "parent_id": None, "text": "Hi?", "role": "prompter", "lang": "en"},
    {"message_id": "3", "parent_id": "1", "text": "best", "role": "assistant", "rank": 0.0},
    {"message_id": "4", "parent_id": "3", "text": "And?", "role": "prompter", "lang": "en"},
    {"message_id": "5", "parent_id": "1", "text": "gone", "role": "assistant", "rank": 1, "deleted": True},
]


@pytest.mark.parametrize("rows", [[TREE], FLAT], ids=["trees", "messages"])
def test_open_assistant(rows: list[dict[str, Any]]) -> None:
    first, second = RECIPES["open_assistant"]([("here", row) for row in rows])
    assert isinstance(first, PreparedExample) and isinstance(second, PreparedExample)
    assert first.prompt == [{"role": "user", "content": "Hi?"}]
    assert (first.response, first.chosen, first.rejected) == ("best", "best", "worst")
    assert [message["content"] for message in second.prompt] == ["Hi?", "best", "And?"]
    assert (second.response, second.chosen) == (None, None)


def test_rows_of_open_assistant_are_recognised() -> None:
    assert recognise(TREE) == recognise(FLAT[0]) == "open_assistant"
    assert "neither a message tree nor a message" in problem("open_assistant", {"text": "x"})


HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def add(a, b):\n    """The sum."""\n',
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
    "entry_point": "add",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function add.",
    "code": "def add(a, b):\r\n    return a + b",
    "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    "test_setup_code": "",
    "challenge_test_list": [],
}
APPS = {
    "question": "Add two numbers.",
    "solutions": '["a, b = map(int, input().split())\\nprint(a + b)"]',
    "input_output": '{"inputs": ["1 2\\n"], "outputs": ["3\\n"]}',
    "difficulty": "interview",
    "starter_code": "",
}
TACO = {
    "question": "Add two numbers.",
    "solutions": '["class Solution:\\n    def add(self, a, b):\\n        return a + b"]',
    "input_output": '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3]]}',
    "starter_code": "class Solution:\n    def add(self, a, b):\n",
    "skill_types": "[]",
}
CODE_CONTESTS = {
    "description": "Add two numbers.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["2 2\n"], "output": ["4\n"]},
    "generated_tests": {"input": [], "output": []},
    "solutions": {"language": [2, 3], "solution": ["int main", "print(sum(map(int, input().split())))"]},
}
LIVE_CODE_BENCH = {
    "question_content": "Add two numbers.",
    "public_test_cases": '[{"input": "1\\n2", "output": "3", "testtype": "functional"}]',
    "private_test_cases": "eJxr",  # pickled
    "metadata": '{"func_name": "add"}',
    "starter_code": "class Solution:\n    def add(self, a: int, b: int) -> int:\n        ",
    "question_id": "1",
}


@pytest.mark.parametrize(
    ("row", "source", "tests", "in_prompt"),
    [
        (HUMANEVAL, "openai_humaneval", [CodeTest("asserts", HUMANEVAL["test"] + "\ncheck(add)\n")], "Complete this function."),
        (MBPP, "mbpp", [CodeTest("asserts", f"\n{text}") for text in MBPP["test_list"]], "assert add(1, 2) == 3"),
        (APPS, "apps", [CodeTest("program", "1 2\n", "3\n")], "standard input"),
        (TACO, "taco", [CodeTest("function", [1, 2], [3], "add")], "Begin with\n```python\nclass Solution:"),
        (CODE_CONTESTS, "codecontests", [CodeTest("program", "1 2\n", "3\n"), CodeTest("program", "2 2\n", "4\n")], "standard input"),
        (LIVE_CODE_BENCH, "livecodebench", [CodeTest("function", [1, 2], 3, "add")], "Begin with"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_code(row: dict[str, Any], source: str, tests: list[CodeTest], in_prompt: str) -> None:
    assert recognise(row) == "code"
    made = one("code", row)
    assert (made.data_source, made.ability) == (source, "code")
    assert in_prompt in made.prompt[0]["content"]
    assert read_tests(made.ground_truth) == tests
    rules = rules_of(source, {})
    assert rules is not None
    if made.response is not None:  # the solution of the data set passes its tests
        grader = CodeGrader(rules[0])
        assert grader(made.extra["solution"], made.ground_truth) == 1.0
        assert grader("```python\ndef add(a, b): return 7\nprint(7)\n```", made.ground_truth) == 0.0
        grader.close()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({**APPS, "input_output": "{"}, "the tests cannot be read: Expecting property name"),
        ({**APPS, "input_output": '{"inputs": [], "outputs": []}'}, "the tests cannot be read: there are no tests"),
        ({**MBPP, "test_list": ["print(1)"]}, r"the tests cannot be read: '\\nprint\(1\)' asserts nothing"),
        ({**HUMANEVAL, "test": ""}, "'test' must be a text that is not empty"),
    ],
)
def test_code_whose_tests_cannot_be_read(row: dict[str, Any], problem: str) -> None:
    (found,) = RECIPES["code"]([("here", row)])
    assert isinstance(found, RowError)
    assert re.search(problem, str(found)), found
