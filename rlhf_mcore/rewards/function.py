"""Rewards that are given outside of the trainer: a function of the user's in worker processes, or a server."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import GRADERS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.reward_sources import function_name
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.rewards.pool import (
    Collect,
    Outcome,
    Pool,
    Pools,
    WorkerLimits,
    default_workers,
    encode_item,
    local_pool,
)
from rlhf_mcore.rewards.user_function import BatchCall, load_reward
from rlhf_mcore.types import Score, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

    from rlhf_mcore.rewards.worker import Call

KEY = "reward.function"
PART = "function."  # begins the names of the parts that functions beside rules are


class InProcessPool:
    """A function that was given from Python: called in this process, in a thread beside the one that generates.

    It has no deadline and no limit of memory: a function that hangs, hangs the run.
    """

    def __init__(self, call: Call) -> None:
        self._call, self._thread = call, ThreadPoolExecutor(1, "reward")

    def submit(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> Collect:
        calls = [self._thread.submit(self._call, json.loads(item)) for item in items]
        return lambda: [Outcome(call.result()) for call in calls]

    def close(self) -> None:
        """Wait for running calls."""
        self._thread.shutdown(cancel_futures=True)


class PooledReward:
    """Scores what the pool answers: ``{"score", "parts"}`` or ``{"error"}`` for each item.

    Args:
        name: what gives the scores, for messages.
        on_error: as ``reward.on_error``.
        with_prompt: whether items have the prompt's text.
        batched: the items of a call are one item of the pool.
        part: as which the score is a part of itself, and what its own parts are called after.
        images: folder of files by digests, of which items name those of their prompt.
        from_server: a server scores, whose parts may be grades of rules.
    """

    def __init__(
        self,
        name: str,
        pool: Pool,
        on_error: str,
        *,
        with_prompt: bool = False,
        batched: bool = False,
        part: str | None = None,
        images: Path | None = None,
        from_server: bool = False,
    ) -> None:
        self._from_server = from_server
        self._name, self._pool, self._on_error, self._with_prompt = name, pool, on_error, with_prompt
        self._batched, self._part, self._images = batched, part, images

    def submit(self, trajectories: Sequence[Trajectory]) -> Callable[[], list[Score]]:
        """Begin; what is returned waits for the scores.

        Unless ``reward.on_error`` is "fail", a trajectory without a result has score 0 and a failure.

        Raises:
            ConfigError: it raised, gave no result in time or none at all, or returned something other than a finite
                number or a dict with one; the message names it, the prompt, the sample and the cause. Unless ``on_error`` is "fail",
                only if response after response gets no result.
        """
        items = [self._item(each) for each in trajectories]
        if self._batched and items:
            items = [b'{"batch": [' + b", ".join(items) + b"]}"]
        collect = self._pool.submit(items, stop_at_failure=self._on_error == "fail")
        return lambda: self._scores(trajectories, self._each(collect(), len(trajectories)))

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Submit, and wait."""
        return self.submit(trajectories)()

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _each(self, outcomes: list[Outcome | None], number: int) -> list[Outcome | None]:
        """Return an outcome for each of ``number`` responses. A batch without results is each response's."""
        if not self._batched or not outcomes:
            return outcomes
        whole = outcomes[0]
        if whole is None or "results" not in whole.answer:
            return [whole] * number
        return [Outcome(answer) for answer in whole.answer["results"]]

    def _parts(self, answer: Mapping[str, Any]) -> dict[str, float]:
        if self._part is None:
            # A rule's grade decides whether a response is correct, and grades are known by the names of rules.
            names = {
                name: f"{PART}{name}" if name in GRADERS and not self._from_server else name for name in answer["parts"]
            }
            return {names[name]: value for name, value in answer["parts"].items()}
        own = {self._part: answer["score"]} if answer.get("applies", True) else {}
        return own | {f"{self._part}.{name}": value for name, value in answer["parts"].items()}

    def _scores(self, trajectories: Sequence[Trajectory], outcomes: Sequence[Outcome | None]) -> list[Score]:
        scores, problems = [], []
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if outcome is None:
                continue
            if outcome.problem:
                problems.append(f"{self._name} on {_place(trajectory)} {outcome.problem}")
                kind = "timeout" if outcome.timed_out else "error"
                scores.append(Score(0.0, failure=kind, cause=problems[-1]))
            else:
                scores.append(Score(outcome.answer["score"], self._parts(outcome.answer)))
        if problems and self._on_error == "fail":
            raise ConfigError(f"{problems[0]}. Correct it, or set reward.on_error=zero to score such a response 0")
        return scores

    def _item(self, trajectory: Trajectory) -> bytes:
        prompt = trajectory.prompt
        name = f"{prompt.prompt_id}\0{trajectory.sample}\0{trajectory.policy_version}"
        item = {
            "data_source": prompt.data_source,
            "solution_str": trajectory.response_text,
            "ground_truth": prompt.ground_truth,
            "extra_info": prompt.extra_info,
            "seed": int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=4).digest(), "big"),
        }
        if self._with_prompt or self._batched:
            item["prompt"] = prompt.text
        if self._images is not None and prompt.images:
            item["images"] = [str(self._images / digest) for digest in prompt.images]
        if self._batched:
            item["messages"] = prompt.messages
            item["completion_ids"], item["policy_version"] = trajectory.sampled_ids.tolist(), trajectory.policy_version
        try:
            return encode_item(item)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"{self._name} is given ground_truth and extra_info as JSON, and those of {_place(trajectory)} are not: "
                f"{error}. Store such values as texts or numbers"
            ) from error


def build_function_reward(cfg: RewardConfig, pools: Pools = local_pool) -> PooledReward:
    """Build the reward of a function.

    It is called as ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``, or for a batch.

    Arguments go by keyword if the function has parameters of these four names, so that their order does not matter;
    else by position. They travel as JSON. A dict needs the key "score"; its other numeric entries become parts of the score,
    the rest is ignored. A function with a parameter ``completions`` scores a batch at once: see ``user_function``.

    Args:
        cfg: with ``function`` set to ``path/to/file.py:name``.
        pools: makes its workers.

    Raises:
        ConfigError: naming ``reward.function``: the file or the name is missing, the file fails to import, or the function
            does not take the four arguments.
    """
    assert cfg.function is not None
    return _pooled_reward(cfg, cfg.function, KEY, None, pools)


def build_added_functions(cfg: RewardConfig, pools: Pools = local_pool) -> list[tuple[float, PooledReward]]:
    """Build the rewards of ``reward.functions``, each with its weight.

    Raises:
        ConfigError: as ``build_function_reward``, naming the entry.
    """
    return [
        (
            one.weight,
            _pooled_reward(cfg, one.path, f"reward.functions[{number}].path", PART + function_name(one), pools),
        )
        for number, one in enumerate(cfg.functions)
    ]


def _pooled_reward(cfg: RewardConfig, spec: str, key: str, part: str | None, pools: Pools) -> PooledReward:
    name = f"{key}={spec}"
    if isinstance(spec, OwnFunction):
        call = load_reward(spec, key)
        return PooledReward(name, InProcessPool(call), cfg.on_error, batched=isinstance(call, BatchCall), part=part)
    limits = WorkerLimits(cfg.workers or default_workers(), cfg.timeout_s, cfg.memory_gib, tuple(cfg.env))
    pool = pools(name, "reward", {"spec": spec, "key": key}, limits)
    return PooledReward(name, pool, cfg.on_error, batched=bool(pool.check().get("batched")), part=part)


def _place(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt.prompt_id!r}, sample {trajectory.sample},"
