"""Test the reward before the rest of the run starts. If the run cannot succeed, it ends here with one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig, JudgeConfig, RemoteRewardConfig, RewardConfig
from rlhf_mcore.coroutines import Background, run
from rlhf_mcore.rewards.pool import MAX_LOST_IN_A_ROW, NoResults, Pools, WorkerLimits, WorkerPool, local_pool
from rlhf_mcore.rewards.reward import build_reward, make_text_trajectory, scoring_keys
from rlhf_mcore.rewards.trial import (
    ALL_AT_ONCE,
    NOTATIONS,
    TrialReport,
    answered_text,
    has_function,
    is_opaque,
    read_sample,
    refuse_unknown_sources,
    right_responses,
    shorten,
    trial_reward,
    try_reward,
)

T = TypeVar("T")

ROWS_AT_START = 8
SCAN_AT_START_S = 1.0
TRIAL_S = 60.0  # for the whole trial
SILENT_S = 2.0  # seconds of the trial before a message reports it
CALL_AT_START_S = 10.0  # for one response of a function; a longer second trial may follow
AT_START = ("{}", ALL_AT_ONCE)  # notations for a function, whose calls may be slow or cost money


def check_reward(
    cfg: RewardConfig, data: DataConfig, name: str = "data.train", say: Callable[[str], None] = lambda text: None
) -> str | None:
    """Test at the start of a run, without a model, that the reward can be built and reads ground truths.

    The test takes at most ``TRIAL_S``, and reports its start through ``say`` after ``SILENT_S``. If a function gave no answer
    in this time, or reached the test's deadline many times in a row, it gets one more response with the full
    ``reward.timeout_s``.

    Return a warning, or None. If ``data.transform`` is set, no rows are read, because the test must not call it.

    Raises:
        ConfigError: the reward cannot be built, a data source has no rules, no rule reads any ground truth, or a function ends
            its process or reaches ``reward.timeout_s`` for every ground truth.
    """
    what = scoring_keys(cfg)
    with _Attempt(partial(_check_reward, cfg, data, name)) as trial:
        if not trial.is_done_within(SILENT_S):
            say(f"testing {what} on {ROWS_AT_START} rows of {name} before the run starts, for at most {TRIAL_S:g} s")
        if trial.is_done_within(TRIAL_S - SILENT_S):
            try:
                return trial.result()
            except NoResults as error:
                if not (error.timed_out and has_function(cfg) and cfg.timeout_s > CALL_AT_START_S):
                    raise  # the run would end in the same way, for any reward.on_error
                doubt = f"{what} gave no result in time for {MAX_LOST_IN_A_ROW} responses in a row"
                warning = f"reward.function could not be tried on {name}: {error}"
        else:
            doubt = f"{what} gave no result for any response within {TRIAL_S:g} s" if trial.has_silent_function else ""
            warning = (
                f"{what} did not finish {ROWS_AT_START} rows of {name} within {TRIAL_S:g} s, and is used untested; "
                "`rlhf-mcore reward-test` has no such limit"
            )
    if doubt and data.transform is None:
        say(f"{doubt}; waiting for one response, for at most reward.timeout_s={cfg.timeout_s:g} s")
        with _Attempt(partial(_try_one_response, cfg, data, name)) as last:
            if cause := last.result():
                raise ConfigError(f"{cause}. Correct it, or raise reward.timeout_s if it needs more time")
    return warning


class _Attempt(Generic[T]):
    """Runs ``work`` in its own thread. Its pools are closed at the end, even if ``work`` is not finished."""

    def __init__(self, work: Callable[[Pools], T]) -> None:
        self._pools: list[tuple[str, WorkerPool]] = []  # each with its kind of work
        self._is_over = False

        async def attempt() -> T:
            return work(self._make_pool)

        self._verdict = Background("reward-trial").start(attempt())

    def __enter__(self) -> _Attempt[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over = True
        for _, pool in list(self._pools):
            pool.close()

    @property
    def has_silent_function(self) -> bool:
        """Return whether a function has not answered any response so far."""
        return any(kind == "reward" and not pool.num_answered for kind, pool in self._pools)

    def is_done_within(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the work. Return whether it is finished."""
        wait([self._verdict], seconds)
        return self._verdict.done()

    def result(self) -> T:
        """Wait for the result of the work. Raise its error if it failed."""
        return self._verdict.result()

    def _make_pool(self, name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        if self._is_over:
            raise RuntimeError("the trial is over")
        self._pools.append((kind, local_pool(name, kind, options, limits)))
        return self._pools[-1][1]


def _try_one_response(cfg: RewardConfig, data: DataConfig, name: str, pools: Pools) -> str | None:
    """Let the functions score one response, once, within ``reward.timeout_s``. Return the cause if they time out, else None."""
    others: dict[str, Any] = {"rules": [], "sources": None, "judge": JudgeConfig(), "remote": RemoteRewardConfig()}

    def single(name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        return pools(name, kind, options, replace(limits, workers=1, retries=0))

    [row], _ = read_sample(data, name, 1, SCAN_AT_START_S)
    reward = trial_reward(cfg.model_copy(update=others), single)
    try:
        response = "".join(right_responses(cfg, row.prompt, AT_START)[:1])
        [score] = run(reward.score([make_text_trajectory(row.prompt, response)]))
    finally:
        reward.close()
    return score.cause if score.failure == "timeout" else None


def _check_reward(cfg: RewardConfig, data: DataConfig, name: str, pools: Pools) -> str | None:
    opaque, tried = is_opaque(cfg), cfg
    may_be_slow = opaque and has_function(cfg)
    if not opaque:
        if tried.judge.url is not None:
            build_reward(tried, pools).close()
        tried = tried.model_copy(update={"judge": JudgeConfig()})
    elif may_be_slow:
        tried = tried.model_copy(update={"timeout_s": min(tried.timeout_s, CALL_AT_START_S)})
    reward = trial_reward(tried, pools)
    if data.transform is not None or not (opaque or cfg.rules or cfg.sources is not None):
        reward.close()
        return None
    rows, sources = read_sample(data, name, ROWS_AT_START, SCAN_AT_START_S)
    if not opaque:
        refuse_unknown_sources(cfg, sources, name)
    try:
        notations = AT_START if opaque else NOTATIONS
        report = try_reward(tried, rows, name, sources.total(), notations=notations, others=False, reward=reward)
    except ConfigError as error:
        if isinstance(error, NoResults) or not may_be_slow:
            raise
        return f"reward.function could not be tried on {name}: {error}"
    return _finding(cfg, report) if report.reads_nothing else answered_text(rows, name)


def _finding(cfg: RewardConfig, report: TrialReport) -> str:
    """Return a warning that no ground truth gets the full score.

    Raises:
        ConfigError: no response in the run will be correct either.
    """
    first, tried = report.tested_rows[0], len(report.tested_rows)
    failures = {row.truth.failure for row in report.tested_rows if row.truth is not None}
    if cfg.on_error == "fail" and failures == {"error"} and first.truth is not None:
        raise ConfigError(f"{first.truth.cause}. All {tried} tested rows failed in this way; correct it")
    finding = (
        f"{scoring_keys(cfg)} gives none of {tried} ground truths of {report.key} the full score; the first is "
        f"{shorten(first.prompt.ground_truth)} ({first.place})"
    )
    if is_opaque(cfg):
        return f"{finding}. Ignore this if it expects an unusual response format; `rlhf-mcore reward-test` shows the tested responses"
    raise ConfigError(
        f"{finding}: every reward would be the same. Choose a rule that reads such answers (math reads most), or correct "
        "data.answer_key; `rlhf-mcore reward-test` shows the tested responses"
    )
