"""Tries a reward on the data before it is trained on: ground truths must be right, empty and other rows' answers must not.

A reward that is wrong about its own ground truths trains nothing, and shows as nothing but a low score.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from rlhf_mcore.config.data_columns import file_keys, row_limits, settings_of
from rlhf_mcore.config.data_rows import ground_truth, mapping
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.implied import grades
from rlhf_mcore.config.reward_sources import needs_truth, rules_for, scores_alone
from rlhf_mcore.config.rules.data import SCANNED_ROWS
from rlhf_mcore.config.schema import Config, DataConfig, JudgeConfig, RewardConfig, RuleConfig
from rlhf_mcore.data.source import load_transform, transformed_rows
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.rewards.forms import canonical
from rlhf_mcore.rewards.items import NoResults
from rlhf_mcore.rewards.pools import Pools, local_pool
from rlhf_mcore.rewards.reward import build_reward, check_sources, text_only, what_scores
from rlhf_mcore.types import Prompt, Score

if TYPE_CHECKING:
    from rlhf_mcore.rewards.pool import WorkerPool

ROWS_AT_START = 8
SCAN_AT_START_S = 1.0
TRIAL_S = 60.0  # the whole trial at the start of a run, whatever the reward does
SILENT_S = 2.0  # of it, before a line tells of it
CALL_AT_START_S = 10.0  # what a function is waited for at the start of a run, where a warning is all that may follow
SERVER_S = 60.0  # what a server is waited for
# How a response may give its answer. The best score counts: which notation a reward reads is what is not known here.
NOTATIONS = (
    "{}",
    "#### {}",
    r"\boxed{{{}}}",
    "Answer: {}",
    "<think>So.</think><answer>{}</answer>",
    "<think>So.</think>\nAnswer: \\boxed{{{}}}",
)
ALL_AT_ONCE = "<think>So.</think>\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}\nAnswer: {0}"
AT_START = ("{}", ALL_AT_ONCE)  # for a function, whose calls may be slow or have a price
SOLUTIONS = (
    "solution",
    "canonical_solution",
    "reference_solution",
)  # in extra_info, of tasks whose ground truth is no answer


@dataclass(slots=True)
class Row:
    """A row of the data, what its ground truth, an empty response and another row's answer were scored, and with what response."""

    place: str
    prompt: Prompt
    is_answered: bool = False  # the prompt is a conversation that ends with what the assistant said
    truth: Score | None = None  # None: there is no response that is known to be right
    truth_text: str = ""
    empty: Score | None = None
    other: Score | None = None
    other_text: str = ""


@dataclass(slots=True)
class Report:
    """The result of a trial."""

    key: str  # data.train or data.eval
    seen: int  # rows that were read, of which ``rows`` were tried
    rows: list[Row]
    wrong_truths: list[Row] = field(default_factory=list)
    paid_empty: list[Row] = field(default_factory=list)
    paid_others: list[Row] = field(default_factory=list)
    tops: dict[str, float] = field(default_factory=dict)  # of a function, by data source: the score that is right

    @property
    def tried(self) -> list[Row]:
        """Rows with a response that should be right."""
        return [row for row in self.rows if row.truth is not None]

    @property
    def is_sound(self) -> bool:
        return not (self.wrong_truths or self.paid_empty or self.paid_others)

    @property
    def reads_nothing(self) -> bool:
        """Return whether no ground truth at all is right."""
        return bool(self.tried) and len(self.wrong_truths) == len(self.tried)


def read_sample(data: DataConfig, name: str, limit: int, scan_s: float | None = None) -> tuple[list[Row], Counter[str]]:
    """``limit`` rows spread over those of ``name`` (data.train or data.eval) that are read, and how many are of each data source.

    At most ``SCANNED_ROWS`` of a file are read, and for no longer than ``scan_s``.

    Raises:
        ConfigError: a file or a row that cannot be read.
    """
    files: list[str] = getattr(data, name.partition(".")[2])
    deadline, transform = None if scan_s is None else time.monotonic() + scan_s, load_transform(data.transform)
    setting = settings_of(name)[1]
    rows: list[Row] = []
    for file, (prompt_key, answer_key) in zip(files, file_keys(data, files, name), strict=True):
        for place, row in islice(transformed_rows(Path(file), row_limits(data), transform), SCANNED_ROWS):
            if row is not None:
                truth = ground_truth(row, answer_key, place, setting)
                source, info = str(row.get("data_source") or "unknown"), mapping(row, "extra_info", place)
                content = row.get(prompt_key)
                prompt = Prompt(place, len(rows), [], _text(content), source, truth, extra_info=info)
                prompt.messages = content if isinstance(content, list) else None
                last = content[-1] if isinstance(content, list) and content else None
                rows.append(Row(place, prompt, isinstance(last, dict) and last.get("role") == "assistant"))
            if deadline is not None and time.monotonic() > deadline:
                break
    chosen = np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int).tolist()
    return [rows[index] for index in chosen], Counter(row.prompt.data_source for row in rows)


def _text(prompt: Any) -> str:
    """Return what a judge is shown of a prompt, which is a text or a list of messages. No template is applied."""
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return prompt if isinstance(prompt, str) else ""


def try_reward(
    cfg: RewardConfig,
    rows: Sequence[Row],
    name: str,
    seen: int,
    *,
    notations: Sequence[str] = NOTATIONS,
    others: bool = True,
    pools: Pools = local_pool,
) -> Report:
    """Score the ground truths of ``rows``, empty responses and, with ``others``, other rows' answers.

    Of rules, a response is right if every rule that compares with the ground truth grades it 1. Of a function, if it has the highest
    score that any ground truth of the data source has, and more than an empty response.

    Raises:
        ConfigError: the reward cannot be had, gives no result again and again, or has tests to run that it cannot read.
    """
    _refuse_unreadable_tests(cfg, rows, name)
    remote = replace(cfg.remote, deadline_s=min(cfg.remote.deadline_s, SERVER_S))
    judge = replace(cfg.judge, deadline_s=min(cfg.judge.deadline_s, SERVER_S))
    reward = build_reward(replace(cfg, on_error="zero", remote=remote, judge=judge), pools)
    try:
        report = Report(name, seen, list(rows))
        written = [[(row, text) for text in _right_responses(cfg, row.prompt, notations)] for row in rows]
        best: dict[int, tuple[Score, str]] = {}
        for (row, text), score in _score(reward, [pair for pairs in written for pair in pairs]):
            if _is_testable(cfg, row.prompt) and (
                id(row) not in best or _mark(cfg, row.prompt, score) > _mark(cfg, row.prompt, best[id(row)][0])
            ):
                best[id(row)] = score, text
        for row in rows:
            row.truth, row.truth_text = best.get(id(row), (None, ""))
        for (row, _), score in _score(reward, [(row, "") for row in rows]):
            row.empty = score
        exchanged = [(row, other) for row in rows if others and (other := _other_answer(row, rows)) is not None]
        for (row, other), score in _score(reward, exchanged):
            row.other, row.other_text = score, other
    finally:
        reward.close()
    tops: dict[str, float] = {}  # by data source the highest score of a ground truth
    for row in report.tried:
        assert row.truth is not None
        tops[row.prompt.data_source] = max(row.truth.value, tops.get(row.prompt.data_source, row.truth.value))
    for row in rows:
        top = tops.get(row.prompt.data_source, math.inf)
        if row.truth is not None and not _is_full(cfg, row, row.truth, top):
            report.wrong_truths.append(row)
        if row.empty is not None and row.truth is not None and _is_full(cfg, row, row.empty, top):
            report.paid_empty.append(row)
        if row.other is not None and _is_full(cfg, row, row.other, top):
            report.paid_others.append(row)
    report.tops = tops if _is_opaque(cfg) else {}
    return report


def check_reward(cfg: Config, name: str = "data.train", say: Callable[[str], None] = lambda text: None) -> str | None:
    """Try the reward at the start of a run, without a model: that it can be had, and reads ground truths.

    It has ``TRIAL_S`` in all, and tells of itself by ``say`` after ``SILENT_S``.

    Returns a warning, or None. Rows are not read where ``data.transform`` would have to be called.

    Raises:
        ConfigError: the reward cannot be had, a data source has no rules, no rule reads any of the ground truths, or a function ends
            its process at every one of them.
    """
    if not grades(cfg):
        return None
    workers: list[WorkerPool] = []
    is_over = Event()

    def pools(*arguments: Any) -> WorkerPool:
        if is_over.is_set():
            raise RuntimeError("nobody waits for the trial any more")
        workers.append(local_pool(*arguments))
        return workers[-1]

    def attempt() -> None:
        try:
            verdict.set_result(_check_reward(cfg, name, pools))
        except BaseException as error:
            verdict.set_exception(error)

    verdict: Future[str | None] = Future()
    Thread(target=attempt, name="reward-trial", daemon=True).start()
    try:
        wait([verdict], SILENT_S)
        if not verdict.done():
            tried = f"trying {what_scores(cfg.reward)} on {ROWS_AT_START} rows of {name}"
            say(f"{tried} before anything else starts, for {TRIAL_S:g} s at most")
            wait([verdict], TRIAL_S - SILENT_S)
        if verdict.done():
            return verdict.result()
        return (
            f"{what_scores(cfg.reward)} was not done with {ROWS_AT_START} rows of {name} within {TRIAL_S:g} s, and is used untried; "
            "`rlhf-mcore reward-test` has no such limit"
        )
    finally:
        is_over.set()
        for pool in list(workers):
            pool.close()


def _check_reward(cfg: Config, name: str, pools: Pools) -> str | None:
    build_reward(cfg.reward, pools).close()
    opaque = _is_opaque(cfg.reward)
    if cfg.data.transform is not None or not (opaque or cfg.reward.rules or cfg.reward.sources is not None):
        return None
    rows, sources = read_sample(cfg.data, name, ROWS_AT_START, SCAN_AT_START_S)
    warning = answered_text(rows, name)
    if not opaque:
        refuse_unknown_sources(cfg.reward, sources, name)
        report = try_reward(
            replace(cfg.reward, judge=JudgeConfig()), rows, name, sources.total(), others=False, pools=pools
        )
    elif cfg.reward.function is None and not cfg.reward.functions:
        report = try_reward(cfg.reward, rows, name, sources.total(), notations=AT_START, others=False, pools=pools)
    else:
        quick = replace(cfg.reward, timeout_s=min(cfg.reward.timeout_s, CALL_AT_START_S))
        try:
            report = try_reward(quick, rows, name, sources.total(), notations=AT_START, others=False, pools=pools)
        except ConfigError as error:  # in a run it has more time
            if isinstance(error, NoResults) and not error.timed_out and cfg.reward.on_error == "fail":
                raise
            return f"reward.function could not be tried on {name}: {error}"
    if not report.reads_nothing:
        return warning
    first = report.tried[0]
    if cfg.reward.on_error == "fail" and all(
        row.truth is not None and row.truth.failure == "error" for row in report.tried
    ):
        assert first.truth is not None
        raise ConfigError(
            f"{first.truth.cause}. So it is with all {len(report.tried)} rows that were tried; correct it"
        )
    finding = (
        f"{what_scores(cfg.reward)} gives none of {len(report.tried)} ground truths of {name} the full mark; the first is "
        f"{shorten(first.prompt.ground_truth)} ({first.place})"
    )
    if opaque:
        return f"{finding}. If it expects another form than usual, all is well; `rlhf-mcore reward-test` shows what it was given"
    raise ConfigError(
        f"{finding}: every reward would be the same. Choose a rule that reads such answers (math reads most), or correct "
        "data.answer_key; `rlhf-mcore reward-test` shows what was tried"
    )


def _refuse_unreadable_tests(cfg: RewardConfig, rows: Sequence[Row], name: str) -> None:
    if scores_alone(cfg):
        return
    problems = []
    for row in [row for row in rows if any(rule.name == "code" for rule in _comparing(cfg, row.prompt))]:
        from rlhf_mcore.rewards.code_tests import UNREADABLE, read_tests

        try:
            read_tests(row.prompt.ground_truth)
        except UNREADABLE as error:
            problems.append(f"{row.place}: {shorten(row.prompt.ground_truth)} ({error})")
    if problems:
        raise ConfigError(
            f"{len(problems)} of {len(rows)} rows of {name} that were tried have no tests that the reward rule code can read; the "
            f"first: {problems[0]}. Correct data.answer_key or the rows (docs/rewards.md#code has the forms), or "
            "choose another rule for their data source with reward.sources"
        )


def refuse_unknown_sources(cfg: RewardConfig, sources: Counter[str], name: str) -> None:
    """Refuse data sources without rules, or with rules that this machine cannot follow. ``sources``: rows of each."""
    prompts = (Prompt("", 0, [], "", data_source=source) for source in sources.elements())
    check_sources(prompts, cfg.sources, name)
    if any(rule.name == "code" for source in sources for rule in rules_for(source, cfg.rules, cfg.sources)):
        from rlhf_mcore.rewards.code import require_isolation

        require_isolation(cfg.sandbox.minimum)


def answered_text(rows: Sequence[Row], name: str) -> str | None:
    """Write a warning where prompts already have an answer."""
    answered = [row for row in rows if row.is_answered]
    if not answered:
        return None
    return (
        f"{len(answered)} of {len(rows)} prompts of {name} that were read end with the assistant's answer ({answered[0].place}), "
        "which the policy is shown: leave it out, as `rlhf-mcore prepare-data` does"
    )


def shorten(value: Any) -> str:
    """Return a value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def _score(reward: RewardFunction, pairs: Sequence[tuple[Row, str]]) -> Iterator[tuple[tuple[Row, str], Score]]:
    responses = [text_only(row.prompt, text) for row, text in pairs]
    return zip(pairs, reward.score(responses) if responses else [], strict=True)


def _right_responses(cfg: RewardConfig, prompt: Prompt, notations: Sequence[str]) -> list[str]:
    """Write responses that give the ground truth as their answer; or take the solutions of the row."""
    solutions = [str(prompt.extra_info[key]) for key in SOLUTIONS if prompt.extra_info.get(key)]
    if not scores_alone(cfg) and any(rule.name == "code" for rule in _comparing(cfg, prompt)):
        return solutions  # tests are no answer
    if prompt.ground_truth is None or not str(prompt.ground_truth).strip():
        return solutions
    truth = prompt.ground_truth if isinstance(prompt.ground_truth, str) else json.dumps(prompt.ground_truth)
    return [*(notation.format(truth) for notation in notations), *solutions]


def _other_answer(row: Row, rows: Sequence[Row]) -> str | None:
    """Take the answer of a row of the same data source with another ground truth, in the notation that is right for that row."""
    start = next(index for index, each in enumerate(rows) if each is row)
    for other in [*rows[start + 1 :], *rows[:start]]:
        same = canonical(str(other.prompt.ground_truth)) == canonical(str(row.prompt.ground_truth))
        if other.truth is not None and other.prompt.data_source == row.prompt.data_source and not same:
            return other.truth_text
    return None


def _is_opaque(cfg: RewardConfig) -> bool:
    """Return whether nothing is known of a good score: there are no rules."""
    others = cfg.judge.url is not None or bool(cfg.functions)
    return scores_alone(cfg) or (others and cfg.sources is None and not cfg.rules)


def _comparing(cfg: RewardConfig, prompt: Prompt) -> list[RuleConfig]:
    return [rule for rule in rules_for(prompt.data_source, cfg.rules, cfg.sources) if needs_truth(rule)]


def _is_testable(cfg: RewardConfig, prompt: Prompt) -> bool:
    """Return whether a right response can be made up: not for an expression, and not where nothing is compared."""
    compared = _comparing(cfg, prompt)
    return _is_opaque(cfg) or (bool(compared) and all(rule.name != "regex" for rule in compared))


def _mark(cfg: RewardConfig, prompt: Prompt, score: Score) -> tuple[float, float]:
    """Return a key by which the best of several responses is chosen."""
    if _is_opaque(cfg):
        return score.value, 0.0
    return sum(score.parts[rule.name] for rule in _comparing(cfg, prompt)), score.value


def _is_full(cfg: RewardConfig, row: Row, score: Score, top: float) -> bool:
    if score.failure is not None:
        return False
    if not _is_opaque(cfg):
        compared = _comparing(cfg, row.prompt)
        return bool(compared) and all(score.parts[rule.name] >= 1 for rule in compared)
    nothing = row.empty.value if row.empty is not None else 0.0
    return score.value >= top and (score.value > nothing or score is row.empty)
