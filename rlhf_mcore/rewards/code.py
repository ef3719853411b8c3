"""The rule ``code``: programs of a model against tests, run by worker processes in the sandbox. Who compares is outside of it."""

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

_SPARE_S = 120.0  # of an item, for starting sandboxes and killing what is in them
_SPARE_GIB = 2.0  # of a worker, beside what a program may use: tests and outputs
_LEAST_VALUE = 2**16  # characters that a function's value may have
_LEAST_OUTPUT, _MOST_OUTPUT = 2**20, 2**26  # bytes that a program may print


def require_isolation(minimum: str) -> Level:
    """Find out what isolation this machine gives.

    Raises:
        ConfigError: naming ``reward.sandbox.minimum``: it gives less.
    """
    level = machine_level()
    if level.reaches(minimum):
        return level
    less = (
        ""
        if level.name == "filters"
        else "; with rlimits alone, code of the model can read your files and use the network"
    )
    raise ConfigError(
        f"reward.sandbox.minimum={minimum}: this machine gives programs of the model {level.name} only ({'; '.join(level.missing)}): "
        f"{REMEDIES[minimum]}, or accept less with reward.sandbox.minimum={level.name}{less}"
    )


class CodeGrader(PooledGrader):
    """1 if the program in a response passes all tests of the ground truth (``read_tests``); with ``partial`` the share that it passes.

    "error" is returned with a 0 if tests cannot be read or run.

    Args:
        rule: with the options of the rule ``code``.
        sandbox: what the machine has to give, and what a program may use.
        workers, pools: as of ``PooledGrader``.
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
        """Check that this machine gives the isolation that ``reward.sandbox.minimum`` asks for; raises ConfigError if not.

        That is this one, or where Ray starts a worker. Every worker in a cluster finds out for itself when it loads.
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
    """Make a judge of items ``{"code", "truth"}``: ``{"grade", "failure"}``.

    ``rule``, ``sandbox``: fields of their configurations. ``level``: the isolation of this machine; None: it is found out.
    """
    chosen, cfg = RuleConfig(**rule), SandboxConfig(**sandbox)
    level = level or require_isolation(cfg.minimum).name
    packages = site_packages() if cfg.packages else []
    try:
        # What tests is never in the sandbox of what is tested.
        sandboxes = Sandbox(level, packages), Sandbox(level, packages)
    except OSError as error:
        raise ConfigError(f"reward rule 'code': the sandbox ({level}) cannot be started: {error}") from error

    def call(item: Mapping[str, Any]) -> dict[str, Any]:
        try:
            tests = read_tests(item["truth"])[: chosen.max_tests]
        except UNREADABLE:
            return {"grade": 0.0, "failure": "error"}  # which ``reward-test`` names
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
        return False  # nor parsed: what is built of it might be slow on purpose
    try:
        return same_value(from_json(json.loads(result.stdout), _array_or_nothing), expected)
    except Exception:  # what the program has printed is no value
        return False


def _array_or_nothing(name: str, content: Any) -> Any:
    if name == "array":
        return from_json(content[1], _array_or_nothing)
    raise ValueError(name)
