"""Adapt the user's reward function to pool items: one response, or a batch at once.

A function with a parameter ``completions`` is called for a batch, ``f(completions, prompts, **columns) -> list of scores``, as
in TRL: https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
"""

from __future__ import annotations

import inspect
import numbers
import random
import reprlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.user_functions import load_function, place_of

if TYPE_CHECKING:
    from rlhf_mcore.rewards.worker import Call

PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
MAX_FLOAT32 = 3.4e38  # scores are sent as float32; a larger value would become inf


def load_reward(spec: str, key: str) -> Call:
    """Load the function ``spec`` and adapt it to items: a dict with ``PARAMETERS`` and "seed", or ``{"batch": items}``.

    Raises:
        ConfigError: the file or the function cannot be loaded, or the function does not take the four arguments.
    """
    try:
        function = load_function(spec, key)
    except KeyboardInterrupt as error:
        raise ConfigError(f"{key} is {spec!r}, but its file raises KeyboardInterrupt: correct the file") from error
    code = getattr(function, "__code__", None)
    where = f", line {code.co_firstlineno}" if code is not None else ""
    if inspect.iscoroutinefunction(function):
        problem = f"it is a coroutine function{where}, which is not supported: make it an ordinary function"
        raise ConfigError(f"{key} is {spec!r}, but {problem}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        return _ItemCall(function, spec, by_keyword=False)
    if "completions" in signature.parameters:
        return BatchCall(function, spec)
    # By keyword, if at least one parameter has one of the names and all four names are accepted.
    if any(name in signature.parameters for name in PARAMETERS):
        with suppress(TypeError):
            signature.bind(**dict.fromkeys(PARAMETERS))
            return _ItemCall(function, spec, by_keyword=True)
    try:
        signature.bind(*PARAMETERS)
    except TypeError as error:
        problem = f"its parameters are {signature}{where} ({error}): let it take ({', '.join(PARAMETERS)})"
        raise ConfigError(f"{key} is {spec!r}, but {problem}") from error
    return _ItemCall(function, spec, by_keyword=False)


class _ItemCall:
    """Calls a function for one response."""

    def __init__(self, function: Callable[..., Any], spec: str, by_keyword: bool) -> None:
        self._function, self._spec, self._by_keyword = function, spec, by_keyword

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        seed_generators(item["seed"])
        arguments = {name: item[name] for name in PARAMETERS}
        try:
            return _read_result(
                self._function(**arguments) if self._by_keyword else self._function(*arguments.values())
            )
        except MemoryError:
            raise
        except BaseException as error:  # also a KeyboardInterrupt of the function; Ctrl-C does not reach this process
            return {"error": describe_raise(error, self._spec)}


class BatchCall:
    """Calls a function for ``{"batch": items}``, and returns ``{"results": [...]}`` with one result per item."""

    batched = True

    def __init__(self, function: Callable[..., Any], spec: str) -> None:
        self._function, self._spec = function, spec
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        self._names = [each.name for each in named]
        self._required = [each.name for each in named if each.default is each.empty]

    def __call__(self, item: Mapping[str, Any]) -> dict[str, Any]:
        items = item["batch"]
        seed_generators(items[0]["seed"])
        columns = collect_columns(items)
        if missing := [name for name in self._required if name not in columns]:
            names = ", ".join(columns)
            return {"error": f"requires {missing[0]!r}, but gets only {names}: add this column to extra_info"}
        try:
            arguments = {name: column for name, column in columns.items() if self._takes_all or name in self._names}
            return _results(self._function(**arguments), len(items))
        except MemoryError:
            raise
        except BaseException as error:
            return {"error": describe_raise(error, self._spec)}


def collect_columns(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keyword arguments of a batch function: lists with an entry per response, and the trainer's state.

    If the prompt is a conversation, the prompt is a list of messages, and so is the response.
    """
    extra = list(dict.fromkeys(name for item in items for name in item["extra_info"]))
    return {
        **{name: [item["extra_info"].get(name) for item in items] for name in extra},
        "answer": [item["ground_truth"] for item in items],
        **{name: [item[name] for item in items] for name in ("data_source", "ground_truth", "extra_info")},
        "prompts": [item["messages"] or item["prompt"] for item in items],
        "completions": [
            [{"role": "assistant", "content": item["solution_str"]}] if item["messages"] else item["solution_str"]
            for item in items
        ],
        "completion_ids": [item["completion_ids"] for item in items],
        "trainer_state": SimpleNamespace(global_step=max(item["policy_version"] for item in items)),
    }


def _results(result: Any, num_items: int) -> dict[str, Any]:
    """Read the scores of a batch. The entry None means no score from this function, and adds nothing."""
    scores = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(scores, list | tuple) or len(scores) != num_items:
        return {
            "error": f"returned {shorten(result)}: it must be a list of {num_items} scores, one for each completion"
        }
    nothing = {"score": 0.0, "parts": {}, "applies": False}
    return {"results": [nothing if one is None else _read_result(one, " among others") for one in scores]}


def _read_result(result: Any, place: str = "") -> dict[str, Any]:
    """Return ``{"score", "parts"}``, or ``{"error"}`` if the result is neither a finite number nor a dict with one."""
    is_dict = isinstance(result, Mapping)
    entries = dict(result) if is_dict else {"score": result}
    parts = {name: value for name, value in entries.items() if name != "score" and isinstance(value, numbers.Real)}
    if "score" in entries:
        found = {"score": entries["score"], **parts}
        problems = [number_problem(found[name], f"the entry {name!r}" if is_dict else "the score") for name in found]
    else:
        problems = ["a dict needs the key 'score'"]
    if problem := next(filter(None, problems), None):
        return {"error": f"returned {shorten(result)}{place}: {problem}"}
    return {"score": float(entries["score"]), "parts": {str(name): float(value) for name, value in parts.items()}}


def describe_raise(error: BaseException, spec: str) -> str:
    """Describe the exception that a function has raised."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}){place_of(error, spec)}"
    text = traceback.format_exception_only(error)[-1].strip()
    return f"raised {text[:2000]}{place_of(error, spec)}"


def seed_generators(seed: int) -> None:
    """Seed the random generators, so that a response gets the same random numbers in every process and order."""
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def number_problem(value: Any, what: str) -> str | None:
    """Return why a value is not a valid score, or None if it is valid."""
    is_number = isinstance(value, numbers.Real)
    if not is_number:
        return f"{what} must be a number"
    # Compared without conversion, because float() of a huge integer raises. NaN fails every comparison.
    return None if -MAX_FLOAT32 <= value <= MAX_FLOAT32 else f"{what} must be finite"


def shorten(result: Any) -> str:
    """Return a value and its type as a short text for a message."""
    return f"{reprlib.repr(result)} ({type(result).__name__})"
