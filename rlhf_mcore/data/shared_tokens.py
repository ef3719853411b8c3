"""Tokenises texts once across ranks that all hold the same texts. Each rank encodes a part, and all gather the tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.tokenizer import token_ids
from rlhf_mcore.parallel.collectives import all_gather_rows, all_gather_unique_json, on_every_rank

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS_PER_CALL = 512

Tokens = NDArray[np.int32]


def tokenize(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, field: str, group: dist.ProcessGroup | None
) -> Iterator[Tokens]:
    """Yield the tokens [n] of each text, in order and the same on every rank.

    Collective over ``group``; None: this process alone.

    Rank r tokenises the texts of calls r, r + size, r + 2 * size, ... The ranks gather one round of calls at a time, so
    memory contains little more than the result. A rank may stop early only if all ranks do.

    Raises:
        ConfigError: on every rank, if the tokenizer fails on a text, or the ranks hold different texts. ``field`` names the
        config key.
    """
    calls = [texts[start : start + TEXTS_PER_CALL] for start in range(0, len(texts), TEXTS_PER_CALL)]
    if group is None or group.size() == 1:
        for call in calls:
            yield from _encode(tokenizer, call)
        return
    _require_same_texts(texts, field, group)
    for first in range(0, len(calls), group.size()):
        number = first + group.rank()
        own = calls[number] if number < len(calls) else ()  # the last round may have fewer calls than ranks
        yield from _gather(on_every_rank(partial(_encode, tokenizer, own), group), group)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    return [np.array(ids, np.int32) for ids in token_ids(tokenizer, texts)]


def _gather(tokens: Sequence[Tokens], group: dist.ProcessGroup) -> list[Tokens]:
    """Return the tokens of the texts of all ranks, in rank order."""
    counts = torch.tensor([len(ids) for ids in tokens], dtype=torch.int64)
    values = torch.from_numpy(np.concatenate([np.zeros(0, np.int32), *tokens]))
    ends = all_gather_rows(counts, group).cumsum(0).tolist()
    everything = all_gather_rows(values, group).numpy()
    return [everything[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _require_same_texts(texts: Sequence[str], field: str, group: dist.ProcessGroup) -> None:
    """Check that all ranks hold the same texts. Otherwise a rank would return tokens of other texts.

    Raises:
        ConfigError: the texts differ. The message names the first ranks that differ.
    """
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(f"{len(text)} ".encode())
        digest.update(text.encode())
    kinds = all_gather_unique_json([len(texts), digest.hexdigest()], group)
    if len(kinds) > 1:
        (first, ranks), (other, others) = kinds[:2]
        raise ConfigError(
            f"{field}: ranks hold different rows: rank {ranks[0]} has {first[0]} texts, rank {others[0]} has {other[0]}. "
            "Give every machine the same files; data.transform must return the same row on every rank"
        )
