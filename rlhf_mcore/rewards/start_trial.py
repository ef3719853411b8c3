"""Tries the reward at the start of a run, before anything else is started. A doomed run ends here, with one message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from threading import Event, Thread
from typing import Any, Generic, TypeVar

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig, JudgeConfig, RemoteRewardConfig, RewardConfig
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
TRIAL_S = 60.0  # the whole trial, whatever the reward does
SILENT_S = 2.0  # of it, before a line reports it
CALL_AT_START_S = 10.0  # for one response of a function; a later one may decide
AT_START = ("{}", ALL_AT_ONCE)  # notations for a function, whose calls may be slow or have a price


def check_reward(
    cfg: RewardConfig, data: DataConfig, name: str = "data.train", say: Callable[[str], None] = lambda text: None
) -> str | None:
    """Try the reward at the start of a run, without a model: that it can be had, and reads ground truths.

    It has ``TRIAL_S`` in all, and reports its start by ``say`` after ``SILENT_S``. A function that has answered nothing until then,
    or that reached the trial's deadline again and again, gets one response more, and for it the whole ``reward.timeout_s``.

    Returns a warning, or None. Rows are not read where ``data.transform`` would have to be called.

    Raises:
        ConfigError: the reward cannot be had, a data source has no rules, no rule reads any of the ground truths, or a function ends
            its process or reaches ``reward.timeout_s`` at every one of them.
    """
    what = scoring_keys(cfg)
    with _Attempt(partial(_check_reward, cfg, data, name)) as trial:
        if not trial.is_done_within(SILENT_S):
            say(
                f"trying {what} on {ROWS_AT_START} rows of {name} before anything else starts, for {TRIAL_S:g} s at most"
            )
        if trial.is_done_within(TRIAL_S - SILENT_S):
            try:
                return trial.result()
            except NoResults as error:
                if not (error.timed_out and has_function(cfg) and cfg.timeout_s > CALL_AT_START_S):
                    raise  # the run would end in the same way, whatever reward.on_error is
                doubt = f"{what} gave no result in time for {MAX_LOST_IN_A_ROW} responses in a row"
                warning = f"reward.function could not be tried on {name}: {error}"
        else:
            doubt = f"{what} gave no result for any response within {TRIAL_S:g} s" if trial.has_silent_function else ""
            warning = (
                f"{what} was not done with {ROWS_AT_START} rows of {name} within {TRIAL_S:g} s, and is used untried; "
                "`rlhf-mcore reward-test` has no such limit"
            )
    if doubt and data.transform is None:
        say(f"{doubt}; waiting for one response, for reward.timeout_s={cfg.timeout_s:g} s at most")
        with _Attempt(partial(_try_one_response, cfg, data, name)) as last:
            if cause := last.result():
                raise ConfigError(f"{cause}. Correct it, or raise reward.timeout_s if it needs more time")
    return warning


class _Attempt(Generic[T]):
    """Run ``work`` in a thread of its own with pools that are closed at the end, whether ``work`` is done or not."""

    def __init__(self, work: Callable[[Pools], T]) -> None:
        self._work, self._verdict, self._is_over = work, Future[T](), Event()
        self._pools: list[tuple[str, WorkerPool]] = []  # each with the kind of its work

    def __enter__(self) -> _Attempt[T]:
        Thread(target=self._run, name="reward-trial", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        for _, pool in list(self._pools):
            pool.close()

    @property
    def has_silent_function(self) -> bool:
        """Return whether a function has not answered any response so far."""
        return any(kind == "reward" and not pool.num_answered for kind, pool in self._pools)

    def is_done_within(self, seconds: float) -> bool:
        """Wait for the work, at most ``seconds``."""
        wait([self._verdict], seconds)
        return self._verdict.done()

    def result(self) -> T:
        """Wait for the result of the work, or raise its error."""
        return self._verdict.result()

    def _make_pool(self, name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        if self._is_over.is_set():
            raise RuntimeError("nobody waits for the trial any more")
        self._pools.append((kind, local_pool(name, kind, options, limits)))
        return self._pools[-1][1]

    def _run(self) -> None:
        try:
            self._verdict.set_result(self._work(self._make_pool))
        except BaseException as error:
            self._verdict.set_exception(error)


def _try_one_response(cfg: RewardConfig, data: DataConfig, name: str, pools: Pools) -> str | None:
    """Have the functions score one response, once, within ``reward.timeout_s``. Return why they do not, or None."""
    others: dict[str, Any] = {"rules": [], "sources": None, "judge": JudgeConfig(), "remote": RemoteRewardConfig()}

    def single(name: str, kind: str, options: Mapping[str, Any], limits: WorkerLimits) -> WorkerPool:
        return pools(name, kind, options, replace(limits, workers=1, retries=0))

    [row], _ = read_sample(data, name, 1, SCAN_AT_START_S)
    reward = trial_reward(cfg.model_copy(update=others), single)
    try:
        response = "".join(right_responses(cfg, row.prompt, AT_START)[:1])
        [score] = reward.score([make_text_trajectory(row.prompt, response)])
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
    """Return a warning that no ground truth is right.

    Raises:
        ConfigError: nothing in the run will be right either.
    """
    first, tried = report.tested_rows[0], len(report.tested_rows)
    failures = {row.truth.failure for row in report.tested_rows if row.truth is not None}
    if cfg.on_error == "fail" and failures == {"error"} and first.truth is not None:
        raise ConfigError(f"{first.truth.cause}. So it is with all {tried} rows that were tried; correct it")
    finding = (
        f"{scoring_keys(cfg)} gives none of {tried} ground truths of {report.key} the full mark; the first is "
        f"{shorten(first.prompt.ground_truth)} ({first.place})"
    )
    if is_opaque(cfg):
        return f"{finding}. If it expects another form than usual, all is well; `rlhf-mcore reward-test` shows what it was given"
    raise ConfigError(
        f"{finding}: every reward would be the same. Choose a rule that reads such answers (math reads most), or correct "
        "data.answer_key; `rlhf-mcore reward-test` shows what was tried"
    )
