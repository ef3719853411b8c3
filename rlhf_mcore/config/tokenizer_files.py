"""Whether a tokenizer belongs to a model, from the small files of their directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, Fields, MissingFile, read_json


def tokenizer_size(directory: str) -> int | None:
    """One more than the largest token id in tokenizer.json; None where there is no such file or it does not say."""
    try:
        content = read_json(Path(directory, "tokenizer.json"), limits=INDEX).content
        ids = [token["id"] for token in content.get("added_tokens") or ()]
        vocab = content["model"]["vocab"]
        ids += vocab.values() if isinstance(vocab, Mapping) else [len(vocab) - 1]
        return int(max(ids)) + 1
    except (ConfigError, ValueError, LookupError, TypeError, AttributeError):
        return None


def token_problems(model_dir: str, num_tokens: int | None, field: str, tokenizer: str) -> Iterator[str]:
    """What does not fit between the model in ``model_dir`` and a tokenizer of ``num_tokens`` tokens (None: not known).

    Every token needs a row of the embedding (more rows are common: padding), and the tokens by which the model ends a response
    must be among the tokenizer's.
    """
    try:
        hf_config = _read(model_dir, "config.json")
        vocab_size = hf_config.integer("vocab_size", 1, default=None)
        ends = end_tokens(hf_config)
    except ConfigError:  # ``inspect_model`` says so
        return
    try:
        ends += end_tokens(_read(model_dir, "generation_config.json"))
    except ConfigError as error:
        yield f"{field}={model_dir}: {error}"
    if num_tokens is None or vocab_size is None:
        return
    if num_tokens > vocab_size:
        yield (
            f"{field}={model_dir}: the tokenizer in {tokenizer} has {num_tokens} tokens, the model vocab_size={vocab_size}; "
            "they do not belong together: put the model's own tokenizer there"
        )
    if foreign := sorted(end for end in ends if end >= num_tokens):
        yield (
            f"{field}={model_dir}: the model ends a response with token {foreign[0]}, which the tokenizer in {tokenizer} with "
            f"its {num_tokens} tokens does not have; they do not belong together: put the model's own tokenizer there"
        )


def end_tokens(config: Fields) -> list[int]:
    """The tokens by which a config says that a response ends: ``eos_token_id``, a number or a list.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(config.content.get("eos_token_id"), list):
        return config.integers("eos_token_id")
    end = config.integer("eos_token_id", default=None)
    return [] if end is None else [end]


def _read(directory: str, name: str) -> Fields:
    """A file of a model that may be absent."""
    try:
        return read_json(Path(directory, name), where=name, remedy="download or export the model again")
    except MissingFile:
        return Fields({}, name, "")
