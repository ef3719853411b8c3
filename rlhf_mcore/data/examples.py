"""Reads files with given responses into tokenised examples, for supervised fine-tuning and for reward models.

The tokens equal the tokens of a rollout: the prompt as ``load_prompts`` renders it, the response text, and the end-of-sequence
token. Training therefore sees the same tokens as later generation and scoring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.data import prefixes
from rlhf_mcore.data.image_rows import ImageReader, images_of_row
from rlhf_mcore.data.rendering import Renderer
from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.data.shared_tokens import Tokens, tokenize
from rlhf_mcore.data.source import left_out, load_transform, transformed_rows
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.parallel.rows import owners_of
from rlhf_mcore.readers.data_rows import example_contents
from rlhf_mcore.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, eq=False)
class TokenizedExample:
    """A prompt with one response, or with a chosen and a rejected response. Every rank holds all examples."""

    place: str
    prompt_ids: Tokens
    response_ids: list[Tokens]
    images: tuple[str, ...] = ()  # image digests of the prompt
    reference_logprobs: list[float] | None = None  # one per response, if they are computed before training

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the longest row."""
        return len(self.prompt_ids) + max(map(len, self.response_ids))


@dataclass(slots=True)
class _Texts:
    place: str
    prompt: str
    responses: list[str]
    images: tuple[str, ...]


def load_examples(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    columns: Mapping[str, str] | Sequence[Mapping[str, str]],
    *,
    max_tokens: int,
    drop_longer: bool,
    field: str = "data.train",
    data: DataConfig | None = None,
    note: Callable[[str], None] = lambda text: None,
    group: dist.ProcessGroup | None = None,
    images: ImageReader | None = None,
) -> list[TokenizedExample]:
    """Return all examples of ``files`` in order.

    Args:
        columns: the columns of the prompt and of its responses, in this order, by the config keys that name them; or one such
        mapping
            per file. A file with single responses may instead have a column "messages", whose last message is the response.
        max_tokens: limit for prompt and response together. drop_longer: drop longer examples instead of rejecting them.
        field: the config key that names the files, for messages. data: how to read and render rows; None: the defaults. note:
        called with the number of dropped examples as text. group: ranks that share the tokenising. The call is collective
        over it and raises on all ranks. None: this process alone. images: reads the images of prompts. An image counts as
        many tokens as the model reads for it. None: the model takes no images.

    Raises:
        ConfigError: a file or a row is invalid (the message names both), or no example is left.
    """
    per_file = [columns] * len(files) if isinstance(columns, Mapping) else columns
    data = data or DataConfig()

    def read() -> list[_Texts]:
        return list(_read_texts(files, per_file, Renderer(tokenizer, data.apply_chat_template), data, images))

    rows = read() if group is None else on_every_rank(read, group)
    tokens = tokenize([text for row in rows for text in (row.prompt, *row.responses)], tokenizer, field, group)
    examples = list(_pair(rows, tokens, int(tokenizer.eos_token_id)))
    if equal := [example for example in examples if _has_equal_responses(example)]:
        if len(equal) == len(examples):
            raise ConfigError(
                f"{field}: chosen and rejected are equal in all {len(examples)} pairs; correct the files, or the keys of the columns"
            )
        note(
            f"{field}: {len(equal):,} of {len(examples):,} pairs have equal responses and are dropped; the first is {equal[0].place}"
        )
        examples = [example for example in examples if not _has_equal_responses(example)]
    if images is not None:
        for example in examples:
            expanded = images.expand(example.prompt_ids.tolist(), example.images, example.place)
            example.prompt_ids = np.array(expanded, np.int32)
    longer = [example for example in examples if example.num_tokens > max_tokens]
    if longer and not drop_longer:
        longest = max(example.num_tokens for example in longer)
        raise ConfigError(
            f"{field}: {len(longer)} of {len(examples)} examples are longer than {max_tokens} tokens, the longest has {longest}; the "
            f"first is {longer[0].place}. The limit is data.max_tokens, the size of a microbatch "
            "(trainer.max_tokens_per_microbatch) or the positions of the model: raise it, or set data.overlong_prompts=drop"
        )
    kept = [example for example in examples if example.num_tokens <= max_tokens]
    if not kept:
        raise ConfigError(
            f"{field}: all {len(examples)} examples are longer than {max_tokens} tokens; raise data.max_tokens"
        )
    if longer:
        note(left_out(field, len(longer), len(examples), f"{max_tokens} tokens"))
    return kept


def example_batch(examples: Sequence[TokenizedExample], *, with_mismatched: bool = False) -> TrainBatch:
    """Build a batch from the rows of the examples, in order. ``group_ids`` are the numbers of the examples.

    ``with_mismatched`` adds a batch with the same prompts, each with the responses to the previous prompt. Every rank of the
    world passes the same examples and keeps the tokens of its own rows. Local.
    """
    batch = _batch_of(examples)
    if with_mismatched:
        batch.mismatched = _batch_of(_mismatch(examples))
    return batch


def _mismatch(examples: Sequence[TokenizedExample]) -> list[TokenizedExample]:
    """Give each prompt the responses to the previous prompt, cut so that no row is longer than the longest example."""
    longest = max(example.num_tokens for example in examples)
    others = [examples[-1], *examples[:-1]]
    return [
        TokenizedExample(
            example.place,
            example.prompt_ids,
            [response[: longest - len(example.prompt_ids)] for response in other.response_ids],
            example.images,
        )
        for example, other in zip(examples, others, strict=True)
    ]


def _batch_of(examples: Sequence[TokenizedExample]) -> TrainBatch:
    tokens = [(example.prompt_ids, response) for example in examples for response in example.response_ids]
    lengths = np.array([len(prompt) + len(response) for prompt, response in tokens], dtype=np.int64)
    owners = owners_of(lengths, dist.get_world_size())
    rows = np.flatnonzero(owners == dist.get_rank())
    owned = [tokens[row] for row in rows]
    token_ids = [part for row in owned for part in row]
    masks = [np.arange(len(prompt) + len(response)) >= len(prompt) for prompt, response in owned]
    flat_ids = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *token_ids]))
    seen = [example.images for example in examples for _ in example.response_ids]
    known = [value for example in examples for value in example.reference_logprobs or ()]
    return TrainBatch(
        lengths=torch.from_numpy(lengths),
        num_sampled=torch.tensor([len(response) for _, response in tokens], dtype=torch.int64),
        scores=torch.zeros(len(tokens), dtype=torch.float64),
        truncated=torch.zeros(len(tokens), dtype=torch.bool),
        group_ids=torch.tensor([place for place, e in enumerate(examples) for _ in e.response_ids], dtype=torch.int64),
        owners=torch.from_numpy(owners),
        rows=torch.from_numpy(rows),
        token_ids=flat_ids,
        loss_mask=torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *masks])),
        rollout_logprobs=torch.zeros(len(flat_ids)),
        images={row: [digests] for row, digests in enumerate(seen) if digests},
        computed=_computed_tokens(tokens),
        ref_logprobs=_at_last_tokens([known[row] for row in rows], lengths[rows]) if known else None,
    )


def _computed_tokens(tokens: Sequence[tuple[Any, Any]]) -> Tensor:
    """Return ``TrainBatch.computed`` for rows that consist of a prompt and a response."""
    shared = [len(prompt) if len(prompt) >= prefixes.SHORTEST else 0 for prompt, _ in tokens]
    return torch.tensor(
        [(len(prompt) + len(response), own) for (prompt, response), own in zip(tokens, shared, strict=True)]
    )


def _at_last_tokens(values: Sequence[float], lengths: NDArray[np.int64]) -> Tensor:
    """Return the value of each row at its last token, and zero elsewhere: [N] float32. A sum over a row gives its value."""
    placed = torch.zeros(int(lengths.sum()))
    placed[torch.from_numpy(lengths.cumsum() - 1)] = torch.tensor(values, dtype=torch.float32)
    return placed


@dataclass(frozen=True, slots=True)
class ExampleBatches:
    """Example batches in the order of a sampler."""

    examples: Sequence[TokenizedExample]
    sampler: Sampler
    build: Callable[[Sequence[TokenizedExample]], TrainBatch] = example_batch

    def next_batch(self, step: int) -> tuple[TrainBatch, Mapping[str, float]]:
        """Return the rows of the next step, without metrics. The sampler counts the steps."""
        return self.build([self.examples[place] for place in self.sampler.next_batch()]), {}


def _read_texts(
    files: Sequence[str],
    columns: Sequence[Mapping[str, str]],
    render: Renderer,
    data: DataConfig,
    images: ImageReader | None,
) -> Iterator[_Texts]:
    transform = load_transform(data.transform)
    for file, wanted in zip(files, columns, strict=True):
        rows = transformed_rows(Path(file), data, transform)
        contents, answers, digests = [], [], []
        for place, row in rows:
            if row is None:
                continue
            _, content, responses = example_contents(row, wanted, place)
            _, content, own = images_of_row(row, content, data.image_key, images, Path(file).parent, place)
            contents.append((content, f"{place}, prompt"))
            answers.append((place, responses))
            digests.append(own)
        prompts = render.all(contents, parts=images is not None)
        for text, (place, responses), own in zip(prompts, answers, digests, strict=True):
            yield _Texts(place, text if images is None else images.written(text), responses, own)


def _pair(rows: Iterable[_Texts], tokens: Iterator[Tokens], eos_token_id: int) -> Iterator[TokenizedExample]:
    """Yield the example of each row. ``tokens`` yields, row by row, the prompt tokens and then the tokens of each response."""
    for row in rows:
        prompt_ids = next(tokens)
        if not len(prompt_ids):
            raise ConfigError(f"{row.place}: the prompt {row.prompt!r:.60} has no tokens; remove the row")
        responses = [_end(next(tokens), eos_token_id) for _ in row.responses]
        yield TokenizedExample(row.place, prompt_ids, responses, row.images)


def _has_equal_responses(example: TokenizedExample) -> bool:
    """Return whether the two responses of a pair have the same tokens, so that there is no preference to learn."""
    responses = example.response_ids
    return len(responses) == 2 and np.array_equal(responses[0], responses[1])


def _end(response_ids: Tokens, eos_token_id: int) -> Tokens:
    has_ended = len(response_ids) > 0 and response_ids[-1] == eos_token_id
    return response_ids if has_ended else np.append(response_ids, np.int32(eos_token_id))
