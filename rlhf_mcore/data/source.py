"""Files of prompts -> rendered, tokenised and checked ``Prompt`` records."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.readers import read_rows, require_column
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema import DataConfig

# NUL ends a string in C code further down (tokenizers, graders); a lone surrogate cannot be encoded as UTF-8 at all.
BAD_CHARACTERS = re.compile("[\x00\ud800-\udfff]")
PROMPTS_PER_TOKENIZER_CALL = 512


@dataclass(slots=True)
class _Draft:
    """A prompt before tokenisation, and where it was found."""

    place: str
    prompt: Prompt


def load_prompts(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, cfg: DataConfig, *, field: str = "data.train"
) -> list[Prompt]:
    """All prompts of ``files`` in order, rendered through the tokenizer's chat template and tokenised.

    ``Prompt.index`` numbers the rows of the concatenation, dropped ones included, so a rollout's seed does not move
    when ``max_prompt_tokens`` does; it is therefore not always the position in the returned list. ``field`` names the
    config key in messages.

    Raises:
        ConfigError: for anything wrong with a file or a row, naming both, and when no prompt is left.
    """
    if not files:
        raise ConfigError(f"{field} is empty; give a list of .parquet or .jsonl files")
    drafts = list(_read_drafts(files, tokenizer, cfg))
    _refuse_duplicates(drafts)
    _tokenize(drafts, tokenizer)
    return _within_length(drafts, cfg, field)


def _read_drafts(files: Sequence[str], tokenizer: PreTrainedTokenizerBase, cfg: DataConfig) -> Iterator[_Draft]:
    index = 0
    for which, file in enumerate(map(Path, files)):
        for number, (place, row) in enumerate(read_rows(file)):
            draft = _Draft(
                place, _draft_prompt(row, tokenizer, cfg, place=place, name=f"{file.stem}#{number}", index=index)
            )
            draft.prompt.file = which
            yield draft
            index += 1


def _draft_prompt(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, cfg: DataConfig, *, place: str, name: str, index: int
) -> Prompt:
    content = require_column(row, cfg.prompt_key, place, setting="data.prompt_key")
    extra_info = _mapping(row, "extra_info", place)
    reward_model = _mapping(row, "reward_model", place)
    prompt_id = next((str(extra_info[key]) for key in ("prompt_id", "id") if extra_info.get(key) is not None), name)
    if row.get("ability") is not None:
        extra_info.setdefault("ability", row["ability"])
    prompt = Prompt(
        prompt_id=prompt_id,
        index=index,
        prompt_ids=[],
        text=render(content, tokenizer, f"{place}, column {cfg.prompt_key!r}"),
        data_source=str(row.get("data_source") or "unknown"),
        ground_truth=_ground_truth(row, reward_model, cfg, place),
        style=str(reward_model.get("style") or "rule"),
        extra_info=extra_info,
    )
    for column in ("prompt_id", "data_source", "ground_truth", "style"):
        check_characters(getattr(prompt, column), f"{place}, {column}")
    return prompt


def _mapping(row: dict[str, Any], key: str, place: str) -> dict[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: column {key!r} must be an object, found {type(value).__name__} {value!r:.60}")
    return dict(value)


def _ground_truth(row: dict[str, Any], reward_model: dict[str, Any], cfg: DataConfig, place: str) -> Any:
    """``data.answer_key`` if it is set, else reward_model.ground_truth, else a column "answer", else None."""
    if cfg.answer_key is not None:
        return require_column(row, cfg.answer_key, place, setting="data.answer_key")
    answer = reward_model.get("ground_truth")
    return answer if answer is not None else row.get("answer")


def render(content: Any, tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    """A list of messages goes through the chat template, a string is used as it is. ``place`` is for messages.

    Raises:
        ConfigError: it is neither, is empty, or the template refuses it.
    """
    if isinstance(content, str):
        check_characters(content, place)
        if not content.strip():
            raise ConfigError(f"{place}: the prompt is empty; remove the row")
        return content
    if not isinstance(content, list):
        raise ConfigError(
            f"{place}: a prompt is a string or a list of {{role, content}}, found {type(content).__name__} "
            f"{content!r:.60}"
        )
    messages = [_message(message, place) for message in content]
    if not any(message["content"].strip() for message in messages):
        raise ConfigError(f"{place}: the prompt is empty; remove the row")
    return _apply_template(messages, tokenizer, place)


def _message(message: Any, place: str) -> dict[str, Any]:
    """A checked message without its null fields (parquet gives every message the fields of all)."""
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise ConfigError(f"{place}: a message needs a text role and a text content, found {message!r:.80}")
    check_characters(message["content"], place)
    return {key: value for key, value in message.items() if value is not None}


def _apply_template(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, place: str) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{place}: the prompt is a list of messages, but the tokenizer has no chat template; "
            "give model.tokenizer_path one with a template, or make the prompts plain strings"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(f"{place}: the chat template refuses these messages (roles {roles}): {error}") from error


def check_characters(value: Any, place: str) -> None:
    """Refuse texts with characters that break what comes later.

    Raises:
        ConfigError: naming the character and its place.
    """
    bad = BAD_CHARACTERS.search(value) if isinstance(value, str) else None
    if bad is not None:
        kind = "a NUL character" if bad.group() == "\x00" else f"a lone surrogate (U+{ord(bad.group()):04X})"
        raise ConfigError(f"{place}: {kind} at character {bad.start()}; clean the text")


def _refuse_duplicates(drafts: Sequence[_Draft]) -> None:
    seen: dict[str, str] = {}
    for draft in drafts:
        prompt_id = draft.prompt.prompt_id
        if prompt_id in seen:
            raise ConfigError(
                f"{draft.place}: prompt_id {prompt_id!r} was already used by {seen[prompt_id]}; ids must be unique: "
                "rename one of the files, or correct extra_info.prompt_id (or extra_info.id)"
            )
        seen[prompt_id] = draft.place


def _tokenize(drafts: Sequence[_Draft], tokenizer: PreTrainedTokenizerBase) -> None:
    """Fill ``prompt_ids``. No special tokens are added: the template, or the author of a string, has written them."""
    for start in range(0, len(drafts), PROMPTS_PER_TOKENIZER_CALL):
        part = drafts[start : start + PROMPTS_PER_TOKENIZER_CALL]
        encoded = tokenizer([draft.prompt.text for draft in part], add_special_tokens=False)["input_ids"]
        for draft, prompt_ids in zip(part, encoded, strict=True):
            if not prompt_ids:
                raise ConfigError(f"{draft.place}: the prompt {draft.prompt.text!r:.60} has no tokens; remove the row")
            draft.prompt.prompt_ids = list(prompt_ids)


def _within_length(drafts: Sequence[_Draft], cfg: DataConfig, field: str) -> list[Prompt]:
    too_long = [draft for draft in drafts if len(draft.prompt.prompt_ids) > cfg.max_prompt_tokens]
    if too_long and cfg.overlong_prompts == "error":
        first = too_long[0]
        longest = max(len(draft.prompt.prompt_ids) for draft in too_long)
        raise ConfigError(
            f"{field}: {len(too_long)} of {len(drafts)} prompts are longer than data.max_prompt_tokens="
            f"{cfg.max_prompt_tokens}; the first is {first.prompt.prompt_id!r} ({first.place}) with "
            f"{len(first.prompt.prompt_ids)} tokens. Set data.max_prompt_tokens={longest}, or "
            "data.overlong_prompts=drop"
        )
    kept = [draft.prompt for draft in drafts if len(draft.prompt.prompt_ids) <= cfg.max_prompt_tokens]
    if not kept:
        raise ConfigError(
            f"{field}: all {len(drafts)} prompts are longer than data.max_prompt_tokens={cfg.max_prompt_tokens}; "
            "raise it"
        )
    return kept
