"""Worlds without processes: a gloo world of one rank, and tensor-parallel ranks as threads."""

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
    """Make this process the only rank of a gloo world. The store is a file, so no port is opened."""
    store = dist.FileStore(str(directory / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A gloo world of one rank for the tests of a module."""
    with world_of_one(tmp_path_factory.mktemp("world")):
        yield


@dataclass(slots=True)
class Meeting:
    """The shared state of the threads of a simulated group."""

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

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks, in rank order."""
        self.meeting.tensors[self.number] = value
        self.meeting.barrier.wait()
        everyone = list(self.meeting.tensors)
        self.meeting.barrier.wait()  # no rank may overwrite a part before all ranks have read it
        return everyone

    def reduce(self, tensor: Tensor, op: Any) -> None:
        stacked = torch.stack(self.exchange(tensor.detach().clone()))
        tensor.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
    """Replaces ``torch.distributed.all_reduce``."""
    group.reduce(tensor, op)


@pytest.fixture
def rank_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the threads of :func:`run_ranks` call the collectives of ``torch.distributed``."""
    connect_threads(monkeypatch)


def connect_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the collectives of ``torch.distributed`` for host data, for the threads of :func:`run_ranks`.

    A group that is not a :class:`ThreadGroup` means the world of the thread.
    """

    def world(group: Any = None) -> ThreadGroup:
        return group if isinstance(group, ThreadGroup) else _here.group

    def all_to_all_single(out: Tensor, sent: Tensor, received: list[int], parts: list[int], group: Any = None) -> None:
        everyone = world(group).exchange(sent.split(parts))
        came = [held[world(group).rank()] for held in everyone]
        assert [len(part) for part in came] == received
        out.copy_(torch.cat(came))

    def all_gather(out: list[Tensor], tensor: Tensor, group: Any = None) -> None:
        for mine, theirs in zip(out, world(group).exchange(tensor), strict=True):
            mine.copy_(theirs)

    def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        world(group).reduce(tensor, op)

    def gather(tensor: Tensor, out: list[Tensor] | None = None, group: Any = None, group_dst: int = 0) -> None:
        for mine, theirs in zip(out or [], world(group).exchange(tensor), strict=out is not None):
            mine.copy_(theirs)

    def broadcast(tensor: Tensor, group: Any = None, group_src: int = 0) -> None:
        tensor.copy_(world(group).exchange(tensor.clone())[group_src])

    monkeypatch.setattr("rlhf_mcore.parallel.collectives.world_group", world)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: world(group).rank())
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world(group).size())
    for function in (all_to_all_single, all_gather, all_reduce, gather, broadcast):
        monkeypatch.setattr(dist, function.__name__, function)


_here = threading.local()


def run_ranks(size: int, body: Callable[[ThreadGroup], T]) -> list[T]:
    """Run ``body`` concurrently for each rank. Returns the results in rank order."""
    meeting = Meeting(size)

    def run(rank: int) -> T:
        _here.group = ThreadGroup(meeting, rank)
        try:
            return body(_here.group)
        except BaseException:
            meeting.barrier.abort()  # releases ranks that wait for a failed rank
            raise

    with ThreadPoolExecutor(size) as pool:
        results = [pool.submit(run, rank) for rank in range(size)]
        errors = [error for result in results if (error := result.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [result.result() for result in results]
