"""The rule ``code``: programs of a model against tests, run by worker processes in the sandbox. Who compares is outside of it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RuleConfig, SandboxConfig
from rlhf_mcore.rewards.answers import fits
from rlhf_mcore.rewards.code_tests import UNREADABLE, CodeTest, code_of, read_tests, same_output, same_value
from rlhf_mcore.rewards.items import WorkerLimits
from rlhf_mcore.rewards.pools import Pools, Verdict, default_workers, local_pool
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

if TYPE_CHECKING:
    from rlhf_mcore.rewards.pool import WorkerPool

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


class CodeGrader:
    """1 if the program in a response passes all tests of the ground truth (``read_tests``); with ``partial`` the share that it passes.

    Args:
        rule: with the options of the rule ``code``.
        sandbox: what the machine has to give, and what a program may use.
        workers: processes; None: this rank's share of the cores. They are started when there is something to run.
        pools: makes them, as ``rewards.pools.Pools``.
    """

    def __init__(
        self,
        rule: RuleConfig | None = None,
        sandbox: SandboxConfig | None = None,
        workers: int | None = None,
        pools: Pools = local_pool,
    ) -> None:
        self._rule, self._cfg, self._workers = rule or RuleConfig("code"), sandbox or SandboxConfig(), workers
        self._pools = pools
        self._pool: WorkerPool | None = None

    def check(self) -> CodeGrader:
        """Check that this machine gives the isolation that ``reward.sandbox.minimum`` asks for; raises ConfigError where not.

        That is this one, or where Ray starts a worker. Every worker in a cluster finds out for itself when it loads.
        """
        if self._pools is local_pool:
            require_isolation(self._cfg.minimum)
        else:
            self._start().check()
        return self

    def __call__(self, response: str, ground_truth: Any) -> float:
        return self.submit([(response, ground_truth)])()[0][0]

    def submit(self, pairs: Sequence[tuple[str, Any]]) -> Callable[[], list[Verdict]]:
        """Begin to grade. "error" stands beside a 0 where tests cannot be read or run."""
        verdicts: list[Verdict] = [(0.0, None)] * len(pairs)
        asked: dict[bytes, list[int]] = {}
        for index, (response, truth) in enumerate(pairs):
            if fits(response) and (code := code_of(response)).strip():
                try:
                    item = json.dumps({"code": code, "truth": truth}, default=_as_list).encode("ascii")
                except (TypeError, ValueError, RecursionError):
                    verdicts[index] = (0.0, "error")
                else:
                    asked.setdefault(item, []).append(index)
        collect = self._start().submit(list(asked)) if asked else list

        def finish() -> list[Verdict]:
            for indices, outcome in zip(asked.values(), collect(), strict=True):
                assert outcome is not None
                failure = "timeout" if outcome.timed_out else "error" if outcome.lost else outcome.answer["failure"]
                for index in indices:
                    verdicts[index] = (0.0 if failure else float(outcome.answer["grade"]), failure)
            return verdicts

        return finish

    def close(self) -> None:
        """End the worker processes, and what they run."""
        if self._pool is not None:
            self._pool.close()

    def _start(self) -> WorkerPool:
        if self._pool is None:
            rule, cfg = self._rule, self._cfg
            level = require_isolation(cfg.minimum).name if self._pools is local_pool else None
            judge = Judge(
                cfg.minimum,
                level,
                cfg.packages,
                cfg.memory_gib,
                rule.test_s,
                rule.total_s,
                rule.partial,
                rule.max_tests,
            )
            seconds = Limits(cpu_s=rule.total_s).deadline_s + _SPARE_S
            limits = WorkerLimits(self._workers or default_workers(), seconds, cfg.memory_gib + _SPARE_GIB)
            self._pool = self._pools("reward rule 'code'", "code", asdict(judge), limits)
        return self._pool


def _as_list(value: Any) -> Any:
    """Arrays and numbers of numpy, which parquet files hold, as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")


# --------------------------------------------------------------------------------------------------- in a worker process
@dataclass(frozen=True, slots=True)
class Judge:
    """Set how programs are judged. Seconds are of the processor; of the clock there are three times as many and a few more."""

    minimum: str  # isolation that the worker's machine has to give
    level: str | None  # what it gives; None: the worker finds out
    packages: bool
    memory_gib: float
    test_s: float
    total_s: float
    partial: bool
    max_tests: int | None


def load_code(**options: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Make a judge of items ``{"code", "truth"}``: ``{"grade", "failure"}``. ``options``: those of ``Judge``."""
    judge = Judge(**options)
    level = judge.level or require_isolation(judge.minimum).name
    packages = site_packages() if judge.packages else []
    try:
        # What tests is never in the sandbox of what is tested.
        sandboxes = Sandbox(level, packages), Sandbox(level, packages)
    except OSError as error:
        raise ConfigError(f"reward rule 'code': the sandbox ({level}) cannot be started: {error}") from error

    def call(item: Mapping[str, Any]) -> dict[str, Any]:
        try:
            tests = read_tests(item["truth"])[: judge.max_tests]
        except UNREADABLE:
            return {"grade": 0.0, "failure": "error"}  # which ``reward-test`` names
        spent_s, began, passed = 0.0, time.monotonic(), 0
        for index, test in enumerate(tests):
            left_s = min(judge.test_s, judge.total_s - spent_s)
            if left_s <= 0 or time.monotonic() - began > Limits(cpu_s=judge.total_s).deadline_s:
                break
            reason, cpu_s = _judge_one(item["code"], test, sandboxes, _limits(judge, test, left_s))
            if reason is Reason.REFUSED:
                return {"grade": 0.0, "failure": "error"}
            spent_s += cpu_s
            passed += reason is Reason.OK
            if not judge.partial and passed <= index:
                break
        share = passed / len(tests)
        return {"grade": share if judge.partial else float(share == 1), "failure": None}

    return call


def _limits(judge: Judge, test: CodeTest, cpu_s: float) -> Limits:
    printed = 2 * len(test.expected) if isinstance(test.expected, str) else 0
    output = min(max(printed, _LEAST_OUTPUT), _MOST_OUTPUT)
    return Limits(cpu_s=cpu_s, memory_bytes=int(judge.memory_gib * 2**30), output_bytes=output)


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
