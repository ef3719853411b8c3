"""Read code tests in the forms that data sets use, and compare outputs with the expected outputs. No code runs here."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_TRUTH_CHARS = 2**26
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_TOLERANCE, _SMALLEST = 1e-5, 1e-8  # relative and absolute tolerance of numpy.allclose, which the APPS judges use
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


@dataclass(frozen=True, slots=True)
class CodeTest:
    """A test of a program (``expected`` output for an ``input``), of a function (``name``), or a text with asserts."""

    kind: str  # program | function | asserts
    input: Any  # standard input; arguments; text with asserts
    expected: Any = None
    name: str = ""


def find_code(response: str) -> str:
    """Return the last fenced Python block, else the last fenced block, else the whole response. The last fence may be unclosed."""
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(response):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), response[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2].lower(), response[opened.end() + 1 :]))
    if not blocks:
        return response
    return next((text for language, text in reversed(blocks) if language in _PYTHON), blocks[-1][1])


def read_tests(truth: Any) -> list[CodeTest]:
    """Read the tests of a ground truth, or of its JSON text, in any of these forms::

        {"inputs": [...], "outputs": [...]}, with "fn_name" for a function         APPS, TACO, verl
        [{"input", "output", "testtype", "metadata": {"func_name"}}, ...]          LiveCodeBench
        {"test": "def check(candidate): ...", "entry_point": "f"}                  HumanEval
        {"test_list": ["assert ...", ...], "test_setup_code": "..."}               MBPP
        ["assert ...", ...], or "assert ..."

    Raises:
        one of ``UNREADABLE``: the form is unknown, or there are no tests.
    """
    if isinstance(truth, str):
        if len(truth) > MAX_TRUTH_CHARS:
            raise ValueError(f"{len(truth)} characters of tests exceed the limit of {MAX_TRUTH_CHARS}")
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            truth = [truth]
    tests = list(_read(truth))
    if not tests:
        raise ValueError("there are no tests")
    return tests


def _read(truth: Any) -> Iterator[CodeTest]:
    if isinstance(truth, Mapping) and ("inputs" in truth or "assert_case" in truth):
        yield from _pairs(truth)
    elif isinstance(truth, Mapping) and "test_list" in truth:
        setup = [*(truth.get("test_imports") or ()), truth.get("test_setup_code") or ""]
        for text in truth["test_list"]:
            yield _asserts("\n".join([*setup, text]))
    elif isinstance(truth, Mapping) and "test" in truth:
        ending = f"\ncheck({truth['entry_point']})\n" if "def check(" in truth["test"] else ""
        yield _asserts(truth["test"] + ending)
    elif isinstance(truth, Sequence) and not isinstance(truth, str):
        for item in truth:
            yield _case(item) if isinstance(item, Mapping) else _asserts(item)
    else:
        raise ValueError(f"it is {type(truth).__name__}, which cannot contain tests")


def _pairs(truth: Mapping[str, Any]) -> Iterator[CodeTest]:
    if asserts := [text for text in truth.get("assert_case") or () if text]:
        yield from map(_asserts, asserts)
        return
    inputs, outputs, name = truth["inputs"], truth.get("outputs") or (), truth.get("fn_name") or ""
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs")
    for given, expected in zip(inputs, outputs, strict=True):
        yield _of_function(name, given, expected) if name else _of_program(given, expected)


def _case(item: Mapping[str, Any]) -> CodeTest:
    metadata = item.get("metadata") or {}
    name = item.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    if item.get("testtype") == "functional":
        if not name:
            raise ValueError("a functional test does not name its function (metadata.func_name)")
        return _of_function(name, item["input"], item["output"])
    return _of_program(item["input"], item["output"])


def _asserts(text: Any) -> CodeTest:
    if not isinstance(text, str) or not re.search(r"\bassert", text):
        raise ValueError(f"{text!r:.60} asserts nothing")
    return CodeTest("asserts", text)


def _of_program(given: Any, expected: Any) -> CodeTest:
    given, expected = ("\n".join(map(str, each)) if isinstance(each, list) else str(each) for each in (given, expected))
    return CodeTest("program", given, expected)


def _of_function(name: str, given: Any, expected: Any) -> CodeTest:
    """Build a function test.

    Arguments are a list, or one JSON text per line. The expected value is a value or its JSON text.
    """
    arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
    if isinstance(given, str) and isinstance(expected, str):
        expected = json.loads(expected)
    return CodeTest("function", [_with_int_keys(each) for each in arguments], _with_int_keys(expected), name)


def _with_int_keys(value: Any) -> Any:
    """Convert the keys of a dict back to integers if all are integers in decimal. JSON converts integer keys to strings."""
    if isinstance(value, dict) and value and all(_INTEGER.fullmatch(key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


# ----------------------------------------------------------------------------------------------------------- comparison
def same_output(printed: str, expected: str) -> bool:
    """Compare line by line, ignoring blank lines and outer whitespace. Decimals are equal within a tolerance, integers exactly."""
    ours, theirs = ([line for raw in text.split("\n") if (line := raw.strip())] for text in (printed, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    if ours == theirs:
        return True
    left, right = ours.split(), theirs.split()
    return len(left) == len(right) and all(a == b or _same_number(a, b) for a, b in zip(left, right, strict=True))


def _same_number(ours: str, theirs: str) -> bool:
    if not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs)):
        return False
    if _INTEGER.fullmatch(ours) and _INTEGER.fullmatch(theirs):
        return False  # equal integers in the same spelling are equal texts
    return _is_close(float(ours), float(theirs))


def same_value(value: Any, expected: Any) -> bool:
    """Return whether a function's value equals the expected value. Tuples equal lists.

    APPS writes the expected value alone in a list. This form also counts.
    """
    value, expected = _plain(value), _plain(expected)
    return _equal(value, expected) or (isinstance(expected, list) and len(expected) == 1 and _equal(value, expected[0]))


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _equal(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_equal, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_equal(item, expected[key]) for key, item in value.items())
    if isinstance(value, float) != isinstance(expected, float) or isinstance(value, float):
        numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return numbers and (value == expected or _is_close(value, expected))
    return bool(value == expected)


def _is_close(value: float, expected: float) -> bool:
    try:
        return math.isfinite(expected) and abs(value - expected) <= _SMALLEST + _TOLERANCE * abs(expected)
    except OverflowError:  # the integer exceeds the range of a float
        return False
