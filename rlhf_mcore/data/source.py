"""Reads files of prompts into rendered, tokenised and checked ``Prompt`` records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.data_columns import file_keys, row_limits, settings_of
from rlhf_mcore.config.data_rows import (
    RowLimits,
    check_characters,
    check_plain,
    checked_prompt,
    ground_truth,
    mapping,
    read_rows,
    require_column,
)
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.user_functions import load_function
from rlhf_mcore.data.rendering import Renderer
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.data.tokenizer import token_ids
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema import DataConfig

PROMPTS_PER_TOKENIZER_CALL = 512

Row = dict[str, Any]
Transform = Callable[[Row], Row | None]


@dataclass(frozen=True, slots=True)
class PromptBatches:
    """Prompts in the order of a sampler, the same on every rank."""

    prompts: Sequence[Prompt]
    sampler: Sampler

    def next_batch(self) -> list[Prompt]:
        """Return the prompts of the next step."""
        return [self.prompts[place] for place in self.sampler.next_batch()]


@dataclass(slots=True)
class _Draft:
    """A prompt before tokenisation, and its file and row for messages."""

    place: str
    prompt: Prompt


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    field: str = "data.train",
    tools: Sequence[dict[str, Any]] = (),
    note: Callable[[str], None] = lambda text: None,
) -> list[Prompt]:
    """Return all prompts of ``files`` in order, rendered (see ``Renderer``) and tokenised.

    ``Prompt.index`` numbers the rows of all files, including dropped ones, so a rollout's seed does not change with
    ``max_prompt_tokens``; it is therefore not always the position in the returned list. ``field`` names the
    config key in messages. ``tools`` are schemas that the chat template writes into the prompts. ``note`` is
    told how many prompts ``data.overlong_prompts=drop`` leaves out.

    Raises:
        ConfigError: for anything wrong with a file or a row, naming both, and when no prompt is left.
    """
    if not files:
        raise ConfigError(f"{field} is empty; give a list of .parquet or .jsonl files")
    drafts = list(_read_drafts(files, Renderer(tokenizer, cfg.apply_chat_template, tools), cfg, field))
    _refuse_duplicates(drafts)
    _tokenize(drafts, tokenizer)
    return _limit_length(drafts, cfg, field, note)


def _read_drafts(files: Sequence[str], render: Renderer, cfg: DataConfig, field: str) -> Iterator[_Draft]:
    index = 0
    limits, transform = row_limits(cfg), load_transform(cfg.transform)
    answers = settings_of(field)
    for which, (name, keys) in enumerate(zip(files, file_keys(cfg, files, field), strict=True)):
        file, drafts, contents = Path(name), [], []
        for number, (place, row) in enumerate(transformed_rows(file, limits, transform)):
            if row is not None:
                draft, content = _draft_prompt(
                    row, keys, answers, place=place, name=f"{file.stem}#{number}", index=index
                )
                draft.prompt.file = which
                drafts.append(draft)
                contents.append((content, f"{place}, column {keys[0]!r}"))
            index += 1
            if index > limits.max_rows:
                raise ConfigError(
                    f"{field}: more than data.max_rows={limits.max_rows} rows in its files; raise data.max_rows"
                )
        for draft, text in zip(drafts, render.all(contents), strict=True):
            draft.prompt.text = text
            yield draft


def _draft_prompt(
    row: dict[str, Any],
    keys: tuple[str, str | None],
    settings: tuple[str, str],
    *,
    place: str,
    name: str,
    index: int,
) -> tuple[_Draft, Any]:
    """Return a prompt without its text, and the content to be rendered as its text."""
    prompt_key, answer_key = keys
    content = checked_prompt(
        require_column(row, prompt_key, place, setting=settings[0]), f"{place}, column {prompt_key!r}"
    )
    extra_info = mapping(row, "extra_info", place)
    reward_model = mapping(row, "reward_model", place)
    prompt_id = next((str(extra_info[key]) for key in ("prompt_id", "id") if extra_info.get(key) is not None), name)
    if row.get("ability") is not None:
        check_plain(row["ability"], f"{place}, column 'ability'")
        extra_info.setdefault("ability", row["ability"])
    prompt = Prompt(
        prompt_id=prompt_id,
        index=index,
        prompt_ids=[],
        text="",
        data_source=str(row.get("data_source") or "unknown"),
        ground_truth=ground_truth(row, answer_key, place, settings[1]),
        style=str(reward_model.get("style") or "rule"),
        extra_info=extra_info,
        messages=content if isinstance(content, list) else None,
    )
    check_plain(prompt.ground_truth, f"{place}, the answer")
    for column in ("prompt_id", "data_source", "ground_truth", "style"):
        check_characters(getattr(prompt, column), f"{place}, {column}")
    return _Draft(place, prompt), content


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
    """Set ``prompt_ids``. No special tokens are added: the template, or the author of a string, has written them."""
    for start in range(0, len(drafts), PROMPTS_PER_TOKENIZER_CALL):
        part = drafts[start : start + PROMPTS_PER_TOKENIZER_CALL]
        encoded = token_ids(tokenizer, [draft.prompt.text for draft in part])
        for draft, prompt_ids in zip(part, encoded, strict=True):
            if not prompt_ids:
                raise ConfigError(f"{draft.place}: the prompt {draft.prompt.text!r:.60} has no tokens; remove the row")
            draft.prompt.prompt_ids = list(prompt_ids)


def _limit_length(drafts: Sequence[_Draft], cfg: DataConfig, field: str, note: Callable[[str], None]) -> list[Prompt]:
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
    if too_long:
        note(left_out(field, len(too_long), len(drafts), f"data.max_prompt_tokens={cfg.max_prompt_tokens}"))
    return kept


def left_out(field: str, dropped: int, total: int, limit: str) -> str:
    """Tell how many rows of ``field`` are longer than ``limit``."""
    return f"{field}: {dropped:,} of {total:,} rows are longer than {limit} and left out (data.overlong_prompts=drop)"


def load_transform(spec: str | None) -> Transform | None:
    """Return the function that ``data.transform`` names, None if it is not set."""
    return None if spec is None else load_function(spec, "data.transform")


def transformed_rows(file: Path, limits: RowLimits, transform: Transform | None) -> Iterator[tuple[str, Row | None]]:
    """Yield (place, row) as ``read_rows`` does, each row passed through ``transform``; None for a row that it drops.

    Raises:
        ConfigError: as ``read_rows``; or the function fails or does not return a row. The message names the place.
    """
    for place, row in read_rows(file, limits):
        if transform is None:
            yield place, row
            continue
        try:
            changed = transform(row)
        except Exception as error:
            raise ConfigError(
                f"{place}: data.transform failed ({type(error).__name__}: {error}); correct the function"
            ) from error
        if changed is not None and not isinstance(changed, dict):
            raise ConfigError(
                f"{place}: data.transform returned {type(changed).__name__} {changed!r:.60}, not a row (a dict) or None"
            )
        yield place, changed
