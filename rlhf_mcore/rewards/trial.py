"""Test a reward on the data before training. Ground truths must be correct; empty responses and answers of other rows must not.

A reward that rejects its own ground truths trains nothing, and the only symptom is a low score.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import needs_truth, rules_for, scores_alone
from rlhf_mcore.config.rules.data import SCANNED_ROWS
from rlhf_mcore.config.schema import DataConfig, RewardConfig, RuleConfig
from rlhf_mcore.coroutines import run
from rlhf_mcore.data.source import load_transform, transformed_rows
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.readers.data_rows import file_keys, ground_truth, mapping, settings_of
from rlhf_mcore.rewards.code import UNREADABLE, read_tests, require_isolation
from rlhf_mcore.rewards.forms import canonical
from rlhf_mcore.rewards.pool import Pools, local_pool
from rlhf_mcore.rewards.reward import Graders, build_reward, check_sources, make_text_trajectory
from rlhf_mcore.types import Prompt, Score

SERVER_S = 60.0  # longest wait for a server
# Notations for the answer in a response. The best score counts, because the reward's expected notation is unknown.
NOTATIONS = (
    "{}",
    "#### {}",
    r"\boxed{{{}}}",
    "Answer: {}",
    "<think>So.</think><answer>{}</answer>",
    "<think>So.</think>\nAnswer: \\boxed{{{}}}",
)
ALL_AT_ONCE = "<think>So.</think>\n\\boxed{{{0}}}\n<answer>{0}</answer>\n#### {0}\nAnswer: {0}"
SOLUTIONS = (
    "solution",
    "canonical_solution",
    "reference_solution",
)  # in extra_info, for tasks whose ground truth is not an answer


@dataclass(slots=True)
class TrialRow:
    """A data row with the scores and texts of its ground truth, of an empty response and of another row's answer."""

    place: str
    prompt: Prompt
    is_answered: bool = False  # the prompt is a conversation that ends with an assistant message
    truth: Score | None = None  # None: no response is known to be correct
    truth_text: str = ""
    empty: Score | None = None
    other: Score | None = None
    other_text: str = ""


@dataclass(slots=True)
class TrialReport:
    """The result of a trial."""

    key: str  # data.train or data.eval
    seen: int  # rows that were read; ``rows`` contains the tested ones
    rows: list[TrialRow]
    wrong_truths: list[TrialRow]
    paid_empty: list[TrialRow]
    paid_others: list[TrialRow]
    tops: dict[str, float]  # by data source, the score that counts as correct; for functions only

    @property
    def tested_rows(self) -> list[TrialRow]:
        """Rows with a response that should be correct."""
        return [row for row in self.rows if row.truth is not None]

    @property
    def is_sound(self) -> bool:
        return not (self.wrong_truths or self.paid_empty or self.paid_others)

    @property
    def reads_nothing(self) -> bool:
        """Return whether no ground truth gets the full score."""
        return bool(self.tested_rows) and len(self.wrong_truths) == len(self.tested_rows)


def read_sample(
    data: DataConfig, name: str, limit: int, scan_s: float | None = None
) -> tuple[list[TrialRow], Counter[str]]:
    """Return up to ``limit`` evenly spaced rows of ``name`` (data.train or data.eval), and the number of rows read per data source.

    At most ``SCANNED_ROWS`` per file are read, for at most ``scan_s`` seconds.

    Raises:
        ConfigError: a file or a row cannot be read.
    """
    files: list[str] = getattr(data, name.partition(".")[2])
    deadline, transform = None if scan_s is None else time.monotonic() + scan_s, load_transform(data.transform)
    setting = settings_of(name)[1]
    rows: list[TrialRow] = []
    for file, (prompt_key, answer_key) in zip(files, file_keys(data, files, name), strict=True):
        for place, row in islice(transformed_rows(Path(file), data, transform), SCANNED_ROWS):
            if row is not None:
                truth = ground_truth(row, answer_key, place, setting)
                source, info = str(row.get("data_source") or "unknown"), mapping(row, "extra_info", place)
                content = row.get(prompt_key)
                prompt = Prompt(place, len(rows), [], _text(content), source, truth, extra_info=info)
                prompt.messages = content if isinstance(content, list) else None
                last = content[-1] if isinstance(content, list) and content else None
                rows.append(TrialRow(place, prompt, isinstance(last, dict) and last.get("role") == "assistant"))
            if deadline is not None and time.monotonic() > deadline:
                break
    chosen = np.linspace(0, len(rows) - 1, min(limit, len(rows))).astype(int).tolist()
    return [rows[index] for index in chosen], Counter(row.prompt.data_source for row in rows)


def _text(prompt: Any) -> str:
    """Return the prompt text that a judge sees, from a text or a list of messages. No chat template is applied."""
    if isinstance(prompt, list):
        return "\n".join(str(message.get("content", "")) for message in prompt if isinstance(message, dict))
    return prompt if isinstance(prompt, str) else ""


def trial_reward(cfg: RewardConfig, pools: Pools = local_pool) -> Graders:
    """Build a reward for a trial. A response without a result scores 0, and servers have less time.

    Raises:
        ConfigError: the reward cannot be built.
    """
    return build_reward(cfg.model_copy(update={"on_error": "zero"}), pools, longest_s=SERVER_S)


def try_reward(
    cfg: RewardConfig,
    rows: Sequence[TrialRow],
    name: str,
    seen: int,
    *,
    notations: Sequence[str] = NOTATIONS,
    others: bool = True,
    reward: Graders | None = None,
) -> TrialReport:
    """Score the ground truths of ``rows``, empty responses and, with ``others``, the answers of other rows.

    ``reward`` is a reward that ``trial_reward`` built from ``cfg``. This function closes it.

    With rules, a response is correct if every rule that compares with the ground truth grades it 1. With a function, it is
    correct if it gets the highest score of any ground truth of its data source, and more than an empty response.

    Raises:
        ConfigError: the reward cannot be built, gives no result for many responses in a row, or cannot read its tests.
    """
    _refuse_unreadable_tests(cfg, rows, name)
    with closing(reward or trial_reward(cfg)) as graders:
        written = [(row, text) for row in rows for text in right_responses(cfg, row.prompt, notations)]
        for (row, text), score in _score(graders, written):
            best = row.truth is None or _mark(cfg, row.prompt, score) > _mark(cfg, row.prompt, row.truth)
            if best and _is_testable(cfg, row.prompt):
                row.truth, row.truth_text = score, text
        for (row, _), score in _score(graders, [(row, "") for row in rows]):
            row.empty = score
        exchanged = [(row, other) for row in rows if others and (other := _other_answer(row, rows)) is not None]
        for (row, other), score in _score(graders, exchanged):
            row.other, row.other_text = score, other
    tops: dict[str, float] = {}  # by data source, the highest score of a ground truth
    for row in rows:
        if row.truth is not None:
            tops[row.prompt.data_source] = max(row.truth.value, tops.get(row.prompt.data_source, row.truth.value))

    def is_full(row: TrialRow, score: Score | None) -> bool:
        return score is not None and _is_full(cfg, row, score, tops.get(row.prompt.data_source, math.inf))

    return TrialReport(
        name,
        seen,
        list(rows),
        wrong_truths=[row for row in rows if row.truth is not None and not is_full(row, row.truth)],
        paid_empty=[row for row in rows if row.truth is not None and is_full(row, row.empty)],
        paid_others=[row for row in rows if is_full(row, row.other)],
        tops=tops if is_opaque(cfg) else {},
    )


def _refuse_unreadable_tests(cfg: RewardConfig, rows: Sequence[TrialRow], name: str) -> None:
    if scores_alone(cfg):
        return
    problems = []
    for row in [row for row in rows if any(rule.name == "code" for rule in _comparing(cfg, row.prompt))]:
        try:
            read_tests(row.prompt.ground_truth)
        except UNREADABLE as error:
            problems.append(f"{row.place}: {shorten(row.prompt.ground_truth)} ({error})")
    if problems:
        raise ConfigError(
            f"{len(problems)} of {len(rows)} tested rows of {name} have no tests that the reward rule code can read; the "
            f"first: {problems[0]}. Correct data.answer_key or the rows (docs/guide/rewards/code.md lists the formats), or "
            "choose another rule for their data source with reward.sources"
        )


def refuse_unknown_sources(cfg: RewardConfig, sources: Counter[str], name: str) -> None:
    """Reject data sources without rules, or with rules that this machine does not support. ``sources``: number of rows by source."""
    prompts = (Prompt("", 0, [], "", data_source=source) for source in sources.elements())
    check_sources(prompts, cfg.sources, name)
    if any(rule.name == "code" for source in sources for rule in rules_for(source, cfg.rules, cfg.sources)):
        require_isolation(cfg.sandbox.minimum)


def answered_text(rows: Sequence[TrialRow], name: str) -> str | None:
    """Return a warning if prompts already contain an answer, else None."""
    answered = [row for row in rows if row.is_answered]
    if not answered:
        return None
    return (
        f"{len(answered)} of {len(rows)} tested prompts of {name} end with the assistant's answer ({answered[0].place}), "
        "so the policy sees it; remove it, as `rlhf-mcore prepare-data` does"
    )


def shorten(value: Any) -> str:
    """Return a value as text for a message, at most 80 characters long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]}...{text[-1]}"


def _score(
    reward: RewardFunction, pairs: Sequence[tuple[TrialRow, str]]
) -> Iterator[tuple[tuple[TrialRow, str], Score]]:
    responses = [make_text_trajectory(row.prompt, text) for row, text in pairs]
    return zip(pairs, run(reward.score(responses)) if responses else [], strict=True)


def right_responses(cfg: RewardConfig, prompt: Prompt, notations: Sequence[str]) -> list[str]:
    """Return responses that give the ground truth as their answer, and the solutions of the row."""
    solutions = [str(prompt.extra_info[key]) for key in SOLUTIONS if prompt.extra_info.get(key)]
    if not scores_alone(cfg) and any(rule.name == "code" for rule in _comparing(cfg, prompt)):
        return solutions  # tests are not an answer
    if prompt.ground_truth is None or not str(prompt.ground_truth).strip():
        return solutions
    truth = prompt.ground_truth if isinstance(prompt.ground_truth, str) else json.dumps(prompt.ground_truth)
    return [*(notation.format(truth) for notation in notations), *solutions]


def _other_answer(row: TrialRow, rows: Sequence[TrialRow]) -> str | None:
    """Return the best text of another row from the same data source with a different ground truth, or None."""
    start = next(index for index, each in enumerate(rows) if each is row)
    for other in [*rows[start + 1 :], *rows[:start]]:
        same = canonical(str(other.prompt.ground_truth)) == canonical(str(row.prompt.ground_truth))
        if other.truth is not None and other.prompt.data_source == row.prompt.data_source and not same:
            return other.truth_text
    return None


def has_function(cfg: RewardConfig) -> bool:
    """Return whether the user's own functions give scores."""
    return cfg.function is not None or bool(cfg.functions)


def is_opaque(cfg: RewardConfig) -> bool:
    """Return whether a correct score cannot be known in advance, because there are no rules."""
    others = cfg.judge.url is not None or bool(cfg.functions)
    return scores_alone(cfg) or (others and cfg.sources is None and not cfg.rules)


def _comparing(cfg: RewardConfig, prompt: Prompt) -> list[RuleConfig]:
    return [rule for rule in rules_for(prompt.data_source, cfg.rules, cfg.sources) if needs_truth(rule)]


def _is_testable(cfg: RewardConfig, prompt: Prompt) -> bool:
    """Return whether a correct response can be constructed. This fails for ``regex``, and if no rule compares."""
    compared = _comparing(cfg, prompt)
    return is_opaque(cfg) or (bool(compared) and all(rule.name != "regex" for rule in compared))


def _mark(cfg: RewardConfig, prompt: Prompt, score: Score) -> tuple[float, float]:
    """Return a sort key for choosing the best response."""
    if is_opaque(cfg):
        return score.value, 0.0
    return sum(score.parts[rule.name] for rule in _comparing(cfg, prompt)), score.value


def _is_full(cfg: RewardConfig, row: TrialRow, score: Score, top: float) -> bool:
    if score.failure is not None:
        return False
    if not is_opaque(cfg):
        compared = _comparing(cfg, row.prompt)
        return bool(compared) and all(score.parts[rule.name] >= 1 for rule in compared)
    nothing = row.empty.value if row.empty is not None else 0.0
    return score.value >= top and (score.value > nothing or score is row.empty)
