"""The digest of a function of a notebook changes with whatever of the user's own decides about its result, and with nothing else."""

from __future__ import annotations

import linecache
import warnings
from typing import Any

import pytest

from rlhf_mcore.readers.function_digest import function_digest

CELLS = """
import functools, json, re
BONUS = 0.5
WORDS = ["a", "b"]
BY_NAME = {"a": 1}
PATTERN = re.compile("x")
log, count, table = [], 0, {}

def helper(x):
    return x + BONUS

class Tool:
    factor = 1
    def go(self):
        return self.factor

class Stateful:
    def __init__(self, scale):
        self.scale, self.calls, self.seen = scale, 0, []
    def __call__(self, text):
        self.calls += 1
        self.seen.append(text)
        return self.scale

def make(weight):
    def inner(text):
        return weight
    return inner

closure, scaled = make(1), Stateful(2)
limited = functools.partial(lambda text, limit: limit, limit=3)

def score(text, *, most=4):
    global count
    count += 1
    log.append(text)
    table[text] = 1
    return helper(len(WORDS)) + BY_NAME["a"] + Tool().go() + closure(text) + scaled(text) + limited(text) + bool(PATTERN.search(text))
"""


def digest(cells: str, calls: int = 0) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    file = f"<cell {len(linecache.cache)}>"  # as a notebook remembers it
    linecache.cache[file] = len(cells), None, cells.splitlines(keepends=True), file
    exec(compile(cells, file, "exec"), names)
    for _ in range(calls):
        names["score"]("x")
    return function_digest(names["score"])


def test_another_reward_has_another_digest() -> None:
    for old, new in [
        ("BONUS = 0.5", "BONUS = 0.6"),
        ('["a", "b"]', '["a", "c"]'),
        ('{"a": 1}', '{"a": 2}'),
        ('compile("x")', 'compile("y")'),
        ("x + BONUS", "x - BONUS"),
        ("factor = 1", "factor = 2"),
        ("return self.factor", "return -self.factor"),
        ("make(1)", "make(2)"),
        ("Stateful(2)", "Stateful(3)"),
        ("limit=3)", "limit=4)"),
        ("most=4", "most=5"),
        ("return weight", "return -weight"),
        ("self.seen.append(text)", "self.seen.append(text + text)"),
    ]:
        assert CELLS.count(old) == 1
        assert digest(CELLS.replace(old, new)) != digest(CELLS)


def test_the_same_cells_have_the_same_digest_whatever_was_called() -> None:
    assert digest(CELLS) == digest(CELLS, calls=3)
    assert digest(CELLS.replace("log, count, table = [], 0, {}", "log, count, table = [1], 7, {2: 3}")) == digest(CELLS)
    assert digest("\n\n" + CELLS + "\nunrelated = 1\n") == digest(CELLS)


def test_code_without_source_is_warned_of() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def score(text):\n    return 1.0", names)
    with pytest.warns(UserWarning, match="score: no source is available"):
        function_digest(names["score"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        digest(CELLS)


def test_functions_of_libraries_count_by_their_name() -> None:
    for function in [len, str.strip, print, dict]:
        assert function_digest(function) == function_digest(function) != function_digest(max)


def test_a_function_that_calls_itself_has_an_end() -> None:
    cells = "def score(text):\n    return score(text[1:]) if text else 0.0\n"
    assert digest(cells) == digest(cells)
