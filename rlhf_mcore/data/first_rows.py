"""Checks the first prompts against the tokenizer's files before any process starts: the template that they need, and their lengths.

Nothing here imports transformers. The ranks would refuse the same later; they check every row, and render templates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.foreign import INDEX, read_json, read_text
from rlhf_mcore.readers.data_columns import file_keys, row_limits, settings_of
from rlhf_mcore.readers.data_rows import read_rows, require_column

ROWS = 64  # rows of each file that are checked
_MAX_CHARACTERS = 2**20  # longer prompts are not tokenised here


def check_first_rows(data: DataConfig, folder: str) -> None:
    """Check the first rows of ``data.train`` and ``data.eval`` of a run that samples responses. ``folder``: of the tokenizer.

    Raises:
        ConfigError: prompts need a chat template that the tokenizer lacks or that is broken, or prompts are too long.
    """
    # A user's code runs only in the ranks.
    if data.transform is not None:
        return
    template = _read_template(Path(folder))
    if template is None and data.apply_chat_template == "true":
        raise ConfigError(
            f"data.apply_chat_template=true, but the tokenizer in {folder} has no chat template; give model.tokenizer_path one with a "
            "template, or set data.apply_chat_template=false"
        )
    if template is not None and data.apply_chat_template != "false":
        _check_syntax(template, folder)
    tokenizer = _load_fast_tokenizer(Path(folder)) if data.overlong_prompts == "error" else None
    for field, files in (("data.train", data.train), ("data.eval", data.eval)):
        for place, prompt in _read_prompts(data, field, files):
            if template is None and not isinstance(prompt, str):
                raise ConfigError(
                    f"{field}: {place}: the prompt is a list of messages, but the tokenizer in {folder} has no chat template; give "
                    "model.tokenizer_path one with a template, or make the prompts plain strings"
                )
            if tokenizer is not None and (least := _count_least_tokens(tokenizer, prompt)) > data.max_prompt_tokens:
                raise ConfigError(
                    f"{field}: {place}: the prompt has {least} tokens or more, data.max_prompt_tokens={data.max_prompt_tokens}; raise "
                    "it, or set data.overlong_prompts=drop"
                )


def _read_prompts(data: DataConfig, field: str, files: list[str]) -> Iterator[tuple[str, Any]]:
    for file, (key, _) in zip(files, file_keys(data, files, field), strict=True):
        for place, row in islice(read_rows(Path(file), row_limits(data)), ROWS):
            if key in row or key.partition(".")[0] in row:
                yield place, require_column(row, key, place, setting=settings_of(field)[0])


def _count_least_tokens(tokenizer: Any, prompt: Any) -> int:
    """Count the tokens of a prompt without those that a template adds. Of a conversation only the user's messages count."""
    is_text = isinstance(prompt, str)
    messages = [] if is_text else [message for message in prompt if isinstance(message, Mapping)]
    said = [prompt] if is_text else [message.get("content") for message in messages if message.get("role") == "user"]
    # The place of an image may have fewer tokens than its mark has characters.
    texts = [
        text.replace("<image>", "").strip() for text in said if isinstance(text, str) and len(text) <= _MAX_CHARACTERS
    ]
    try:
        return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)
    except BaseException as error:
        # The Rust half raises PanicException. The ranks report it.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            return 0
        raise


def _load_fast_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of tokenizer.json, None if that is missing or unreadable, which the ranks report."""
    if not (folder / "tokenizer.json").is_file():
        return None
    # The library's threads do not survive a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:
        return None
    # The file may ask for both; transformers decides them by the call.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_template(folder: Path) -> str | None:
    """Return the chat template of a tokenizer's directory, from a file of its own or a key of tokenizer_config.json."""
    try:
        if (folder / "chat_template.jinja").is_file():
            return read_text(folder / "chat_template.jinja", limit=INDEX.num_bytes)
        for name in ("chat_template.json", "tokenizer_config.json"):
            template = None
            if (folder / name).is_file():
                template = read_json(folder / name, limits=INDEX).content.get("chat_template")
            if template and isinstance(template, list):
                named = {str(one.get("name")): one.get("template") for one in template if isinstance(one, Mapping)}
                return str(named.get("default") or "")
            if template:
                return str(template)
    except ConfigError:
        # It is reported when the tokenizer is loaded.
        return ""
    return "" if (folder / "additional_chat_templates").is_dir() else None


def _check_syntax(template: str, folder: str) -> None:
    """Check the syntax of a chat template.

    Raises:
        ConfigError: it has an error.
    """
    # A statement of transformers' own.
    if "generation" in template:
        return
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of the tokenizer in {folder} is broken, line {error.lineno}: {error.message}; download it again, or "
            "set data.apply_chat_template=false and give prompts as strings"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"the chat template of the tokenizer in {folder} is nested too deep; download it again"
        ) from error
