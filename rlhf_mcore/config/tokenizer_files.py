"""Whether a tokenizer belongs to a model, from the small files of their directories."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def tokenizer_size(directory: str) -> int | None:
    """One more than the largest token id in tokenizer.json; None where there is no such file or it does not say."""
    try:
        content = json.loads(Path(directory, "tokenizer.json").read_text(encoding="utf-8"))
        ids = [token["id"] for token in content.get("added_tokens") or ()]
        vocab = content["model"]["vocab"]
        ids += vocab.values() if isinstance(vocab, Mapping) else [len(vocab) - 1]
        return max(ids) + 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def token_problems(model_dir: str, num_tokens: int | None, field: str, tokenizer: str) -> Iterator[str]:
    """What does not fit between the model in ``model_dir`` and a tokenizer of ``num_tokens`` tokens (None: not known).

    Every token needs a row of the embedding (more rows are common: padding), and the tokens by which the model ends a response
    must be among the tokenizer's.
    """
    vocab_size = _read(model_dir, "config.json").get("vocab_size")
    if num_tokens is None or not isinstance(vocab_size, int):
        return
    if num_tokens > vocab_size:
        yield (
            f"{field}={model_dir}: the tokenizer in {tokenizer} has {num_tokens} tokens, the model vocab_size={vocab_size}; "
            "they do not belong together: put the model's own tokenizer there"
        )
    ends = {end for file in ("config.json", "generation_config.json") for end in _ends(_read(model_dir, file))}
    if foreign := sorted(end for end in ends if not 0 <= end < num_tokens):
        yield (
            f"{field}={model_dir}: the model ends a response with token {foreign[0]}, which the tokenizer in {tokenizer} with "
            f"its {num_tokens} tokens does not have; they do not belong together: put the model's own tokenizer there"
        )


def _ends(content: Mapping[str, Any]) -> list[int]:
    declared = content.get("eos_token_id")
    return [end for end in (declared if isinstance(declared, list) else [declared]) if isinstance(end, int)]


def _read(directory: str, name: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(directory, name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
