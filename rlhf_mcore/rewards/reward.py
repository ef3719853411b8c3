"""Rewards without a model: a weighted sum of rule graders, or a function from a user's file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig, RuleConfig
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.rewards.function import FunctionReward
from rlhf_mcore.rewards.graders import GRADERS, MathGrader
from rlhf_mcore.types import Score, Trajectory

_NEEDS_NO_TRUTH = {"format"}


def build_reward(cfg: RewardConfig) -> RewardFunction:
    """The rules or the function that ``cfg`` asks for; a function replaces the rules. A reward model is not part of it.

    Raises:
        ConfigError: naming ``reward.rules`` or ``reward.function``.
    """
    if cfg.function is not None:
        return FunctionReward(cfg)
    if not cfg.rules and cfg.model.path is None:
        raise ConfigError(f"reward.rules is empty and so is reward.function: name a rule ({', '.join(GRADERS)})")
    return RuleReward(cfg.rules, cfg.workers)


class RuleReward:
    """The weighted sum of rule graders, the same ones for every prompt. Each grade, in [0, 1], is a part of the score.

    A grade g counts as weight · (incorrect + g · (correct - incorrect)).

    Args:
        rules: each name once; none: every score is 0.
        workers: processes for the rule ``math``; None: this rank's share of the cores.

    Raises:
        ConfigError: an unknown or repeated name, or a number that is not finite.
    """

    def __init__(self, rules: Sequence[RuleConfig], workers: int | None = None) -> None:
        problems = [problem for index, rule in enumerate(rules) if (problem := _rule_problem(index, rule, rules))]
        if problems:
            raise ConfigError.many(problems)
        self._rules, self._math = list(rules), MathGrader(workers)
        self._needs_truth = [rule.name for rule in rules if rule.name not in _NEEDS_NO_TRUTH]

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order.

        Raises:
            ConfigError: a prompt without a ground truth where a rule compares with it; all such rewards would be 0.
        """
        for prompt in (trajectory.prompt for trajectory in trajectories):
            if prompt.ground_truth is None and self._needs_truth:
                raise ConfigError(
                    f"prompt {prompt.prompt_id!r} has no ground truth, which reward rule {self._needs_truth[0]!r} "
                    "compares with: name its column in data.answer_key, or use reward.function"
                )
        pairs = [(trajectory.response_text, trajectory.prompt.ground_truth) for trajectory in trajectories]
        grades: dict[str, Sequence[tuple[float, str | None]]] = {}
        for rule in self._rules:
            if rule.name == "math":  # some of which is not judged in time
                grades[rule.name] = self._math.grade(pairs)
            else:
                grades[rule.name] = [(GRADERS[rule.name](response, truth), None) for response, truth in pairs]
        scores = []
        for row in range(len(pairs)):
            parts = {name: column[row][0] for name, column in grades.items()}
            failure = next((column[row][1] for column in grades.values() if column[row][1] is not None), None)
            points = (
                rule.weight * (rule.incorrect + parts[rule.name] * (rule.correct - rule.incorrect))
                for rule in self._rules
            )
            scores.append(Score(math.fsum(points), parts, failure))
        return scores


def _rule_problem(index: int, rule: RuleConfig, rules: Sequence[RuleConfig]) -> str | None:
    name = rule.name
    if name not in GRADERS:
        nearest = get_close_matches(name, GRADERS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        return f"reward.rules[{index}].name is {name!r}, which is no rule: {hint}known are {', '.join(GRADERS)}"
    for key in ("weight", "correct", "incorrect"):
        if not math.isfinite(getattr(rule, key)):
            return f"reward.rules[{index}].{key} is {getattr(rule, key)}: use a finite number"
    if any(name == earlier.name for earlier in rules[:index]):
        return f"reward.rules[{index}].name is {name!r} for the second time: add up the weights in one rule"
    return None
