"""Reads prompt files into rendered, tokenised and validated ``Prompt`` records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.image_rows import OWN_TASKS, ImageReader, images_of_row
from rlhf_mcore.data.images import ImageStore
from rlhf_mcore.data.rendering import Renderer
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.data.shared_tokens import tokenize
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.readers.data_rows import (
    check_characters,
    check_plain,
    checked_prompt,
    file_keys,
    ground_truth,
    mapping,
    read_rows,
    require_column,
    settings_of,
)
from rlhf_mcore.readers.model_files import sees_images
from rlhf_mcore.readers.user_functions import load_function
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    import torch.distributed as dist
    from transformers import PreTrainedTokenizerBase

    from rlhf_mcore.config.schema.run import BYTES_PER_ROW
from rlhf_mcore.config.schema import DataConfig

Row = dict[str, Any]
Transform = Callable[[Row], Row | None]
Placed = tuple[str, Prompt]  # (file and row for messages, prompt)


@dataclass(frozen=True, slots=True)
class PromptBatches:
    """Prompt batches in the order of a sampler, the same on every rank."""

    prompts: Sequence[Prompt]
    sampler: Sampler

    def next_batch(self) -> list[Prompt]:
        """Return the prompts of the next step."""
        return [self.prompts[place] for place in self.sampler.next_batch()]


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cfg: DataConfig,
    *,
    field: str = "data.train",
    tools: Sequence[dict[str, Any]] = (),
    note: Callable[[str], None] = lambda text: None,
    group: dist.ProcessGroup | None = None,
    images: ImageReader | None = None,
) -> list[Prompt]:
    """Return all prompts of ``files`` in order, rendered (see ``Renderer``) and tokenised.

    ``Prompt.index`` numbers the rows of all files, including dropped rows, so that the seed of a rollout does not depend on
    ``max_prompt_tokens``. It therefore may differ from the index in the returned list.

    Args:
        field: the config key that names the files, for messages. tools: schemas that the chat template writes into the
        prompts. note: called with the number of prompts that ``data.overlong_prompts=drop`` drops, as text. group: ranks that
        share the tokenising. The call is collective over it and raises on all ranks. None: this process alone. images: reads
        the images of prompts. An image counts as many tokens as the model reads for it. None: the model takes no
            images, and a prompt with images is rejected.

    Raises:
        ConfigError: a file or a row is invalid (the message names both), or no prompt is left.
    """
    if not files:
        raise ConfigError(f"{field} is empty; give a list of .parquet or .jsonl files")

    def read() -> list[Placed]:
        render = Renderer(tokenizer, cfg.apply_chat_template, tools)
        placed = list(_read_prompts(files, render, cfg, field, images))
        _refuse_duplicates(placed)
        return placed

    placed = read() if group is None else on_every_rank(read, group)
    tokens = tokenize([prompt.text for _, prompt in placed], tokenizer, field, group)
    for (place, prompt), prompt_ids in zip(placed, tokens, strict=True):
        if not len(prompt_ids):
            raise ConfigError(f"{place}: the prompt {prompt.text!r:.60} has no tokens; remove the row")
        prompt.prompt_ids = prompt_ids.tolist()
        if images is not None:
            prompt.prompt_ids = images.expand(prompt.prompt_ids, prompt.images, place)
    return _limit_length(placed, cfg, field, note)


def image_reader(run: Path, model_dir: str, data: DataConfig, environment: str | None) -> ImageReader | None:
    """Return the reader for images in the rows of a run, or None if its model takes no images.

    ``run`` is the run directory, ``environment`` its ``environment.function``.

    Raises:
        ConfigError: the model's directory has no usable image processor.
    """
    if not sees_images(model_dir):
        return None
    store = ImageStore.of(run, model_dir, data.image_pixels)
    return ImageReader(store, model_dir, data, asks=environment == OWN_TASKS)


def _read_prompts(
    files: Sequence[str], render: Renderer, cfg: DataConfig, field: str, images: ImageReader | None
) -> Iterator[Placed]:
    """Yield the place of each row and its rendered prompt, not yet tokenised."""
    index = 0
    transform = load_transform(cfg.transform)
    answers = settings_of(field)
    for which, (name, keys) in enumerate(zip(files, file_keys(cfg, files, field), strict=True)):
        file, placed, contents = Path(name), list[Placed](), []
        for number, (place, row) in enumerate(transformed_rows(file, cfg, transform)):
            if row is not None:
                content = require_column(row, keys[0], place, setting=answers[0])
                plain, content, digests = images_of_row(row, content, cfg.image_key, images, file.parent, place)
                prompt = _build_prompt(
                    row, plain, keys, answers[1], place=place, name=f"{file.stem}#{number}", index=index
                )
                prompt.file, prompt.images = which, digests
                placed.append((place, prompt))
                contents.append((content, f"{place}, column {keys[0]!r}"))
            index += 1
            if index > cfg.max_rows:
                raise ConfigError(
                    f"{field}: more than {cfg.max_rows} rows in its files, a row for {BYTES_PER_ROW} bytes of data.max_bytes; "
                    "raise data.max_bytes"
                )
        rendered = render.all(contents, parts=images is not None)
        for (place, prompt), (content, _), text in zip(placed, contents, rendered, strict=True):
            prompt.text = text if images is None else images.written(text)
            if prompt.messages is None and text != content:
                prompt.question = content
            yield place, prompt


def _build_prompt(
    row: dict[str, Any],
    content: Any,
    keys: tuple[str, str | None],
    answer_setting: str,
    *,
    place: str,
    name: str,
    index: int,
) -> Prompt:
    """Return a prompt without its text. ``content`` is its messages or its text, and is validated here."""
    prompt_key, answer_key = keys
    content = checked_prompt(content, f"{place}, column {prompt_key!r}")
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
        ground_truth=ground_truth(row, answer_key, place, answer_setting),
        style=str(reward_model.get("style") or "rule"),
        extra_info=extra_info,
        messages=content if isinstance(content, list) else None,
    )
    check_plain(prompt.ground_truth, f"{place}, the answer")
    for column in ("prompt_id", "data_source", "ground_truth", "style"):
        check_characters(getattr(prompt, column), f"{place}, {column}")
    return prompt


def _refuse_duplicates(placed: Sequence[Placed]) -> None:
    seen: dict[str, str] = {}
    for place, prompt in placed:
        if prompt.prompt_id in seen:
            raise ConfigError(
                f"{place}: prompt_id {prompt.prompt_id!r} was already used by {seen[prompt.prompt_id]}; ids must be unique: "
                "rename one of the files, or correct extra_info.prompt_id (or extra_info.id)"
            )
        seen[prompt.prompt_id] = place


def _limit_length(placed: Sequence[Placed], cfg: DataConfig, field: str, note: Callable[[str], None]) -> list[Prompt]:
    too_long = [(place, prompt) for place, prompt in placed if len(prompt.prompt_ids) > cfg.max_prompt_tokens]
    if too_long and cfg.overlong_prompts == "error":
        place, first = too_long[0]
        longest = max(len(prompt.prompt_ids) for _, prompt in too_long)
        raise ConfigError(
            f"{field}: {len(too_long)} of {len(placed)} prompts are longer than data.max_prompt_tokens="
            f"{cfg.max_prompt_tokens}; the first is {first.prompt_id!r} ({place}) with "
            f"{len(first.prompt_ids)} tokens. Set data.max_prompt_tokens={longest}, or "
            "data.overlong_prompts=drop"
        )
    kept = [prompt for _, prompt in placed if len(prompt.prompt_ids) <= cfg.max_prompt_tokens]
    if not kept:
        raise ConfigError(
            f"{field}: all {len(placed)} prompts are longer than data.max_prompt_tokens={cfg.max_prompt_tokens}; "
            "raise it"
        )
    if too_long:
        note(left_out(field, len(too_long), len(placed), f"data.max_prompt_tokens={cfg.max_prompt_tokens}"))
    return kept


def left_out(field: str, dropped: int, total: int, limit: str) -> str:
    """Return a message with the number of rows in ``field`` that are longer than ``limit``."""
    return (
        f"{field}: {dropped:,} of {total:,} rows are longer than {limit} and are dropped (data.overlong_prompts=drop)"
    )


def load_transform(spec: str | None) -> Transform | None:
    """Return the function of ``data.transform``, or None if it is not set."""
    if spec is None:
        return None
    return load_function(spec, "data.transform")


def transformed_rows(file: Path, limits: DataConfig, transform: Transform | None) -> Iterator[tuple[str, Row | None]]:
    """Yield (place, row) as ``read_rows`` does, each row passed through ``transform``; None for a row that it drops.

    Raises:
        ConfigError: see ``read_rows``; or the function fails or does not return a row. The message names the place.
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
