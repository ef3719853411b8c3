"""Checks that a required chat template exists, and the lengths of the first prompts, before any process starts.

This module does not import transformers. The ranks later repeat these checks for every row, with rendered templates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.foreign import INDEX, read_json
from rlhf_mcore.readers.data_rows import file_keys, read_rows, require_column, settings_of

ROWS = 64  # checked rows per file
_MAX_CHARACTERS = 2**20  # longer prompts are not tokenised here


def check_first_rows(data: DataConfig, folder: str) -> None:
    """Check the first rows of ``data.train`` and ``data.eval`` of a run that samples responses.

    ``folder`` is the tokenizer's directory.

    Raises:
        ConfigError: prompts need a chat template that is missing, or prompts are too long.
    """
    # The user's code runs in the ranks only.
    if data.transform is not None:
        return
    has_template = _has_template(Path(folder))
    if not has_template and data.apply_chat_template == "true":
        raise ConfigError(
            f"data.apply_chat_template=true, but the tokenizer in {folder} has no chat template; give model.tokenizer_path one with a "
            "template, or set data.apply_chat_template=false"
        )
    tokenizer = _load_fast_tokenizer(Path(folder)) if data.overlong_prompts == "error" else None
    for field, files in (("data.train", data.train), ("data.eval", data.eval)):
        for place, prompt in _read_prompts(data, field, files):
            if not has_template and not isinstance(prompt, str):
                raise ConfigError(
                    f"{field}: {place}: the prompt is a list of messages, but the tokenizer in {folder} has no chat template; give "
                    "model.tokenizer_path one with a template, or make the prompts plain strings"
                )
            if tokenizer is not None and (least := _count_least_tokens(tokenizer, prompt)) > data.max_prompt_tokens:
                raise ConfigError(
                    f"{field}: {place}: the prompt has at least {least} tokens, more than "
                    f"data.max_prompt_tokens={data.max_prompt_tokens}; raise it, or set data.overlong_prompts=drop"
                )


def _read_prompts(data: DataConfig, field: str, files: list[str]) -> Iterator[tuple[str, Any]]:
    for file, (key, _) in zip(files, file_keys(data, files, field), strict=True):
        for place, row in islice(read_rows(Path(file), data), ROWS):
            if key in row or key.partition(".")[0] in row:
                yield place, require_column(row, key, place, setting=settings_of(field)[0])


def _count_least_tokens(tokenizer: Any, prompt: Any) -> int:
    """Count the tokens of a prompt without the tokens that a template adds. In a conversation, count the user messages only."""
    is_text = isinstance(prompt, str)
    messages = [] if is_text else [message for message in prompt if isinstance(message, Mapping)]
    said = [prompt] if is_text else [message.get("content") for message in messages if message.get("role") == "user"]
    # An image may have fewer tokens than its mark has characters.
    texts = [
        text.replace("<image>", "").strip() for text in said if isinstance(text, str) and len(text) <= _MAX_CHARACTERS
    ]
    try:
        return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    except BaseException as error:
        # The Rust library raises PanicException, which the ranks report.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return 0
        raise


def _load_fast_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of tokenizer.json, or None if it is missing or unreadable. The ranks report that."""
    if not (folder / "tokenizer.json").is_file():
        return None
    # The threads of the tokenizers library do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:
        return None
    # The file may enable padding and truncation; transformers ignores both settings unless the call asks for them.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _has_template(folder: Path) -> bool:
    """Return whether a tokenizer directory has a chat template, in a separate file or a key of its settings."""
    if (folder / "chat_template.jinja").is_file() or (folder / "additional_chat_templates").is_dir():
        return True
    files = [folder / name for name in ("chat_template.json", "tokenizer_config.json")]
    try:
        return any(read_json(file, limits=INDEX).content.get("chat_template") for file in files if file.is_file())
    except ConfigError:  # loading the tokenizer will report the error
        return True
