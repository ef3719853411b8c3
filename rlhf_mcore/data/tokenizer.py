"""Loads tokenizers from a Hugging Face directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local Hugging Face directory. Code that comes with a model never runs.

    A tokenizer without a pad token pads with its end-of-sequence token. Padding is masked everywhere, so the id does not
    matter.

    Raises:
        ConfigError: the directory does not exist, or the tokenizer requires its own code or has no end-of-sequence token.
    """
    _refuse_foreign_code(path)
    # The import takes seconds, so the cheap checks come first.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    # The Rust library raises plain exceptions for unknown formats.
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0][:300]
        raise ConfigError(f"model.tokenizer_path={path!r}: no tokenizer could be loaded ({reason})") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.tokenizer_path={path!r}: the tokenizer has no end-of-sequence token, so no response could end; "
            'set "eos_token" in its tokenizer_config.json'
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def token_ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of each text, without special tokens.

    Raises:
        ConfigError: a pattern in tokenizer.json takes more steps on a text than the library allows.
    """
    try:
        return cast(list[list[int]], tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else [])
    except BaseException as error:
        # The Rust library raises PanicException, which is not a subclass of Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"{tokenizer.name_or_path}: tokenizer.json cannot split a text of {max(map(len, texts)):,} characters or fewer "
            f"({str(error).splitlines()[0][:200]}); correct its pattern, or shorten the text"
        ) from error


def _refuse_foreign_code(path: str) -> None:
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"model.tokenizer_path={path!r}: no such directory; set model.path or model.tokenizer_path")
    settings = directory / "tokenizer_config.json"
    if not os.path.lexists(settings):
        return
    content = read_json(settings, where=f"model.tokenizer_path={path!r}: {settings.name}")
    if "auto_map" in content:
        raise ConfigError(
            f"model.tokenizer_path={path!r}: {settings.name} requires its own code (auto_map), which is not supported; "
            "use a tokenizer that transformers knows"
        )
