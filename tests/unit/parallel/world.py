"""Worlds without processes: a gloo world of one, and tensor-parallel ranks that are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@contextmanager
def world_of_one(directory: Path) -> Iterator[None]:
    """This process as the only rank of a gloo world; the store is a file, so no port is opened."""
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo world of one for the tests of a module."""
    with world_of_one(tmp_path_factory.mktemp("world")):
        yield


@dataclass(slots=True)
class Meeting:
    """Where the threads of one simulated group meet."""

    size: int
    barrier: threading.Barrier = field(init=False)
    tensors: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)
        self.tensors = [None] * self.size


@dataclass(slots=True)
class ThreadGroup:
    """A process group whose ranks are threads of this process."""

    meeting: Meeting
    number: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.meeting.size

    def reduce(self, tensor: Tensor, op: Any) -> None:
        self.meeting.tensors[self.number] = tensor.detach().clone()
        self.meeting.barrier.wait()
        stacked = torch.stack(self.meeting.tensors)
        tensor.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))
        self.meeting.barrier.wait()  # nobody may overwrite a part before everybody has read it


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Takes the place of ``torch.distributed.all_reduce``."""
    group.reduce(tensor, op)


def run_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """``body`` once per rank, all at the same time; the results in rank order."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: body(ThreadGroup(meeting, rank)), range(size)))
