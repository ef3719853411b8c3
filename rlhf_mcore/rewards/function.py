"""A reward function in a file of the user's, called in worker processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.rewards.pool import Outcome, WorkerLimits, WorkerPool, default_workers
from rlhf_mcore.types import Score, Trajectory

KEY = "reward.function"


class FunctionReward:
    """A function, called as ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``.

    Arguments go by keyword if the function has parameters of these four names, so that their order does not matter;
    else by position. They travel as JSON. A dict needs the key "score"; its other numeric entries become parts of the score,
    the rest is ignored.

    Args:
        cfg: with ``function`` set to ``path/to/file.py:name``.

    Raises:
        ConfigError: naming ``reward.function``: the file or the name is missing, the file fails to import, or the function
            does not take the four arguments.
    """

    def __init__(self, cfg: RewardConfig) -> None:
        assert cfg.function is not None
        self._spec, self._on_error = cfg.function, cfg.on_error
        limits = WorkerLimits(cfg.workers or default_workers(), cfg.timeout_s, cfg.memory_gib, tuple(cfg.env))
        self._pool = WorkerPool(f"{KEY}={self._spec}", "reward", {"spec": self._spec, "key": KEY}, limits)
        self._pool.check()

    def submit(self, trajectories: Sequence[Trajectory]) -> Callable[[], list[Score]]:
        """Begin, in the workers; what is returned waits for the scores.

        With ``reward.on_error: zero`` a trajectory without a result has score 0 and a failure.

        Raises:
            ConfigError: the function raised, gave no result in time or none at all, or returned something other than a finite
                number or a dict with one; the message names the function, the prompt, the sample and the cause. With
                ``on_error: zero`` only where response after response gets no result.
        """
        job = self._pool.submit([self._item(each) for each in trajectories], stop_at_failure=self._on_error == "fail")
        return lambda: self._scores(trajectories, job.outcomes())

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """``submit``, and wait."""
        return self.submit(trajectories)()

    def _scores(self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome | None]) -> list[Score]:
        scores, problems = [], []
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            cause = "" if outcome is None else outcome.lost or outcome.answer.get("error", "")
            if cause:
                problems.append(f"{KEY}={self._spec} on {_place(trajectory)} {cause}")
                kind = "timeout" if outcome and outcome.timed_out else "error"
                scores.append(Score(0.0, failure=kind, cause=problems[-1]))
            elif outcome is not None:
                scores.append(Score(outcome.answer["score"], outcome.answer["parts"]))
        if problems and self._on_error == "fail":
            raise ConfigError(f"{problems[0]}. Correct it, or set reward.on_error=zero to score such a response 0")
        return scores

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _item(self, trajectory: Trajectory) -> bytes:
        prompt = trajectory.prompt
        arguments = [prompt.data_source, trajectory.response_text, prompt.ground_truth, prompt.extra_info]
        name = f"{prompt.prompt_id}\0{trajectory.sample}\0{trajectory.policy_version}"
        seed = int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=4).digest(), "big")
        try:
            return json.dumps({"arguments": arguments, "seed": seed}, default=_plain).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{KEY}={self._spec} is given ground_truth and extra_info as JSON, and those of {_place(trajectory)} are not: "
                f"{error}. Store such values as texts or numbers"
            ) from error


def _place(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt.prompt_id!r}, sample {trajectory.sample},"


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy as lists and numbers; they are what parquet files hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}")
