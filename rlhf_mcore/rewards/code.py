"""The rule ``code``: run model programs against tests in sandboxes of worker processes, and compare the results outside."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.config.schema.group import to_dict
from rlhf_mcore.rewards.answers import fits
from rlhf_mcore.rewards.code_tests import UNREADABLE, CodeTest, find_code, read_tests, same_output, same_value
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
