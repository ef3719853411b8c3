"""The small files of a tokenizer: what a text grows to, and which tokens end a response."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, Fields, read_json

MAX_GROWTH = 64  # of a text by normalisation; published tokenizers replace a space by three bytes
MAX_STEPS = 64


def growth_problems(directory: str) -> Iterator[str]:
    """Check that normalisation does not make texts much longer: a few replacements, each of a letter by many, fill any memory."""
    growth, steps = 1.0, 0
    pending: list[Any] = [contents(directory).get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        if not isinstance(node, dict):
            continue
        pending += [child for child in node.values() if isinstance(child, dict | list)]
        steps += "type" in node
        if node.get("type") == "Replace" and isinstance(node.get("content"), str):
            pattern = node.get("pattern")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            growth *= max(
                1.0, len(node["content"]) / max(len(text), 1) if isinstance(text, str) else len(node["content"]) + 1.0
            )
    if growth > MAX_GROWTH or steps > MAX_STEPS:
        yield (
            f"{directory}: tokenizer.json makes texts up to {growth:.0f} times longer in {steps} steps, more than {MAX_GROWTH} "
            f"times or {MAX_STEPS} steps; no published tokenizer does: download it again"
        )


def end_tokens(config: Fields) -> list[int]:
    """List the tokens that end a response, by a config: ``eos_token_id``, a number or a list.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(config.content.get("eos_token_id"), list):
        return config.integers("eos_token_id")
    end = config.integer("eos_token_id", default=None)
    return [] if end is None else [end]


def contents(directory: str) -> Mapping[str, Any]:
    """tokenizer.json; empty where there is none, or none that can be read."""
    try:
        return read_json(Path(directory, "tokenizer.json"), limits=INDEX).content
    except ConfigError:
        return {}
