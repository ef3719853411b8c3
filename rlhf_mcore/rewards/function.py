"""Rewards from outside the trainer: the user's function in worker processes, or a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.choices import GRADERS
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import function_name
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.readers.user_functions import OwnFunction
from rlhf_mcore.rewards.pool import (
    BackgroundPool,
    Outcome,
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
PART = "function."  # prefix of the part names of functions that are combined with rules


class InProcessPool(BackgroundPool):
    """Calls a function that was passed from Python.

    There is no deadline and no memory limit. If the function hangs, the run hangs.
    """

    def __init__(self, name: str, call: Call) -> None:
        super().__init__(name)
        self._call, self._thread = call, ThreadPoolExecutor(1, "reward")  # a thread without an event loop
        self._background.resources.callback(self._thread.shutdown)

    async def _answer(self, items: Sequence[bytes], stop_at_failure: bool) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        return [Outcome(await loop.run_in_executor(self._thread, self._call, json.loads(item))) for item in items]


class PooledReward:
    """Converts the pool's answers into scores. Each answer is ``{"score", "parts"}`` or ``{"error"}``.

    Args:
        name: source of the scores, for messages.
        on_error: value of ``reward.on_error``.
        with_prompt: whether items contain the prompt text.
        batched: whether one pool item contains all items of a call.
        part: part name under which the score is recorded, and prefix for the names of its own parts; None: neither.
        images: folder with image files named by digest. Items name the files of their prompt.
        from_server: whether a server scores. Its parts may be grades of rules.
    """

    def __init__(
        self,
        name: str,
        pool: BackgroundPool,
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

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories, in order.

        Unless ``reward.on_error`` is "fail", a trajectory without a result gets score 0 and a failure.

        Raises:
            ConfigError: the scorer raised, gave no result (in time), or returned something other than a finite number or a
                dict with one. The message names the scorer, the prompt, the sample and the cause. Unless ``on_error`` is
                "fail", this is raised only if many responses in a row get no result.
        """
        items = [self._item(each) for each in trajectories]
        if self._batched and items:
            items = [b'{"batch": [' + b", ".join(items) + b"]}"]
        outcomes = await self._pool.answer_all(items, stop_at_failure=self._on_error == "fail")
        return self._scores(trajectories, self._each(outcomes, len(trajectories)))

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()

    def _each(self, outcomes: list[Outcome | None], number: int) -> list[Outcome | None]:
        """Return an outcome for each of ``number`` responses. If a batch has no results, each response gets its outcome."""
        if not self._batched or not outcomes:
            return outcomes
        whole = outcomes[0]
        if whole is None or "results" not in whole.answer:
            return [whole] * number
        return [Outcome(answer) for answer in whole.answer["results"]]

    def _parts(self, answer: Mapping[str, Any]) -> dict[str, float]:
        if self._part is None:
            # Rule grades decide whether a response is correct, and are found by rule names. Rename parts that would clash.
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
                f"{self._name}: ground_truth and extra_info of {_place(trajectory)} cannot be written as JSON: "
                f"{error}. Store such values as strings or numbers"
            ) from error


def build_function_reward(cfg: RewardConfig, pools: Pools = local_pool) -> PooledReward:
    """Build the reward for ``reward.function``.

    The function is called as ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``, or for a batch.

    If the function has parameters with these four names, arguments are passed by keyword, so their order does not matter.
    Otherwise they are passed by position. Arguments are sent as JSON. A dict needs the key "score". Its other numeric entries
    become parts of the score, and the rest is ignored. A function with a parameter ``completions`` scores a batch at once; see
    ``user_function``.

    Args:
        cfg: a configuration with ``function`` set to ``path/to/file.py:name``.
        pools: builds the worker pools.

    Raises:
        ConfigError: the file or the name is missing, the file fails to import, or the function does not take the four
            arguments. The message names ``reward.function``.
    """
    assert cfg.function is not None
    return _pooled_reward(cfg, cfg.function, KEY, None, pools)


def build_added_functions(cfg: RewardConfig, pools: Pools = local_pool) -> list[tuple[float, PooledReward]]:
    """Build the rewards for ``reward.functions``, each with its weight.

    Raises:
        ConfigError: see ``build_function_reward``; the message names the entry.
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
        return PooledReward(
            name, InProcessPool(name, call), cfg.on_error, batched=isinstance(call, BatchCall), part=part
        )
    limits = WorkerLimits(cfg.workers or default_workers(), cfg.timeout_s, cfg.memory_gib, tuple(cfg.env))
    pool = pools(name, "reward", {"spec": spec, "key": key}, limits)
    return PooledReward(name, pool, cfg.on_error, batched=bool(pool.check().get("batched")), part=part)


def _place(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt.prompt_id!r}, sample {trajectory.sample},"
