"""The rule ``code``: run model programs against tests in sandboxes of worker processes, and compare the results outside.

The tests of a ground truth have the forms that data sets use.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.rewards.answers import fits
from rlhf_mcore.rewards.pool import Pools, WorkerLimits, WorkerPool, encode_item, local_pool
from rlhf_mcore.rewards.pooled_grader import PooledGrader, Verdict
from rlhf_mcore.sandbox.run import (
    REMEDIES,
    Level,
    Limits,
    Program,
    Reason,
    Result,
    Sandbox,
    machine_level,
    site_packages,
)
from rlhf_mcore.sandbox.values import from_json, to_json

_SPARE_S = 120.0  # per item, to start sandboxes and to kill their processes
_SPARE_GIB = 2.0  # per worker, for tests and outputs, in addition to the memory of a program
_LEAST_VALUE = 2**16  # characters; lower limit for the size cap of a function's value
_LEAST_OUTPUT, _MOST_OUTPUT = 2**20, 2**26  # bytes; range of the size cap for program output
MAX_TRUTH_CHARS = 2**26
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_TOLERANCE, _SMALLEST = 1e-5, 1e-8  # relative and absolute tolerance of numpy.allclose, which the APPS judges use
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def require_isolation(minimum: str) -> Level:
    """Return the isolation level of this machine.

    Raises:
        ConfigError: the level is below ``minimum``. The message names ``reward.sandbox.minimum``.
    """
    level = machine_level()
    if level.reaches(minimum):
        return level
    less = "" if level.name == "filters" else "; with rlimits alone, model code can read your files and use the network"
    raise ConfigError(
        f"reward.sandbox.minimum={minimum}: this machine isolates model programs only by {level.name} ({'; '.join(level.missing)}): "
        f"{REMEDIES[minimum]}, or accept less with reward.sandbox.minimum={level.name}{less}"
    )


class CodeGrader(PooledGrader):
    """Grades 1 if the program in a response passes all tests of the ground truth (``read_tests``).

    With ``partial``, the grade is the share of passed tests. If tests cannot be read or run, the verdict is 0 with "error".

    Args:
        rule: a rule with the options of ``code``.
        sandbox: the required isolation of the machine, and the limits of a program.
        workers, pools: see ``PooledGrader``.
    """

    def __init__(
        self,
        rule: RuleConfig | None = None,
        sandbox: SandboxConfig | None = None,
        workers: int | None = None,
        pools: Pools = local_pool,
    ) -> None:
        super().__init__(workers, pools)
        self._rule, self._cfg = rule or RuleConfig(name="code"), sandbox or SandboxConfig()

    def check(self) -> CodeGrader:
        """Check that the machines give the isolation that ``reward.sandbox.minimum`` requires; raise ConfigError if not.

        This checks this machine, or a machine on which Ray starts a worker. Every worker in a cluster checks its own machine
        when it loads.
        """
        if self._pools is local_pool:
            require_isolation(self._cfg.minimum)
        else:
            self.start().check()
        return self

    def question(self, response: str, ground_truth: Any) -> bytes | Verdict:
        """See ``PooledGrader``."""
        if not fits(response) or not (code := find_code(response)).strip():
            return 0.0, None
        try:
            return encode_item({"code": code, "truth": ground_truth})
        except (TypeError, ValueError, RecursionError):
            return 0.0, "error"

    def make_pool(self) -> WorkerPool:
        """See ``PooledGrader``."""
        rule, cfg = self._rule, self._cfg
        level = require_isolation(cfg.minimum).name if self._pools is local_pool else None
        options = {"rule": to_dict(rule), "sandbox": to_dict(cfg), "level": level}
        seconds = Limits(cpu_s=rule.total_s).deadline_s + _SPARE_S
        limits = WorkerLimits(self._workers, seconds, cfg.memory_gib + _SPARE_GIB)
        return self._pools("reward rule 'code'", "code", options, limits)

    def read_verdict(self, answer: Mapping[str, Any]) -> Verdict:
        """See ``PooledGrader``."""
        return (0.0, answer["failure"]) if answer["failure"] else (float(answer["grade"]), None)


# --------------------------------------------------------------------------------------------------- in a worker process
def load_code(
    rule: Mapping[str, Any], sandbox: Mapping[str, Any], level: str | None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Build a function from an item ``{"code", "truth"}`` to its verdict ``{"grade", "failure"}``.

    ``rule`` and ``sandbox`` contain the fields of their configurations. ``level`` is the isolation of this machine, or None
    to detect it.
    """
    chosen, cfg = RuleConfig(**rule), SandboxConfig(**sandbox)
    level = level or require_isolation(cfg.minimum).name
    packages = site_packages() if cfg.packages else []
    try:
        # The tester gets its own sandbox, so that the tested program cannot reach it.
        sandboxes = Sandbox(level, packages), Sandbox(level, packages)
    except OSError as error:
        raise ConfigError(f"reward rule 'code': the sandbox ({level}) cannot be started: {error}") from error

    def call(item: Mapping[str, Any]) -> dict[str, Any]:
        try:
            tests = read_tests(item["truth"])[: chosen.max_tests]
        except UNREADABLE:
            return {"grade": 0.0, "failure": "error"}  # ``reward-test`` reports such tests
        spent_s, began, passed = 0.0, time.monotonic(), 0
        for index, test in enumerate(tests):
            left_s = min(chosen.test_s, chosen.total_s - spent_s)
            if left_s <= 0 or time.monotonic() - began > Limits(cpu_s=chosen.total_s).deadline_s:
                break
            reason, cpu_s = _judge_one(item["code"], test, sandboxes, _limits(cfg, test, left_s))
            if reason is Reason.REFUSED:
                return {"grade": 0.0, "failure": "error"}
            spent_s += cpu_s
            passed += reason is Reason.OK
            if not chosen.partial and passed <= index:
                break
        share = passed / len(tests)
        return {"grade": share if chosen.partial else float(share == 1), "failure": None}

    return call


def _limits(cfg: SandboxConfig, test: CodeTest, cpu_s: float) -> Limits:
    printed = 2 * len(test.expected) if isinstance(test.expected, str) else 0
    output = min(max(printed, _LEAST_OUTPUT), _MOST_OUTPUT)
    return Limits(cpu_s=cpu_s, memory_bytes=int(cfg.memory_gib * 2**30), output_bytes=output)


def _judge_one(code: str, test: CodeTest, sandboxes: tuple[Sandbox, Sandbox], limits: Limits) -> tuple[Reason, float]:
    first, second = sandboxes
    if test.kind == "asserts":
        result = first.test(Program(code, "serve", prelude=True), Program(test.input, "test"), second, limits)
        return result.reason, result.cpu_s
    if test.kind == "function":
        arguments = json.dumps(to_json(test.input)).encode("ascii")
        result = first.run(Program(code, "call", name=test.name, prelude=True), limits, stdin=arguments)
        right = result.ok and _value_is(result, test.expected)
    else:
        result = first.run(Program(code, prelude=True), limits, stdin=test.input.encode(errors="replace"))
        right = result.ok and same_output(result.stdout, test.expected)
    return (Reason.WRONG if result.ok and not right else result.reason), result.cpu_s


def _value_is(result: Result, expected: Any) -> bool:
    if len(result.stdout) > max(_LEAST_VALUE, 8 * len(json.dumps(expected))):
        return False  # do not parse it; a program may print a value that is slow to build
    try:
        return same_value(from_json(json.loads(result.stdout), _array_or_nothing), expected)
    except Exception:  # the program printed no valid value
        return False


def _array_or_nothing(name: str, content: Any) -> Any:
    if name == "array":
        return from_json(content[1], _array_or_nothing)
    raise ValueError(name)


# --------------------------------------------------------------------------------------------------------- reading tests
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
