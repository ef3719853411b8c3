"""The shapes in which public data sets come, and how a row of each becomes examples.

A recipe turns (place, row) pairs into ``PreparedExample``s; what is wrong with a row is a ``RowError`` that names its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from rlhf_mcore.commands.prepare_data.container_tasks import FOLDER, SHAPE, task_example
from rlhf_mcore.rewards.answers import last_boxed
from rlhf_mcore.rewards.code_tests import UNREADABLE, read_tests

Message = dict[str, str]
PlacedRow = tuple[str, dict[str, Any]]
Recipe = Callable[[Iterable[PlacedRow]], Iterator["PreparedExample | RowError"]]

GSM8K_INSTRUCTION = 'Think step by step and give the final answer after "####".'
BOXED_INSTRUCTION = r"Think step by step and put the final answer in \boxed{}."
PROGRAM_INSTRUCTION = (
    "Write a Python program that reads standard input and writes standard output. Put it in one ```python code block."
)
FUNCTION_INSTRUCTION = "Write it in Python, and put all of the code in one ```python code block."
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator marks: 48/2 = <<48/2=24>>24
_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")  # of the HH transcripts (arXiv 2204.05862)


class RowError(ValueError):
    """A row that cannot be used, with its place and the reason."""


@dataclass(slots=True)
class PreparedExample:
    """One prompt with what is known about it."""

    place: str
    data_source: str
    prompt: list[Message] | str  # a text is what the model has read: its chat template is already in it
    ground_truth: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    ability: str = "general"
    extra: dict[str, str] = field(default_factory=dict)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{key!r} must be a text that is not empty, found {value!r:.60}")
    return value


def _user(text: str, instruction: str = "") -> list[Message]:
    return [{"role": "user", "content": f"{text.strip()}\n\n{instruction}".strip()}]


def gsm8k(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert GSM8K (Cobbe et al. 2021, arXiv 2110.14168): question, answer that ends in ``#### number``."""
    solution, marker, number = _ANNOTATION.sub("", _text(row, "answer")).rpartition("####")
    if not marker or not number.strip():
        raise RowError("'answer' has no number after ####")
    truth = number.strip().replace(",", "")
    return PreparedExample(
        place,
        "gsm8k",
        _user(_text(row, "question"), GSM8K_INSTRUCTION),
        ground_truth=truth,
        response=f"{solution.strip()}\n#### {truth}",
        ability="math",
    )


def math(place: str, row: Mapping[str, Any]) -> PreparedExample:
    r"""Convert MATH (Hendrycks et al. 2021, arXiv 2103.03874): problem, solution with a ``\boxed{}`` answer, level, type."""
    solution = _text(row, "solution")
    answer = row.get("answer") if isinstance(row.get("answer"), str) else last_boxed(solution)
    if not answer or not str(answer).strip():
        raise RowError(r"'solution' has no \boxed{} answer")
    extra = {key: str(row[key]) for key in ("level", "type", "subject") if row.get(key) is not None}
    prompt = _user(_text(row, "problem"), BOXED_INSTRUCTION)
    return PreparedExample(
        place, "math", prompt, ground_truth=str(answer).strip(), response=solution.strip(), ability="math", extra=extra
    )


def code(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert tasks whose answer is code that passes tests, as their data sets have them; the tests become the ground truth.

    HumanEval (arXiv 2107.03374), MBPP (2108.07732), APPS (2105.09938), TACO (2312.14852), CodeContests (2203.07814) and LiveCodeBench
    (2403.07974; of its private tests those that are JSON: others are pickled, and are not read).
    """
    make = next((make for key, make in _CODE_SHAPES.items() if row.get(key) is not None), None)
    if make is None:
        raise RowError(f"none of {', '.join(_CODE_SHAPES)} holds tests")
    try:
        source, question, tests, solution = make(row)
        is_program = read_tests(tests)[0].kind == "program"
    except UNREADABLE as error:
        raise error if isinstance(error, RowError) else RowError(f"the tests cannot be read: {error}") from error
    starter = row.get("starter_code")
    start = (
        f"\n\nBegin with\n```python\n{starter.rstrip()}\n```" if isinstance(starter, str) and starter.strip() else ""
    )
    response = f"```python\n{solution.strip()}\n```" if solution else None
    extra = {key: str(row[key]) for key in ("task_id", "difficulty", "question_id") if row.get(key) is not None}
    return PreparedExample(
        place,
        source,
        _user(question + start, PROGRAM_INSTRUCTION if is_program else FUNCTION_INSTRUCTION),
        ground_truth=json.dumps(tests),
        response=response,
        ability="code",
        extra={**extra, "solution": response} if response else extra,
    )


_CodeTask = tuple[str, str, Any, "str | None"]  # data source, question, tests, a solution


def _humaneval(row: Mapping[str, Any]) -> _CodeTask:
    prompt, tests = _text(row, "prompt"), {key: _text(row, key) for key in ("test", "entry_point")}
    solution = row.get("canonical_solution")
    question = f"Complete this function.\n\n```python\n{prompt.strip()}\n```"
    return "openai_humaneval", question, tests, f"{prompt}{solution}" if solution else None


def _mbpp(row: Mapping[str, Any]) -> _CodeTask:
    tests = {key: row[key] for key in ("test_list", "test_setup_code", "test_imports") if row.get(key)}
    shown = "\n".join(tests["test_list"])  # else nobody knows what the function is called
    question = (
        f"{_text(row, 'text' if row.get('text') else 'prompt')}\n\nThese tests have to pass:\n```python\n{shown}\n```"
    )
    return "mbpp", question, tests, row.get("code")


def _apps(row: Mapping[str, Any]) -> _CodeTask:
    tests, solutions = (json.loads(row[key]) if row.get(key) else [] for key in ("input_output", "solutions"))
    return "taco" if "skill_types" in row else "apps", _text(row, "question"), tests, next(iter(solutions), None)


def _code_contests(row: Mapping[str, Any]) -> _CodeTask:
    groups = [row.get(key) or {} for key in ("public_tests", "private_tests", "generated_tests")]
    tests = {f"{key}s": [text for group in groups for text in group.get(key) or ()] for key in ("input", "output")}
    written = row.get("solutions") or {"language": [], "solution": []}
    python = (text for language, text in zip(written["language"], written["solution"], strict=True) if language == 3)
    return "codecontests", _text(row, "description"), tests, next(python, None)


def _live_code_bench(row: Mapping[str, Any]) -> _CodeTask:
    tests = json.loads(row["public_test_cases"])
    with suppress(ValueError):
        tests += json.loads(row.get("private_test_cases") or "[]")
    metadata = json.loads(row.get("metadata") or "{}")
    return "livecodebench", _text(row, "question_content"), [{**test, "metadata": metadata} for test in tests], None


_CODE_SHAPES: dict[str, Callable[[Mapping[str, Any]], _CodeTask]] = {
    "entry_point": _humaneval,
    "test_list": _mbpp,
    "input_output": _apps,
    "public_tests": _code_contests,
    "public_test_cases": _live_code_bench,
}


def rule_graded(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert DAPO-Math-17k (arXiv 2503.14476) and everything else in our own schema: prompt, reward_model.ground_truth."""
    reward_model = row.get("reward_model")
    truth = reward_model.get("ground_truth") if isinstance(reward_model, Mapping) else None
    if truth is None or not str(truth).strip():
        raise RowError("'reward_model' has no ground_truth")
    info = row.get("extra_info") or {}
    extra = {key: str(value) for key, value in info.items() if value is not None and not isinstance(value, dict | list)}
    extra.pop("split", None)
    return PreparedExample(
        place,
        str(row.get("data_source") or "unknown"),
        _messages(row.get("prompt")),
        ground_truth=str(truth).strip(),
        ability=str(row.get("ability") or "general").lower(),
        extra=extra,
    )


def chat(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a conversation under one of the usual names; what comes after the last turn of the user is the response."""
    source = str(row.get("data_source") or row.get("source") or "chat")
    turns = row.get("messages") or row.get("conversations")
    if turns is None and "instruction" in row:  # Alpaca
        given = row.get("input") or ""
        return PreparedExample(
            place, source, _user(_text(row, "instruction"), str(given)), response=_text(row, "output")
        )
    if turns is None:
        response = next((row[key] for key in ("response", "completion", "output", "answer") if row.get(key)), None)
        prompt = _messages(row.get("prompt") or row.get("question"))
        return PreparedExample(place, source, prompt, response=None if response is None else _last_text(response))
    prompt, response = _split(_messages(turns))
    return PreparedExample(place, source, prompt, response=response)


def preference(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a better and a worse response: texts, lists of messages, or whole transcripts that share their beginning."""
    source = str(row.get("data_source") or row.get("source") or "preference")
    sides = [_side(row, key) for key in ("chosen", "rejected")]
    prompts, answers = zip(*sides, strict=True)
    if prompts[0] != prompts[1]:
        raise RowError("'chosen' and 'rejected' answer different prompts")
    given = row.get("prompt") or row.get("question")
    if not prompts[0] and not given:
        raise RowError("there is no 'prompt', and 'chosen' does not hold one")
    prompt = prompts[0] or _messages(given)
    if answers[0] == answers[1]:
        raise RowError("'chosen' and 'rejected' are the same")
    return PreparedExample(place, source, prompt, chosen=answers[0], rejected=answers[1])


def _side(row: Mapping[str, Any], key: str) -> tuple[list[Message], str]:
    value = row.get(key)
    if isinstance(value, str) and _TURN.match(value):
        _, *parts = _TURN.split(value)
        turns = zip(parts[::2], parts[1::2], strict=True)
        value = [{"role": role, "content": content.strip()} for role, content in turns]
    if isinstance(value, str):
        return [], _text(row, key)
    prompt, response = _split(_messages(value))
    if response is None:
        raise RowError(f"{key!r} does not end with an answer of the assistant")
    return prompt, response


def _messages(value: Any) -> list[Message]:
    """Convert messages to our roles, whatever their keys and roles were called. A text is one message of the user."""
    if isinstance(value, str) and value.strip():
        return _user(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"expected a text or a list of messages, found {value!r:.60}")
    return [_message(item) for item in value]


def _message(item: Any) -> Message:
    if not isinstance(item, Mapping):
        raise RowError(f"a message must be an object, found {item!r:.60}")
    role = ROLES.get(str(item.get("role", item.get("from"))).lower())
    content = item.get("content", item.get("value"))
    if role is None:
        raise RowError(f"role {item.get('role', item.get('from'))!r} is not one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise RowError(f"a message needs a text, found {content!r:.60}")
    return {"role": role, "content": content}


def _split(messages: list[Message]) -> tuple[list[Message], str | None]:
    """Split a conversation behind the last turn of the user: what is before, and the answer to it if there is one."""
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"].strip() or None
    return messages, None


def _last_text(value: Any) -> str:
    text = value if isinstance(value, str) else _messages(value)[-1]["content"]
    if not text.strip():
        raise RowError("the response is empty")
    return text


# ------------------------------------------------------------------------------------------------------- OpenAssistant
def open_assistant(rows: Iterable[PlacedRow]) -> Iterator[PreparedExample | RowError]:
    """Convert OpenAssistant (Köpf et al. 2023, arXiv 2304.07327): a tree of messages per row, or a message per row with parent_id.

    Every turn of a user with answers becomes an example: the best-ranked answer is the response, and chosen over the worst-ranked
    one where two are ranked. Deleted messages are left out with what follows them.
    """
    flat: dict[str, tuple[str, dict[str, Any]]] = {}
    for place, row in rows:
        if isinstance(row.get("prompt"), Mapping):
            yield from _tree(place, row["prompt"], [])
        elif isinstance(row.get("message_id"), str):
            flat[row["message_id"]] = (place, {**row, "replies": []})
        else:
            yield RowError(f"{place}: neither a message tree nor a message with message_id")
    roots = []
    for place, row in flat.values():
        parent = flat.get(row.get("parent_id") or "")
        if parent is not None:
            parent[1]["replies"].append(row)
        elif row.get("parent_id") is None:
            roots.append((place, row))
    for place, row in roots:
        yield from _tree(place, row, [])


def _tree(place: str, node: Mapping[str, Any], before: list[Message]) -> Iterator[PreparedExample | RowError]:
    if node.get("deleted"):
        return
    try:
        here = [*before, _message({"role": node.get("role"), "content": node.get("text")})]
    except RowError as error:
        yield RowError(f"{place}: {error}")
        return
    replies = [reply for reply in node.get("replies") or () if not reply.get("deleted") and reply.get("text")]
    if here[-1]["role"] == "user":
        yield _turn(place, node, here, replies)
    for reply in replies:
        yield from _tree(place, reply, here)


def _turn(
    place: str, node: Mapping[str, Any], prompt: list[Message], replies: list[Mapping[str, Any]]
) -> PreparedExample:
    ranked = sorted((reply for reply in replies if isinstance(reply.get("rank"), int | float)), key=lambda r: r["rank"])
    best = ranked or replies
    example = PreparedExample(place, "open_assistant", prompt, extra={"lang": str(node.get("lang") or "")})
    if best:
        example.response = best[0]["text"].strip()
    if len(ranked) > 1 and ranked[0]["rank"] < ranked[-1]["rank"]:
        example.chosen, example.rejected = ranked[0]["text"].strip(), ranked[-1]["text"].strip()
    return example


# ------------------------------------------------------------------------------------------------------------ rollouts
def rollouts(rows: Iterable[PlacedRow]) -> Iterator[PreparedExample | RowError]:
    """Convert graded responses of a run or of an evaluation: an example per prompt and step, its best response chosen over its worst.

    Responses that were cut at the token limit, or whose grader failed, are left out. Where all scores are equal there is no pair.
    """
    groups: dict[tuple[Any, str], tuple[PreparedExample, list[tuple[float, str]]]] = {}
    for place, row in rows:
        try:
            key, example, response = _read_grade(place, row)
        except RowError as error:
            yield RowError(f"{place}: {error}")
            continue
        _, responses = groups.setdefault(key, (example, []))
        if response is not None:
            responses.append(response)
    for example, responses in groups.values():
        scores = [score for score, _ in responses]
        if scores and min(scores) < max(scores):  # of equal ones the first
            example.chosen, example.rejected = (responses[scores.index(end)][1] for end in (max(scores), min(scores)))
        yield example


def _read_grade(
    place: str, row: Mapping[str, Any]
) -> tuple[tuple[Any, str], PreparedExample, tuple[float, str] | None]:
    """Return what is common to the responses of a prompt in a step, its example, and this response with its score if it is usable."""
    if row.get("turns"):
        raise RowError("an episode of several turns is not one response to its prompt")
    prompt, response, score = _text(row, "prompt"), row.get("response"), row.get("score")
    if not isinstance(response, str) or not isinstance(score, int | float) or isinstance(score, bool):
        raise RowError(f"'response' must be a text and 'score' a number, found {response!r:.40} and {score!r:.40}")
    truth = row.get("ground_truth")
    example = PreparedExample(
        place, str(row.get("data_source") or "rollouts"), prompt, ground_truth=None if truth is None else str(truth)
    )
    is_cut = row.get("truncated") or row.get("finish_reason") not in (None, "stop")
    usable = response.strip() and isfinite(score) and not row.get("failure") and not is_cut
    return (row.get("step"), prompt), example, (float(score), response) if usable else None


# ---------------------------------------------------------------------------------------------------------- containers
def container_task(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a task for an agent in a container; what the container needs is ``extra_info.container``."""
    try:
        source, prompt, extra = task_example(row)
    except ValueError as error:
        raise RowError(str(error)) from error
    return PreparedExample(place, source, prompt, ability="agent", extra=extra)


# -------------------------------------------------------------------------------------------------------------- choice
def per_row(convert: Callable[[str, Mapping[str, Any]], PreparedExample]) -> Recipe:
    """Build a recipe that makes one example of each row."""

    def recipe(rows: Iterable[PlacedRow]) -> Iterator[PreparedExample | RowError]:
        for place, row in rows:
            try:
                yield convert(place, row)
            except RowError as error:
                yield RowError(f"{place}: {error}")

    return recipe


RECIPES: dict[str, Recipe] = {
    "gsm8k": per_row(gsm8k),
    "math": per_row(math),
    "dapo": per_row(rule_graded),
    "code": per_row(code),
    "open_assistant": open_assistant,
    "preference": per_row(preference),
    "rollouts": rollouts,
    "tasks": per_row(container_task),
    "chat": per_row(chat),
}


def recognise(row: Mapping[str, Any]) -> str | None:
    """Find the recipe for data whose first row is ``row``, or None."""
    keys = row.keys()
    if FOLDER in keys or keys & set(SHAPE):
        return "tasks"
    if keys & _CODE_SHAPES.keys():
        return "code"
    if {"chosen", "rejected"} <= keys:
        return "preference"
    if {"prompt_id", "sample", "score", "response"} <= keys:
        return "rollouts"
    if "message_id" in keys or isinstance(row.get("prompt"), Mapping):
        return "open_assistant"
    if "reward_model" in keys:
        return "dapo"
    if {"problem", "solution"} <= keys:
        return "math"
    if {"question", "answer"} <= keys and "####" in str(row["answer"]):
        return "gsm8k"
    if keys & {"messages", "conversations", "instruction", "prompt"}:
        return "chat"
    return None
