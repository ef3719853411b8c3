"""Try an environment before a run, and format the scores of right and wrong answers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mcore.cli.terminal import aligned
from rlhf_mcore.config.choices import ASKING
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.agents.program import NO_TURN, missing_reward
from rlhf_mcore.environments.episodes import row_of
from rlhf_mcore.environments.sessions import sessions_of
from rlhf_mcore.rewards.trial import TrialReport, TrialRow, answered_text, shorten

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.environments.sessions import StepResult
    from rlhf_mcore.types import Prompt


def as_text(report: TrialReport, shown: int = 10) -> str:
    """Return a table of the data sources, followed by the first disagreements."""
    table: list[tuple[str, ...]] = [("data source", "rows", "truth right", "empty right", "others right", "no score")]
    for source in sorted({row.prompt.data_source for row in report.rows}):
        all_rows, tried, wrong, empty, others = (
            [row for row in rows if row.prompt.data_source == source]
            for rows in (report.rows, report.tested_rows, report.wrong_truths, report.paid_empty, report.paid_others)
        )
        scores = [score for row in all_rows for score in (row.truth, row.empty, row.other) if score is not None]
        right = f"{len(tried) - len(wrong)} of {len(tried)}" if tried else "not known"
        without = sum(score.failure is not None for score in scores)
        table.append((source, *map(str, (len(all_rows), right, len(empty), len(others), without))))
    lines = [f"{report.key}: {len(report.rows)} of {report.seen} rows", "", *aligned(table)]
    if warning := answered_text(report.rows, report.key):
        lines += ["", f"warning: {warning}"]
    if report.tops and not report.is_sound:
        tops = ", ".join(f"{top:g}" + f" ({source})" * (len(report.tops) > 1) for source, top in report.tops.items())
        lines += ["", f"right means the highest score of any ground truth: {tops}"]
    lines += _disagreements("ground truths that are not right", report.wrong_truths, "truth", shown)
    lines += _disagreements("empty responses that are right", report.paid_empty, "empty", shown)
    lines += _disagreements("answers of other rows that are right", report.paid_others, "other", shown)
    return "\n".join(lines)


def _disagreements(title: str, rows: Sequence[TrialRow], kind: str, shown: int) -> Iterator[str]:
    if rows:
        yield f"\n{title} ({len(rows)}):"
    problems: list[tuple[str, str, str]] = []
    for row in rows:
        score = getattr(row, kind)
        said = "" if kind == "empty" else f", response {shorten(getattr(row, f'{kind}_text'))}"
        parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
        cause, error = "", ""
        if score.failure:
            cause = f" ({score.cause or score.failure})"
            error = cause.replace(repr(row.prompt.prompt_id), "")
        text = f"ground truth {shorten(row.prompt.ground_truth)}{said}: {score.value:g}{parts}{cause}"
        problems.append((row.place, text, error))
    lines = once_each(problems)
    yield from (f"  {line}" for _, line in lines[:shown])
    if rest := sum(count for count, _ in lines[shown:]):
        yield f"  and {rest} more"


def once_each(problems: Iterable[tuple[str, str, str]]) -> list[tuple[int, str]]:
    """Return (number of rows, line) for each problem. Rows with the same error share one line, which names the first row.

    ``problems``: for each row its place, a text, and the error that other rows may share ("": no such error).
    """
    groups: dict[str | int, list[tuple[str, str]]] = {}
    for number, (place, text, error) in enumerate(problems):
        groups.setdefault(error or number, []).append((place, text))
    return [
        (len(rows), f"{f'{len(rows)} rows, the first is ' if len(rows) > 1 else ''}{rows[0][0]}: {rows[0][1]}")
        for rows in groups.values()
    ]


# -------------------------------------------------------------------------------------------------------- environment
def try_environment(cfg: Config, prompts: Sequence[Prompt]) -> list[tuple[str, str]]:
    """Try the environment for one turn of each prompt. Returns (prompt id, error) for each failed prompt, in order.

    Raises:
        ConfigError: the environment cannot be loaded, its process dies repeatedly, or a call does not answer in time.
    """
    silent: Any = "" if cfg.environment.tool_parser is None else {"content": "", "tool_calls": []}
    sessions, under_way = sessions_of(cfg.environment, 1, os.getcwd()), set(range(len(prompts)))
    endpoint, asked = None, set[int]()
    if cfg.environment.function in ASKING:
        from rlhf_mcore.environments.agents.endpoint import Endpoint

        endpoint = Endpoint(cfg.environment.agent.host)
        sessions.wake = endpoint.wake
    problems: dict[int, tuple[str, str]] = {}
    try:
        for key, prompt in enumerate(prompts):
            messages = prompt.messages or [{"role": "user", "content": prompt.text}]
            told = {} if endpoint is None else {"messages": messages, "seed": cfg.seed}  # agents get more
            sessions.open(key, {**row_of(prompt), **told}, seed=cfg.seed)
        for method in ("reset", "step"):
            if method == "step":
                for key in under_way:
                    if endpoint is not None:
                        silent = {"base_url": endpoint.url, "api_key": endpoint.open(key)}
                    sessions.step(key, silent)
            while sessions.num_calls:
                if endpoint is not None:
                    asked |= endpoint.answer_nothing(calls_tools=cfg.environment.tool_parser is not None)
                for key, answer in sessions.poll(None):
                    error = answer.error
                    if endpoint is not None and method == "step":
                        error = error or _end_problem(cfg, answer, key in asked)
                    if error:
                        under_way.discard(key)
                        problems[key] = prompts[key].prompt_id, f"in {method}: {error}"
                    if answer.timed_out:  # the other prompts may also time out, so stop here
                        bound = "environment.timeout_s" if endpoint is None else "environment.agent.timeout_s"
                        raise ConfigError(
                            f"environment.function={cfg.environment.function} on {prompts[key].prompt_id}, in {method}: "
                            f"{error}; the other prompts were not tried. Correct the environment, or raise {bound}"
                        )
    finally:
        sessions.close_all()
    return [problems[key] for key in sorted(problems)]


def _end_problem(cfg: Config, answer: StepResult, has_asked: bool) -> str:
    """Return the problem at the end of an agent's episode, or "" if there is none."""
    if not has_asked:
        return NO_TURN
    return missing_reward(answer.messages) if cfg.environment.score != "reward" else ""
