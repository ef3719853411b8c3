"""Both ends of a transfer: where an executor reads, and where it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.platform import current_platform


class Sources(Protocol):
    """What is sent: the tensors of a model as this rank holds them, or what is made of them (merged, averaged, cast).

    ``device`` is where the tensors are. ``is_static``: ``open`` always gives the same memory, so each bucket is opened once, for all
    runs, and not closed.
    """

    device: torch.device
    is_static: bool

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """Flat tensors by buffer name, at least those of ``bucket.source_buffers``. A value is cast to the dtype of the wire."""
        ...

    def close(self, bucket: Bucket) -> None:
        """The bucket has been sent and copied: its tensors are not read any more. A few buckets are open at a time."""
        ...


class LiveSources(Sources):
    """The tensors themselves, flat, by buffer name. A rank may hold no part of a model, and still receive."""

    is_static = True

    def __init__(self, flats: Mapping[str, Tensor]):
        self._flats = flats
        self.device = next((flat.device for flat in flats.values()), current_platform().device())

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        return self._flats

    def close(self, bucket: Bucket) -> None: ...


@dataclass(frozen=True, slots=True)
class TransientBuffers:
    """Buffers that exist inside a context only: they are entered, written and left before the next ones are."""

    names: frozenset[str]
    enter: Callable[[], AbstractContextManager[Mapping[str, Tensor]]]


class Destinations(Protocol):
    """Where received elements go."""

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        """Flat tensors by buffer name that a bucket writes, but for those that are transient."""
        ...

    def transient(self, bucket: Bucket) -> Sequence[TransientBuffers]:
        """Buffers that the bucket writes whole, one after the other. None in a bucket whose parts are forwarded."""
        return ()

    def close(self, bucket: Bucket) -> None:
        """The bucket is written: what it completes can be used."""
        ...
