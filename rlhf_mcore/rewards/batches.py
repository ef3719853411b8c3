"""Reward functions that score a batch at once: ``f(completions, prompts, **columns) -> list of scores``, as TRL calls them.

https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rlhf_mcore.rewards.worker import ASK, Call, raised, result_problem, score_of, seed_generators, shown


def batched_call(function: Callable[..., Any], spec: str) -> Call:
    """The function as something that takes ``{"batch": items}`` and returns ``{"results": [...]}``, one for each of them."""
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    needed = [each.name for each in parameters if each.name in names and each.default is each.empty]

    def call(item: Any) -> dict[str, Any]:
        if item == ASK:
            return {"batched": True}
        items = item["batch"]
        seed_generators(items[0]["seed"])
        columns = columns_of(items)
        if missing := [name for name in needed if name not in columns]:
            held = ", ".join(columns)
            return {
                "error": f"needs {missing[0]!r}, and is given {held}: put such a column of the data into extra_info"
            }
        try:
            result = function(**{name: column for name, column in columns.items() if takes_all or name in names})
            return _results(result, len(items))
        except MemoryError:
            raise
        except BaseException as error:
            return {"error": raised(error, spec)}

    return call


def columns_of(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a function is given by keyword: lists with an entry for each response, and where the training is.

    A prompt that is a conversation is a list of messages, and so is the response to it.
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
    """An entry None is no score of this function's, and adds nothing."""
    given = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(given, list | tuple) or len(given) != num_items:
        return {"error": f"returned {shown(result)}: it must be a list of {num_items} scores, one for each completion"}
    return {"results": [_result(one) for one in given]}


def _result(one: Any) -> dict[str, Any]:
    if one is None:
        return {"score": 0.0, "parts": {}, "applies": False}
    problem = result_problem(one)
    return {"error": f"returned {shown(one)} among others: {problem}"} if problem else score_of(one)
