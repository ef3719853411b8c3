"""The ``prepare-data`` recipe ``code``: tasks whose answer is code that passes tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from rlhf_mcore.commands.prepare_data.recipes import PreparedExample, RowError, per_row, text_of, user_turn
from rlhf_mcore.rewards.code import UNREADABLE, read_tests

PROGRAM_INSTRUCTION = (
    "Write a Python program that reads standard input and writes standard output. Put it in one ```python code block."
)
FUNCTION_INSTRUCTION = "Write it in Python, and put all of the code in one ```python code block."


def code_task(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a row of a published set of code tasks. Its tests become the ground truth.

    Data sets: HumanEval (arXiv 2107.03374), MBPP (2108.07732), APPS (2105.09938), TACO (2312.14852), CodeContests (2203.07814) and
    LiveCodeBench (2403.07974). Some private tests of LiveCodeBench are pickles; only its JSON tests are read.
    """
    make = next((make for key, make in _CODE_SHAPES.items() if row.get(key) is not None), None)
    if make is None:
        raise RowError(f"none of {', '.join(_CODE_SHAPES)} holds tests")
    try:
        source, question, tests, solution = make(row)
        is_program = read_tests(tests)[0].kind == "program"
    except UNREADABLE as error:
        raise error if isinstance(error, RowError) else RowError(f"the tests cannot be read: {error}") from error
    starter = row.get("starter_code")
    start = (
        f"\n\nBegin with\n```python\n{starter.rstrip()}\n```" if isinstance(starter, str) and starter.strip() else ""
    )
    response = f"```python\n{solution.strip()}\n```" if solution else None
    extra = {key: str(row[key]) for key in ("task_id", "difficulty", "question_id") if row.get(key) is not None}
    return PreparedExample(
        place,
        source,
        user_turn(question + start, PROGRAM_INSTRUCTION if is_program else FUNCTION_INSTRUCTION),
        ground_truth=json.dumps(tests),
        response=response,
        ability="code",
        extra={**extra, "solution": response} if response else extra,
    )


_CodeTask = tuple[str, str, Any, "str | None"]  # data source, question, tests, a solution


def _humaneval(row: Mapping[str, Any]) -> _CodeTask:
    prompt, tests = text_of(row, "prompt"), {key: text_of(row, key) for key in ("test", "entry_point")}
    solution = row.get("canonical_solution")
    question = f"Complete this function.\n\n```python\n{prompt.strip()}\n```"
    return "openai_humaneval", question, tests, f"{prompt}{solution}" if solution else None


def _mbpp(row: Mapping[str, Any]) -> _CodeTask:
    tests = {key: row[key] for key in ("test_list", "test_setup_code", "test_imports") if row.get(key)}
    shown = "\n".join(tests["test_list"])  # only the tests contain the name of the function
    question = (
        f"{text_of(row, 'text' if row.get('text') else 'prompt')}\n\nThese tests have to pass:\n```python\n{shown}\n```"
    )
    return "mbpp", question, tests, row.get("code")


def _apps(row: Mapping[str, Any]) -> _CodeTask:
    tests, solutions = (json.loads(row[key]) if row.get(key) else [] for key in ("input_output", "solutions"))
    return "taco" if "skill_types" in row else "apps", text_of(row, "question"), tests, next(iter(solutions), None)


def _code_contests(row: Mapping[str, Any]) -> _CodeTask:
    groups = [row.get(key) or {} for key in ("public_tests", "private_tests", "generated_tests")]
    tests = {f"{key}s": [text for group in groups for text in group.get(key) or ()] for key in ("input", "output")}
    written = row.get("solutions") or {"language": [], "solution": []}
    python = (text for language, text in zip(written["language"], written["solution"], strict=True) if language == 3)
    return "codecontests", text_of(row, "description"), tests, next(python, None)


def _live_code_bench(row: Mapping[str, Any]) -> _CodeTask:
    tests = json.loads(row["public_test_cases"])
    with suppress(ValueError):
        tests += json.loads(row.get("private_test_cases") or "[]")
    metadata = json.loads(row.get("metadata") or "{}")
    return "livecodebench", text_of(row, "question_content"), [{**test, "metadata": metadata} for test in tests], None


_CODE_SHAPES: dict[str, Callable[[Mapping[str, Any]], _CodeTask]] = {
    "entry_point": _humaneval,
    "test_list": _mbpp,
    "input_output": _apps,
    "public_tests": _code_contests,
    "public_test_cases": _live_code_bench,
}


code = per_row(code_task)
