"""Decide which columns of which files hold prompts and answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlhf_mcore.config.data_rows import RowLimits
from rlhf_mcore.config.schema import DataConfig


def row_limits(data: DataConfig) -> RowLimits:
    """Return the bounds of a row."""
    return RowLimits(data.max_row_bytes, data.max_rows, data.max_bytes)


def file_keys(data: DataConfig, files: Sequence[str], field: str) -> list[tuple[str, str | None]]:
    """List the columns of prompt and answer of each file of ``field``, data.train or data.eval."""
    prompts, answers = (_spread(key, len(files)) for key in chosen_columns(data, field))
    return list(zip(prompts, answers, strict=True))


def chosen_columns(data: DataConfig, field: str) -> tuple[Any, Any]:
    if field != "data.eval":
        return data.prompt_key, data.answer_key
    prompt = data.prompt_key if data.eval_prompt_key is None else data.eval_prompt_key
    return prompt, data.answer_key if data.eval_answer_key is None else data.eval_answer_key


def settings_of(field: str) -> tuple[str, str]:
    """Return the keys that name the columns of ``field`` and of no other files, for messages: data.train has no eval_ before its
    own.
    """
    own = "eval_" if field == "data.eval" else ""
    return f"data.{own}prompt_key", f"data.{own}answer_key"


def _spread(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    return value if len(value) == count else value[:1] * count
