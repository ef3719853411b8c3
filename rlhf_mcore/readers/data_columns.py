"""Find the columns of prompts, answers and responses in each file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.readers.data_rows import RowLimits, checked_response, require_column


def row_limits(data: DataConfig) -> RowLimits:
    """Return the limits for reading rows."""
    return RowLimits(data.max_row_bytes, data.max_rows, data.max_bytes)


def file_keys(data: DataConfig, files: Sequence[str], field: str) -> list[tuple[str, str | None]]:
    """Return (prompt column, answer column) for each file of ``field``, data.train or data.eval."""
    prompts, answers = (_spread(key, len(files)) for key in chosen_columns(data, field))
    return list(zip(prompts, answers, strict=True))


def chosen_columns(data: DataConfig, field: str) -> tuple[Any, Any]:
    if field != "data.eval":
        return data.prompt_key, data.answer_key
    prompt = data.prompt_key if data.eval_prompt_key is None else data.eval_prompt_key
    return prompt, data.answer_key if data.eval_answer_key is None else data.eval_answer_key


def settings_of(field: str) -> tuple[str, str]:
    """Return the keys that name the columns of ``field``, for messages. Keys of data.eval begin with eval_."""
    own = "eval_" if field == "data.eval" else ""
    return f"data.{own}prompt_key", f"data.{own}answer_key"


def _spread(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    return value if len(value) == count else value[:1] * count


MESSAGES = "messages"  # column of conversations, which can replace prompt and response


def wanted_columns(data: DataConfig, prompt_key: str, response_keys: Sequence[str]) -> dict[str, str]:
    """Return the columns of an example by their keys: the prompt, then its responses."""
    responses = {key: getattr(data, key.removeprefix("data.")) for key in response_keys}
    return {"data.prompt_key": prompt_key, **responses}


def example_contents(row: dict[str, Any], columns: Mapping[str, str], place: str) -> tuple[str, Any, list[str]]:
    """Return (place, content of the prompt, responses) of a row. ``columns`` is the result of ``wanted_columns``.

    Raises:
        ConfigError: a column is missing, or a response is not a text.
    """
    (prompt_key, prompt_column), *responses = columns.items()
    if len(responses) == 1 and MESSAGES in row and responses[0][1] not in row:
        prompt, answers = _split(row[MESSAGES], f"{place}, column {MESSAGES!r}")
    else:
        prompt = require_column(row, prompt_column, place, setting=prompt_key)
        answers = {column: require_column(row, column, place, setting=key) for key, column in responses}
    texts = [
        checked_response(_join_text_parts(text), f"{place}, column {column!r}") for column, text in answers.items()
    ]
    return place, prompt, texts


def _join_text_parts(response: Any) -> Any:
    """Join the texts of a response that is a list of text parts. Return other values unchanged."""
    parts = response if isinstance(response, list) else []
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    only_texts = len(texts) == len(parts) and all(part.get("type") == "text" for part in parts)
    return "".join(texts) if parts and only_texts else response


def _split(messages: Any, place: str) -> tuple[list[Any], dict[str, Any]]:
    """Split a conversation into the messages before the last one, and the last message's content."""
    if not isinstance(messages, list) or len(messages) < 2 or not isinstance(messages[-1], dict):
        raise ConfigError(f"{place}: expected a list of two or more {{role, content}}, found {messages!r:.80}")
    last = messages[-1]
    if last.get("role") != "assistant":
        raise ConfigError(
            f"{place}: the last message is the training target and must be the assistant's, found role {last.get('role')!r}"
        )
    return messages[:-1], {MESSAGES: last.get("content")}
