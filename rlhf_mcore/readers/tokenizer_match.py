"""Check that a tokenizer belongs to a model, by the small files of their directories."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping
from os.path import isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import ModelConfig
from rlhf_mcore.foreign import INDEX, Fields, MissingFile, read_json, shorten
from rlhf_mcore.readers.hub_ids import absent_hint
from rlhf_mcore.readers.model_files import end_tokens, tokenizer_contents, tokenizer_problems

_OWN = "use the model's own tokenizer"
PLAIN_FILES = ("tokenizer.model", "vocab.json", "merges.txt")  # files of tokenizers without tokenizer.json


def tokenizer_size(directory: str) -> int | None:
    """Return the largest token id in tokenizer.json plus one, or None if no file lists the ids."""
    texts = _texts_of_tokens(tokenizer_contents(directory))
    return max(texts) + 1 if texts else None


def own_tokenizer_problems(model: ModelConfig) -> Iterator[str]:
    """Check that the tokenizer of a run exists and belongs to ``model.path``."""
    owner = model.path if model.tokenizer_path is None else model.tokenizer_path
    yield from token_problems(model.path, tokenizer_size(owner), "model.path", owner)
    if model.tokenizer_path is None:
        yield from tokenizer_problems(model.path, "model.path")
    elif not Path(owner).is_dir():
        yield f"model.tokenizer_path={owner} is not a directory; give the path of a directory with tokenizer files{absent_hint(owner)}"
        return
    else:
        yield from tokenizer_problems(owner, "model.tokenizer_path")
        if not model.allow_other_tokenizer and (difference := tokenizer_difference(owner, model.path)):
            yield (
                f"model.tokenizer_path={owner} is not the tokenizer of model.path={model.path}: {difference}. The model would "
                "read wrong tokens; use its own (model.tokenizer_path=null), or set model.allow_other_tokenizer=true if it was "
                "trained with this tokenizer"
            )


def tokenizer_difference(directory: str, own: str) -> str | None:
    """Describe the first difference between the tokenizers in two directories, or return None if the files show none.

    Additional tokens in ``directory`` are allowed, because their embedding rows follow the rows of ``own``.
    """
    there, here = tokenizer_contents(directory), tokenizer_contents(own)
    if not there or not here:
        names = [name for name in PLAIN_FILES if isfile(Path(directory, name)) and isfile(Path(own, name))]
        differing = [name for name in names if not filecmp.cmp(Path(directory, name), Path(own, name), shallow=False)]
        return f"its {differing[0]} has other contents" if differing else None
    texts, own_texts = _texts_of_tokens(there), _texts_of_tokens(here)
    if wrong := [number for number, text in sorted(own_texts.items()) if texts.get(number) != text]:
        number = wrong[0]
        difference = f"is {shorten(texts[number], 40)!r} there" if number in texts else "is not there"
        return f"token {number}, {shorten(own_texts[number], 40)!r}, {difference}; {len(wrong)} of {len(own_texts)} tokens differ"
    merges, own_merges = (_merges(content) for content in (there, here))
    if merges[: len(own_merges)] != own_merges:
        return "its merges are in another order"
    ends = [_end_of_text(folder) for folder in (directory, own)]
    if None not in ends and ends[0] != ends[1]:
        return f"it ends a text with {ends[0]!r}, the model's own with {ends[1]!r}"
    return None


def token_problems(model_dir: str, num_tokens: int | None, field: str, tokenizer: str) -> Iterator[str]:
    """List mismatches between the model in ``model_dir`` and a tokenizer with ``num_tokens`` tokens (None: not known).

    Every token needs a row of the embedding; additional rows are common, as padding. The tokenizer must contain the model's end
    tokens.
    """
    try:
        hf_config = _read(model_dir, "config.json")
        vocab_size = hf_config.integer("vocab_size", 1, default=None)
        ends = end_tokens(hf_config)
    except ConfigError:  # ``inspect_model`` reports it
        return
    try:
        ends += end_tokens(_read(model_dir, "generation_config.json"))
    except ConfigError as error:
        yield f"{field}={model_dir}: {error}"
    yield from special_problems(model_dir, hf_config)
    if num_tokens is None or vocab_size is None:
        return
    if num_tokens > vocab_size:
        sizes = f"the tokenizer in {tokenizer} has {num_tokens} tokens, but the model has vocab_size={vocab_size}"
        yield f"{field}={model_dir}: {sizes}; {_OWN}"
    if foreign := sorted(end for end in ends if end >= num_tokens):
        lacks = f"which the tokenizer in {tokenizer} with its {num_tokens} tokens does not have"
        yield f"{field}={model_dir}: the model ends a response with token {foreign[0]}, {lacks}; {_OWN}"


def special_problems(model_dir: str, hf_config: Fields) -> Iterator[str]:
    """Check that the begin and end tokens in config.json are special tokens of the directory's tokenizer."""
    content = tokenizer_contents(model_dir)
    texts = _texts_of_tokens(content)
    special = {token.get("id") for token in content.get("added_tokens") or () if isinstance(token, dict)}
    if not special:
        return  # the file does not mark special tokens
    ids: dict[str, list[int | None]] = {
        "eos_token_id": [*end_tokens(hf_config)],
        "bos_token_id": [hf_config.integer("bos_token_id", default=None)],
    }
    for key, numbers in ids.items():
        for number in numbers:
            if number in texts and number not in special:
                token = f"{shorten(texts[number], 40)!r} in its tokenizer.json, not a special token"
                yield f"{model_dir}: config.json has {key}={number}, which is {token}; {_OWN}"


def _read(directory: str, name: str) -> Fields:
    """Read a JSON file of a model directory. It is empty if the file is missing."""
    try:
        return read_json(Path(directory, name), where=name, remedy="download or export the model again")
    except MissingFile:
        return Fields({}, name, "")


def _texts_of_tokens(content: Mapping[str, Any]) -> dict[int, str]:
    """Return the text of each token id, or {} if tokenizer.json does not list them."""
    try:
        vocab = content["model"]["vocab"]
        pairs = (
            vocab.items() if isinstance(vocab, Mapping) else ((entry[0], number) for number, entry in enumerate(vocab))
        )
        texts = {int(number): str(text) for text, number in pairs}
        return texts | {int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or ()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _merges(content: Mapping[str, Any]) -> list[str]:
    """Return the merges of a BPE model, which are stored as texts or as pairs."""
    merges = content["model"].get("merges")
    if not isinstance(merges, list):
        return []
    return [merge if isinstance(merge, str) else " ".join(map(str, merge)) for merge in merges if merge]


def _end_of_text(directory: str) -> str | None:
    try:
        end = read_json(Path(directory, "tokenizer_config.json"), limits=INDEX).content.get("eos_token")
    except ConfigError:
        return None
    return end.get("content") if isinstance(end, dict) else end
