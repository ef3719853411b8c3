"""An environment is tried before a run: it is reset for some prompts, and hears nothing in the first turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import ASKING
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.episodes import row_of
from rlhf_mcore.environments.sessions import sessions_of

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import Config
    from rlhf_mcore.environments.sessions import Answer
    from rlhf_mcore.types import Prompt


def try_environment(cfg: Config, prompts: Sequence[Prompt]) -> list[tuple[str, str]]:
    """Try the environment for one turn of each prompt; returns (prompt, error) of each that has failed, in their order.

    Raises:
        ConfigError: the environment cannot be loaded, call after call is lost, or one gives no answer in time.
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
                    if answer.timed_out:  # with the others it may be the same, a timeout each
                        bound = "environment.timeout_s" if endpoint is None else "environment.agent.timeout_s"
                        raise ConfigError(
                            f"environment.function={cfg.environment.function} on {prompts[key].prompt_id}, in {method}: "
                            f"{error}; nothing more was tried. Correct it, or raise {bound}"
                        )
    finally:
        sessions.close_all()
    return [problems[key] for key in sorted(problems)]


def _end_problem(cfg: Config, answer: Answer, has_asked: bool) -> str:
    """Describe what is wrong with the end of an agent's episode, "" where it is well."""
    from rlhf_mcore.environments.agents.program import NO_TURN, missing_reward

    if not has_asked:
        return NO_TURN
    return missing_reward(answer.messages) if cfg.environment.score != "reward" else ""
