"""``rlhf-mcore reward-test CONFIG``: check that the reward gives full marks to ground truths only. Needs no model."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import align_columns, say, working
from rlhf_mcore.config.choices import ASKING, ROLLOUT, run_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.questions import grades, scores_alone
from rlhf_mcore.config.rules.data import prompt_problems
from rlhf_mcore.config.rules.environment import environment_problems
from rlhf_mcore.config.rules.reward import reward_problems
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.validate import warnings_of
from rlhf_mcore.coroutines import run
from rlhf_mcore.environments.agents.program import NO_TURN, missing_reward
from rlhf_mcore.environments.sessions import Session, StepResult, check_loads, sessions_of, worker_settings
from rlhf_mcore.readers.hub import DATA_KEYS, localize

if TYPE_CHECKING:  # these modules import torch or aiohttp
    from rlhf_mcore.environments.agents.endpoint import Endpoint
    from rlhf_mcore.rewards.trial import TrialReport, TrialRow
    from rlhf_mcore.types import Prompt

EPISODES = 8  # number of episodes of the environment, for each of data.train and data.eval
SHOWN = 10  # number of lines per kind of disagreement
EPILOG = """\
exit codes:
  0          ground truths score full marks, empty responses and answers of other rows do not; the environment works
  2          there are disagreements, or an error in the configuration, the command line or the data"""


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Test the reward and print the reports. Returns the exit code."""
    args = _parser().parse_intermixed_args(argv)
    if args.limit < 1:
        _parser().error(f"--limit {args.limit} is out of range; it must be at least 1")
    cfg = load_config(args.config, args.overrides, without_model=True)
    localize(cfg, DATA_KEYS)
    if not run_kind(cfg).generates:
        raise ConfigError(
            f"algorithm.kind={cfg.algorithm.kind} has no reward; reward-test is for reinforcement learning"
        )
    if problems := [*environment_problems(cfg), *reward_problems(cfg), *prompt_problems(cfg)]:
        raise ConfigError.many(problems)
    return _try(cfg, args.limit)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore reward-test",
        "Score the ground truths in data.train and data.eval as if they were responses, in the notations that models use. Then score "
        "empty responses and the answers of other rows. Ground truths must get full marks, the others must not. Every disagreement is "
        "printed. If the run has an environment, reset it for some rows and take one empty turn. No model is loaded.",
        examples=[
            "rlhf-mcore reward-test configs/quickstart/grpo.yaml",
            "rlhf-mcore reward-test my_run.yaml reward.function=examples/own_reward.py:grade --limit 200",
        ],
        exits=EPILOG,
        config="YAML file of the training run",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=50,
        metavar="N",
        help="number of rows from each of data.train and data.eval (default: 50)",
    )
    return parser


def _try(cfg: Config, limit: int) -> int:
    from rlhf_mcore.rewards.reward import scoring_keys
    from rlhf_mcore.rewards.trial import read_sample, refuse_unknown_sources, try_reward

    reports, failed, episodes = [], list[tuple[str, str]](), 0
    with working("trying the reward on rows of") as begin:
        for name, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
            if not files:
                continue
            begin(name)
            rows, sources = read_sample(cfg.data, name, limit)
            if cfg.environment.function is not None:
                prompts = [row.prompt for row in rows[:EPISODES]]
                failed, episodes = failed + try_environment(cfg, prompts), episodes + len(prompts)
            if not grades(cfg):
                continue
            if not scores_alone(cfg.reward):
                refuse_unknown_sources(cfg.reward, sources, name)
            reports.append(try_reward(cfg.reward, rows, name, sources.total()))
    texts = [*map(as_text, reports)]
    if cfg.environment.function is not None:
        named = f"environment.function={cfg.environment.function}"
        if cfg.rollout.function is not None:
            named = f"rollout.function={cfg.rollout.function}"
        begun = f"{named}: {episodes} episodes with one empty turn"
        lines = [line for _, line in _once_each([(place, error, error) for place, error in failed])]
        texts.append("\n".join([f"{begun}, {len(failed)} failed", *lines]))
    texts += [f"warning: {warning}" for warning in warnings_of(cfg)]
    say("\n\n".join(texts))
    if failed:
        say("\nthe environment fails, see above", file=sys.stderr)
        return terminal.USER_ERROR
    if all(report.is_sound for report in reports):
        return terminal.DONE
    say(f"\n{scoring_keys(cfg.reward)} does not agree with the data, see above", file=sys.stderr)
    return terminal.USER_ERROR


def as_text(report: TrialReport) -> str:
    """Return a table of the data sources, followed by the first disagreements."""
    from rlhf_mcore.rewards.trial import answered_text

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
    lines = [f"{report.key}: {len(report.rows)} of {report.seen} rows", "", *align_columns(table)]
    if warning := answered_text(report.rows, report.key):
        lines += ["", f"warning: {warning}"]
    if report.tops and not report.is_sound:
        tops = ", ".join(f"{top:g}" + f" ({source})" * (len(report.tops) > 1) for source, top in report.tops.items())
        lines += ["", f"right means the highest score of any ground truth: {tops}"]
    lines += _disagreements("ground truths that are not right", report.wrong_truths, "truth")
    lines += _disagreements("empty responses that are right", report.paid_empty, "empty")
    lines += _disagreements("answers of other rows that are right", report.paid_others, "other")
    return "\n".join(lines)


def _disagreements(title: str, rows: Sequence[TrialRow], kind: str) -> Iterator[str]:
    from rlhf_mcore.rewards.trial import shorten

    if rows:
        yield f"\n{title} ({len(rows)}):"
    problems = []
    for row in rows:
        score = getattr(row, kind)
        said = "" if kind == "empty" else f", response {shorten(getattr(row, f'{kind}_text'))}"
        parts = "".join(f", {name} {value:g}" for name, value in score.parts.items())
        cause = f" ({score.cause or score.failure})" if score.failure else ""
        text = f"ground truth {shorten(row.prompt.ground_truth)}{said}: {score.value:g}{parts}{cause}"
        problems.append((row.place, text, cause.replace(repr(row.prompt.prompt_id), "")))
    lines = _once_each(problems)
    yield from (f"  {line}" for _, line in lines[:SHOWN])
    if rest := sum(count for count, _ in lines[SHOWN:]):
        yield f"  and {rest} more"


def _once_each(problems: Sequence[tuple[str, str, str]]) -> list[tuple[int, str]]:
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
    from rlhf_mcore.environments.environment import row_of

    is_function, endpoint = cfg.environment.function == ROLLOUT, None
    if is_function and cfg.model.path == "none":  # the function needs a tokenizer
        check_loads(worker_settings(cfg, loads_only=True))
        return []
    sessions = sessions_of(worker_settings(cfg), 1, os.getcwd())
    if cfg.environment.function in ASKING:
        from rlhf_mcore.environments.agents.endpoint import Endpoint

        endpoint = Endpoint(cfg.environment.agent.host)

    async def try_prompt(prompt: Prompt) -> str:
        """Return the error of a prompt, or ""."""
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        told: dict[str, Any] = {} if endpoint is None else {"messages": messages, "seed": cfg.seed}  # agents get more
        if is_function:
            told = {"messages": messages, "tokens": [], "images": []}
        session = sessions.open({**row_of(prompt), **told}, cfg.seed)
        try:
            method, answer = "reset", await session.reset()
            if not answer.error:
                method, answer = "step", await _try_turn(cfg, session, endpoint)
        finally:
            session.close()
        error = f"in {method}: {answer.error}" if answer.error else ""
        if answer.timed_out:  # the other prompts may also time out, so stop here
            bound = "environment.timeout_s" if endpoint is None else "environment.agent.timeout_s"
            raise ConfigError(
                f"environment.function={cfg.environment.function} on {prompt.prompt_id}, {error}; the other prompts were not "
                f"tried. Correct the environment, or raise {bound}"
            )
        return error

    async def try_all() -> list[str]:
        return await asyncio.gather(*map(try_prompt, prompts))

    try:
        errors = run(try_all())
    finally:
        sessions.close_all()
    return [(prompt.prompt_id, error) for prompt, error in zip(prompts, errors, strict=True) if error]


async def _try_turn(cfg: Config, session: Session, endpoint: Endpoint | None) -> StepResult:
    """Return the answer to an empty turn, or the end of an agent or a function whose requests get empty turns."""
    if cfg.environment.function == ROLLOUT:
        answer, silent = await session.step([]), {"tokens": [], "text": "", "logprobs": [], "finish_reason": "length"}
        for _ in range(cfg.environment.max_turns):
            if not (answer.done or answer.error):
                answer = await session.step([silent for _ in answer.messages])
        return answer
    if endpoint is None:
        return await session.step("" if cfg.environment.tool_parser is None else {"content": "", "tool_calls": []})
    from rlhf_mcore.environments.agents.endpoint import SilentEpisode

    episode = SilentEpisode(calls_tools=cfg.environment.tool_parser is not None)
    api_key = endpoint.open(episode)
    try:
        answer = await session.step({"base_url": endpoint.url, "api_key": api_key})
    finally:
        endpoint.close(api_key)
    return replace(answer, error=answer.error or _end_problem(cfg, answer, episode.was_asked))


def _end_problem(cfg: Config, answer: StepResult, has_asked: bool) -> str:
    """Return the problem at the end of an agent's episode, or "" if there is none."""
    if not has_asked:
        return NO_TURN
    return missing_reward(answer.messages) if cfg.environment.score != "reward" else ""
