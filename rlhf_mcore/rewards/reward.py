"""Rewards computed in the trainer's process: a weighted sum of rule graders, or a function from a user's file."""

from __future__ import annotations

import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import RewardConfig
from rlhf_mcore.config.user_functions import load_function
from rlhf_mcore.protocols import RewardFunction
from rlhf_mcore.rewards.graders import GRADERS
from rlhf_mcore.types import Score, Trajectory

_FUNCTION_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
_MAX_FLOAT32 = 3.4e38  # scores travel as float32: what overflows there is as useless as inf
_NEEDS_NO_TRUTH = {"format"}


def build_reward(cfg: RewardConfig) -> RewardFunction:
    """The rules or the function that ``cfg`` asks for; a function replaces the rules. A reward model is not part of it.

    Raises:
        ConfigError: naming ``reward.rules`` or ``reward.function``.
    """
    if cfg.function is not None:
        return FunctionReward(cfg.function)
    if not cfg.rules and cfg.model.path is None:
        raise ConfigError(f"reward.rules is empty and so is reward.function: name a rule ({', '.join(GRADERS)})")
    return RuleReward([(rule.name, rule.weight) for rule in cfg.rules])


class RuleReward:
    """The weighted sum of rule graders, the same ones for every prompt. Each grade, unweighted, is a part of the score.

    Args:
        rules: (name in ``GRADERS``, weight), each name once; none: every score is 0.

    Raises:
        ConfigError: an unknown or repeated name, or a weight that is not finite.
    """

    def __init__(self, rules: list[tuple[str, float]]) -> None:
        problems = [problem for index, rule in enumerate(rules) if (problem := _rule_problem(index, rule, rules))]
        if problems:
            raise ConfigError.many(problems)
        self._rules = rules
        self._needs_truth = [name for name, _ in rules if name not in _NEEDS_NO_TRUTH]

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order.

        Raises:
            ValueError: a prompt without a ground truth where a rule compares with it; all such rewards would be 0.
        """
        return [self._score_one(trajectory) for trajectory in trajectories]

    def _score_one(self, trajectory: Trajectory) -> Score:
        prompt = trajectory.prompt
        if prompt.ground_truth is None and self._needs_truth:
            raise ValueError(
                f"prompt {prompt.prompt_id!r} has no ground truth, which reward rule {self._needs_truth[0]!r} "
                "compares with: name its column in data.answer_key, or use reward.function"
            )
        parts = {name: GRADERS[name](trajectory.response_text, prompt.ground_truth) for name, _ in self._rules}
        return Score(value=math.fsum(weight * parts[name] for name, weight in self._rules), parts=parts)


class FunctionReward:
    """A user's function, called as ``f(data_source, solution_str, ground_truth, extra_info) -> float | dict``.

    Arguments go by keyword if the function has parameters of these four names, so that their order does not matter;
    else by position. A dict needs the key "score"; its other numeric entries become parts of the score, the rest is
    ignored.

    Args:
        spec: ``path/to/file.py:name``. The file is executed once, here.

    Raises:
        ConfigError: naming ``reward.function``, if the file or the name is missing, or the file fails to import.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._function = load_function(spec, "reward.function")
        self._by_keyword = _takes_keywords(self._function)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order.

        Raises:
            ValueError: the function raised, or returned something other than a finite number or a dict with one; the
                message names the function, the prompt and what came back.
        """
        return [self._score_one(trajectory) for trajectory in trajectories]

    def _score_one(self, trajectory: Trajectory) -> Score:
        prompt = trajectory.prompt
        arguments = (prompt.data_source, trajectory.response_text, prompt.ground_truth, dict(prompt.extra_info))
        where = f"reward function {self._spec} on prompt {prompt.prompt_id!r}, sample {trajectory.sample},"
        try:
            if self._by_keyword:
                result = self._function(**dict(zip(_FUNCTION_PARAMETERS, arguments, strict=True)))
            else:
                result = self._function(*arguments)
        except Exception as error:
            raise ValueError(f"{where} raised {type(error).__name__}: {error}") from error
        problem = _result_problem(result)
        if problem:
            raise ValueError(f"{where} returned {reprlib.repr(result)} ({type(result).__name__}): {problem}")
        return _to_score(result)


def _rule_problem(index: int, rule: tuple[str, float], rules: list[tuple[str, float]]) -> str | None:
    name, weight = rule
    if name not in GRADERS:
        nearest = get_close_matches(name, GRADERS, n=1)
        hint = f"did you mean {nearest[0]!r}? " if nearest else ""
        return f"reward.rules[{index}].name is {name!r}, which is no rule: {hint}known are {', '.join(GRADERS)}"
    if not math.isfinite(weight):
        return f"reward.rules[{index}].weight is {weight}: use a finite number"
    if any(name == earlier for earlier, _ in rules[:index]):
        return f"reward.rules[{index}].name is {name!r} for the second time: add up the weights in one rule"
    return None


def _takes_keywords(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return False
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return all(name in parameters and parameters[name].kind in by_name for name in _FUNCTION_PARAMETERS)


def _result_problem(result: Any) -> str | None:
    """What is wrong with a custom function's result, or None."""
    if not isinstance(result, Mapping):
        return _number_problem(result, "the score")
    if "score" not in result:
        return "a dict needs the key 'score'"
    problems = [_number_problem(result["score"], "the entry 'score'")]
    problems += [_number_problem(value, f"the entry {key!r}") for key, value in result.items() if _is_number(value)]
    return next((problem for problem in problems if problem), None)


def _number_problem(value: Any, what: str) -> str | None:
    if not _is_number(value):
        return f"{what} must be a number"
    # Compared, not converted: float() of a huge int raises. NaN fails every comparison.
    return None if -_MAX_FLOAT32 <= value <= _MAX_FLOAT32 else f"{what} must be finite"


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)


def _to_score(result: Any) -> Score:
    if not isinstance(result, Mapping):
        return Score(value=float(result))
    parts = {str(key): float(value) for key, value in result.items() if key != "score" and _is_number(value)}
    return Score(value=float(result["score"]), parts=parts)
