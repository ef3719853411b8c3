"""The formats of public data sets, and recipes that convert their rows to examples.

A recipe converts (place, row) pairs to ``PreparedExample``s. For an invalid row it yields a ``RowError`` with the place and reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.rewards.answers import last_boxed

Message = dict[str, str]
PlacedRow = tuple[str, dict[str, Any]]
Recipe = Callable[[Iterable[PlacedRow]], Iterator["PreparedExample | RowError"]]

GSM8K_INSTRUCTION = 'Think step by step and give the final answer after "####".'
BOXED_INSTRUCTION = r"Think step by step and put the final answer in \boxed{}."
TASK_FOLDER = "task_folder"  # the column of a row for a directory
# Every row of these data sets contains at least one of these columns: code with tests, and software tasks.
_CODE_TASK = ("entry_point", "test_list", "input_output", "public_tests", "public_test_cases")
_SOFTWARE_TASK = (
    "FAIL_TO_PASS",
    "test_patch",
    "test_command",
    "test_cmd",
    "eval_script",
)
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
_ANNOTATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator marks: 48/2 = <<48/2=24>>24
_TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")  # in the HH transcripts (arXiv 2204.05862)


class RowError(ValueError):
    """An unusable row. The message contains its place and the reason."""


@dataclass(slots=True)
class PreparedExample:
    """A prompt with its answers and metadata."""

    place: str
    data_source: str
    prompt: list[Message] | str  # a text is already rendered with a chat template
    ground_truth: str | None = None
    response: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    ability: str = "general"
    extra: dict[str, str] = field(default_factory=dict)


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return a text of a row.

    Raises:
        RowError: the value is not a text, or is empty.
    """
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"{key!r} must be a text that is not empty, found {value!r:.60}")
    return value


def user_turn(text: str, instruction: str = "") -> list[Message]:
    """Return a prompt with one user message: the text, followed by an instruction about the format of the answer."""
    return [{"role": "user", "content": f"{text.strip()}\n\n{instruction}".strip()}]


def gsm8k(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a row of GSM8K (Cobbe et al. 2021, arXiv 2110.14168): question, and answer that ends in ``#### number``."""
    solution, marker, number = _ANNOTATION.sub("", text_of(row, "answer")).rpartition("####")
    if not marker or not number.strip():
        raise RowError("'answer' has no number after ####")
    truth = number.strip().replace(",", "")
    return PreparedExample(
        place,
        "gsm8k",
        user_turn(text_of(row, "question"), GSM8K_INSTRUCTION),
        ground_truth=truth,
        response=f"{solution.strip()}\n#### {truth}",
        ability="math",
    )


def math(place: str, row: Mapping[str, Any]) -> PreparedExample:
    r"""Convert a row of MATH (Hendrycks et al. 2021, arXiv 2103.03874): problem, solution with ``\boxed{}`` answer, level, type."""
    solution = text_of(row, "solution")
    answer = row.get("answer") if isinstance(row.get("answer"), str) else last_boxed(solution)
    if not answer or not str(answer).strip():
        raise RowError(r"'solution' has no \boxed{} answer")
    extra = {key: str(row[key]) for key in ("level", "type", "subject") if row.get(key) is not None}
    prompt = user_turn(text_of(row, "problem"), BOXED_INSTRUCTION)
    return PreparedExample(
        place, "math", prompt, ground_truth=str(answer).strip(), response=solution.strip(), ability="math", extra=extra
    )


def rule_graded(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a row in our own schema (prompt, reward_model.ground_truth), which DAPO-Math-17k (arXiv 2503.14476) also uses."""
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
    """Convert a conversation with any of the common column names. The text after the last user message is the response."""
    source = str(row.get("data_source") or row.get("source") or "chat")
    turns = row.get("messages") or row.get("conversations")
    if turns is None and "instruction" in row:  # Alpaca
        given = row.get("input") or ""
        return PreparedExample(
            place, source, user_turn(text_of(row, "instruction"), str(given)), response=text_of(row, "output")
        )
    if turns is None:
        response = next((row[key] for key in ("response", "completion", "output", "answer") if row.get(key)), None)
        prompt = _messages(row.get("prompt") or row.get("question"))
        return PreparedExample(place, source, prompt, response=None if response is None else _last_text(response))
    prompt, response = _split(_messages(turns))
    return PreparedExample(place, source, prompt, response=response)


def preference(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a row with a better and a worse response: texts, lists of messages, or transcripts with the same prompt."""
    source = str(row.get("data_source") or row.get("source") or "preference")
    sides = [_side(row, key) for key in ("chosen", "rejected")]
    prompts, answers = zip(*sides, strict=True)
    if prompts[0] != prompts[1]:
        raise RowError("'chosen' and 'rejected' answer different prompts")
    given = row.get("prompt") or row.get("question")
    if not prompts[0] and not given:
        raise RowError("there is no 'prompt', and 'chosen' does not contain one")
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
        return [], text_of(row, key)
    prompt, response = _split(_messages(value))
    if response is None:
        raise RowError(f"{key!r} does not end with an assistant message")
    return prompt, response


def _messages(value: Any) -> list[Message]:
    """Convert messages with other keys and role names to our format. A text becomes one user message."""
    if isinstance(value, str) and value.strip():
        return user_turn(value)
    if not isinstance(value, list) or not value:
        raise RowError(f"expected a text or a list of messages, found {value!r:.60}")
    return [read_message(item) for item in value]


def read_message(item: Any) -> Message:
    """Convert a message with other keys and role names to our format.

    Raises:
        RowError: the message is invalid.
    """
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
    """Split a conversation into the prompt and the assistant's last message (None if the user's message is the last)."""
    if messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]["content"].strip() or None
    return messages, None


def _last_text(value: Any) -> str:
    text = value if isinstance(value, str) else _messages(value)[-1]["content"]
    if not text.strip():
        raise RowError("the response is empty")
    return text


# ------------------------------------------------------------------------------------------------------------ rollouts
def rollouts(rows: Iterable[PlacedRow]) -> Iterator[PreparedExample | RowError]:
    """Convert scored responses of a run or an evaluation to one example per prompt and step.

    The best response is chosen, the worst is rejected. Truncated responses, and responses without a score, are skipped. If all scores
    of a prompt are equal, it gets no pair.
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
        if scores and min(scores) < max(scores):  # among equal scores, the first response counts
            example.chosen, example.rejected = (responses[scores.index(end)][1] for end in (max(scores), min(scores)))
        yield example


def _read_grade(
    place: str, row: Mapping[str, Any]
) -> tuple[tuple[Any, str], PreparedExample, tuple[float, str] | None]:
    """Return the key of a prompt in a step, its example, and this response with its score (None if unusable)."""
    if row.get("turns"):
        raise RowError("an episode with several turns is not a single response to its prompt")
    prompt, response, score = text_of(row, "prompt"), row.get("response"), row.get("score")
    if not isinstance(response, str) or not isinstance(score, int | float) or isinstance(score, bool):
        raise RowError(f"'response' must be a text and 'score' a number, found {response!r:.40} and {score!r:.40}")
    truth = row.get("ground_truth")
    example = PreparedExample(
        place, str(row.get("data_source") or "rollouts"), prompt, ground_truth=None if truth is None else str(truth)
    )
    is_cut = row.get("truncated") or row.get("finish_reason") not in (None, "stop")
    usable = response.strip() and isfinite(score) and not row.get("failure") and not is_cut
    return (row.get("step"), prompt), example, (float(score), response) if usable else None


# -------------------------------------------------------------------------------------------------------------- choice
def plugin_recipe(name: str, package: str = "recipes") -> Recipe:
    """Return a recipe that loads a plug-in from ``contrib/<package>`` on first use."""

    def recipe(rows: Iterable[PlacedRow]) -> Iterator[PreparedExample | RowError]:
        found: Recipe = load_plugin("recipes", name, f"prepare-data --format {name}", package=package)
        return found(rows)

    return recipe


def per_row(convert: Callable[[str, Mapping[str, Any]], PreparedExample]) -> Recipe:
    """Return a recipe that converts each row to one example."""

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
    "code": plugin_recipe("code"),
    "open_assistant": plugin_recipe("open_assistant"),
    "preference": per_row(preference),
    "rollouts": rollouts,
    "tasks": plugin_recipe("tasks", package="containers"),
    "chat": per_row(chat),
}


def recognise(row: Mapping[str, Any]) -> str | None:
    """Return the name of the recipe for data with this first row, or None."""
    keys = row.keys()
    if keys & {TASK_FOLDER, *_SOFTWARE_TASK}:
        return "tasks"
    if keys & {*_CODE_TASK}:
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
