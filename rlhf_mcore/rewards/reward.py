"""Rewards without a model: rule graders, the user's functions, a reward server or a judge."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Union

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import needs_truth, rules_for, rules_of
from rlhf_mcore.config.rules.reward import rule_problems, service_problems
from rlhf_mcore.config.schema import RewardConfig, RuleConfig, SandboxConfig
from rlhf_mcore.rewards.function import PooledReward, build_added_functions, build_function_reward
from rlhf_mcore.rewards.graders import Grader, build_grader, finds_answer
from rlhf_mcore.rewards.http_pool import ScorePool
from rlhf_mcore.rewards.judge import JudgePool
from rlhf_mcore.rewards.pool import Pools, local_pool
from rlhf_mcore.rewards.pooled_grader import PooledGrader, Verdict
from rlhf_mcore.types import Prompt, Score, Trajectory

if TYPE_CHECKING:
    from pathlib import Path

# Rewards without a model. They hold processes or threads until they are closed.
Graders = Union["RuleReward", "PooledReward", "SummedReward"]


@dataclass(slots=True)
class SummedReward:
    """Adds the grade of a judge or the score of a function, times ``weight``, to the score of other graders.

    A response has no score if one of the two gives none.
    """

    first: Graders
    added: Graders
    weight: float

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the sums of the scores of both graders, which score at the same time."""
        scores, added = await asyncio.gather(self.first.score(trajectories), self.added.score(trajectories))
        return [self._sum(*pair) for pair in zip(scores, added, strict=True)]

    def close(self) -> None:
        """Stop the threads and processes of both graders."""
        self.first.close()
        self.added.close()

    def _sum(self, score: Score, added: Score) -> Score:
        if score.failure is not None:
            return score
        if added.failure is not None:
            return replace(added, parts=score.parts, answered=score.answered)
        value = score.value + self.weight * added.value
        return replace(score, value=value, parts={**score.parts, **added.parts})


def build_reward(
    cfg: RewardConfig,
    pools: Pools = local_pool,
    *,
    validated: bool = False,
    images: Path | None = None,
    longest_s: float = math.inf,
) -> Graders:
    """Build the reward of ``cfg``: its rules, function or server, then added functions, and the judge.

    A reward model is built elsewhere.

    Args:
        pools: builds the worker pools, if any are needed.
        validated: whether ``cfg`` is part of a validated configuration.
        images: folder with the images of prompts, for a judge.
        longest_s: limit in seconds for a request to a server or a judge.

    Raises:
        ConfigError: a key of ``reward`` is wrong. The message names it.
    """
    if not validated and (problems := [*service_problems(cfg), *rule_problems(cfg)]):
        raise ConfigError.many(problems)
    graders: Graders
    if cfg.function is not None:
        graders = build_function_reward(cfg, pools)
    elif cfg.remote.url is not None:
        server = ScorePool("reward.remote", cfg.remote, batch_size=cfg.remote.batch_size, longest_s=longest_s)
        graders = PooledReward(server.name, server, cfg.on_error, with_prompt=True, from_server=True)
    else:
        graders = RuleReward(cfg.rules, cfg.workers, cfg.sources, cfg.sandbox, pools)
    for weight, function in build_added_functions(cfg, pools):
        graders = SummedReward(graders, function, weight)
    if cfg.judge.url is None:
        return graders
    pool = JudgePool(cfg.judge, longest_s)
    judge = PooledReward(pool.name, pool, cfg.on_error, with_prompt=True, images=images if cfg.judge.images else None)
    return SummedReward(graders, judge, cfg.judge.weight)


class RuleReward:
    """The weighted sum of rule graders. Each grade, in [0, 1], is a part of the score.

    A grade g adds weight · (incorrect + g · (correct - incorrect)).

    Args:
        rules: rules for every prompt, with unique names. Without rules, every score is 0.
        workers: processes for the rules ``math`` and ``code``; None: this rank's share of the cores.
        sources: rules by data source, instead of ``rules``. Well-known sources need no entry.
        sandbox: sandbox of the rule ``code``.

    Raises:
        ConfigError: a grader rejects an option, such as an invalid regular expression, or the machine lacks the required
        isolation.
    """

    def __init__(
        self,
        rules: Sequence[RuleConfig],
        workers: int | None = None,
        sources: Mapping[str, Sequence[RuleConfig]] | None = None,
        sandbox: SandboxConfig | None = None,
        pools: Pools = local_pool,
    ) -> None:
        self._rules, self._workers, self._sandbox = list(rules), workers, sandbox
        self._pools = pools
        self._sources = None if sources is None else dict(sources)
        self._graders: dict[str, Grader] = {}  # by rule name and options, so that data sources share processes
        for rule in [*rules, *(rule for table in (sources or {}).values() for rule in table)]:
            self._grader(rule)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return the scores of trajectories, in order. Graders with workers grade at the same time.

        Raises:
            ConfigError: a prompt's data source has no rules, or a prompt has no ground truth for a rule that compares with it.
        """
        check_sources([trajectory.prompt for trajectory in trajectories], self._sources, "the step")
        rules = [rules_for(trajectory.prompt.data_source, self._rules, self._sources) for trajectory in trajectories]
        rows_of: defaultdict[Grader, list[tuple[int, str]]] = defaultdict(list)
        for row, (trajectory, its_rules) in enumerate(zip(trajectories, rules, strict=True)):
            for rule in its_rules:
                if trajectory.prompt.ground_truth is None and needs_truth(rule):
                    raise ConfigError(
                        f"prompt {trajectory.prompt.prompt_id!r} has no ground truth, which reward rule {rule.name!r} requires; "
                        "name its column in data.answer_key, or use reward.function"
                    )
                rows_of[self._grader(rule)].append((row, rule.name))
        graded = await asyncio.gather(
            *(_grade(grader, [trajectories[row] for row, _ in rows]) for grader, rows in rows_of.items())
        )
        scores = [Score(0.0) for _ in trajectories]
        for rows, verdicts in zip(rows_of.values(), graded, strict=True):
            for (row, name), (grade, failure) in zip(rows, verdicts, strict=True):
                scores[row].parts[name] = grade
                scores[row].failure = scores[row].failure or failure
                scores[row].answered &= grade > 0 or finds_answer(name, trajectories[row].response_text)
        for score, its_rules in zip(scores, rules, strict=True):
            score.value = math.fsum(
                rule.weight * (rule.incorrect + score.parts[rule.name] * (rule.correct - rule.incorrect))
                for rule in its_rules
            )
        return scores

    def close(self) -> None:
        """Stop the worker processes."""
        for grader in self._graders.values():
            if isinstance(grader, PooledGrader):
                grader.close()

    def _grader(self, rule: RuleConfig) -> Grader:
        key = repr(rule.model_copy(update={"weight": 1.0, "correct": 1.0, "incorrect": 0.0}))
        if key not in self._graders:
            self._graders[key] = build_grader(rule, self._workers, self._sandbox, self._pools)
        return self._graders[key]


async def _grade(grader: Grader, trajectories: Sequence[Trajectory]) -> list[Verdict]:
    """Return the verdicts of responses. A verdict contains a cause if the workers gave no grade in time."""
    pairs = [(trajectory.response_text, trajectory.prompt.ground_truth) for trajectory in trajectories]
    if isinstance(grader, PooledGrader):
        return await grader.grade(pairs)
    return [(grader(*pair), None) for pair in pairs]


def check_sources(prompts: Iterable[Prompt], sources: Mapping[str, Sequence[RuleConfig]] | None, where: str) -> None:
    """Reject prompts from data sources without rules. Without a table of sources, accept all prompts.

    Raises:
        ConfigError: the message names each such source with its number of rows.
    """
    if sources is None:
        return
    counts = Counter(prompt.data_source for prompt in prompts)
    unknown = {source: count for source, count in counts.items() if rules_of(source, sources) is None}
    if unknown:
        shown = ", ".join(f"{source!r} ({count} rows)" for source, count in sorted(unknown.items())[:10])
        first = min(unknown)
        raise ConfigError(
            f"{where} has prompts from data sources without rules in reward.sources: {shown}. Add them to the table, "
            f"as in reward.sources: {{{first!r}: [{{name: math}}]}}; the entry '*' covers all other sources"
        )


def make_text_trajectory(prompt: Prompt, text: str) -> Trajectory:
    """Build a trajectory from a response text, which is all that graders read."""
    ids, mask, logprobs = np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32)
    return Trajectory(prompt, 0, ids, mask, logprobs, (), ((0, 0),), text, "stop")


def scoring_keys(cfg: RewardConfig) -> str:
    """Return the configuration keys that decide the score, for messages."""
    if cfg.function is not None:
        return f"reward.function={cfg.function}"
    if cfg.remote.url is not None:
        return f"reward.remote.url={cfg.remote.url}"
    if cfg.judge.url is not None and cfg.sources is None and not cfg.rules and not cfg.functions:
        return f"reward.judge.url={cfg.judge.url}"
    rules = ", ".join(rule.name if rule.weight == 1 else f"{rule.name} * {rule.weight:g}" for rule in cfg.rules)
    shown = [f"reward.rules=[{rules}]"] if cfg.rules or not cfg.functions else []
    if cfg.sources is not None:
        shown = ["reward.sources"]
    if cfg.functions:
        weighted = (f"{one.path} * {one.weight:g}" if one.weight != 1 else one.path for one in cfg.functions)
        shown.append(f"reward.functions=[{', '.join(weighted)}]")
    return " and ".join(shown)
