"""Execute batches of messages like NCCL. A rank's next batch starts when all messages of the previous batch are received."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mcore.bridge.run import transports
from rlhf_mcore.bridge.run.transports import GroupLinks

Pair = tuple[int, int]  # sender, receiver


class Group:
    """The part of a process group that an exchange uses."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def batches_of(rank: int, messages: list[Pair], patch: pytest.MonkeyPatch) -> list[list[tuple[int, int, int]]]:
    """Return the batches of a rank. A message is its two ends and its number of bytes, which identifies it."""
    batches: list[list[tuple[int, int, int]]] = []

    def operation(kind: Any, tensor: torch.Tensor, *, group: Any, tag: int, group_peer: int) -> tuple[int, int, int]:
        ends = (rank, group_peer) if kind is dist.isend else (group_peer, rank)
        return (*ends, tensor.numel())

    def start(batch: list[tuple[int, int, int]]) -> list[object]:
        batches.append(batch)
        return [SimpleNamespace(wait=lambda: True)]  # NCCL returns one work per batch

    patch.setattr(dist, "P2POp", operation)
    patch.setattr(dist, "batch_isend_irecv", start)
    patch.setattr(transports, "connect_device", lambda group: None)
    parcels = [(torch.empty(number), ends) for number, ends in enumerate(messages, 1)]
    sends = [(tensor, receiver) for tensor, (sender, receiver) in parcels if sender == rank]
    receives = [(tensor, sender) for tensor, (sender, receiver) in parcels if receiver == rank]
    group: Any = Group(rank)
    waits = GroupLinks(group).exchange(sends, receives, tag=3)
    assert len(waits) == len(batches)
    return batches


def is_carried_out(queues: list[list[list[tuple[int, int, int]]]]) -> bool:
    """Return whether ranks that execute their batches in order finish.

    Two ranks send and receive their messages in the same order.
    """
    while any(queues):
        begun: list[dict[Pair, list[int]]] = [{} for _ in queues]
        for rank, queue in enumerate(queues):
            for sender, receiver, size in queue[0] if queue else []:
                begun[rank].setdefault((sender, receiver), []).append(size)
        taken: set[tuple[int, int, int]] = set()
        for rank, mine in enumerate(begun):
            for (sender, receiver), sizes in mine.items():
                theirs = begun[receiver if rank == sender else sender].get((sender, receiver), [])
                both = list(zip(sizes, theirs, strict=False))
                assert all(a == b for a, b in both), f"{sender} -> {receiver}: sent and received in different orders"
                taken |= {(sender, receiver, a) for a, _ in both}
        if not taken:
            return False
        for queue in queues:
            if queue:
                queue[0] = [message for message in queue[0] if message not in taken]
                if not queue[0]:
                    queue.pop(0)
    return True


RANKS = 5
PAIRS = st.tuples(st.integers(0, RANKS - 1), st.integers(0, RANKS - 1)).filter(lambda ends: ends[0] != ends[1])


@given(messages=st.lists(PAIRS, max_size=40), limit=st.integers(1, 4))
def test_ranks_that_cut_their_messages_into_batches_do_not_wait_for_each_other(
    messages: list[Pair], limit: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "MAX_BATCH", limit)
        queues = [batches_of(rank, messages, patch) for rank in range(RANKS)]
    assert all(0 < len(batch) <= limit for queue in queues for batch in queue)
    assert sorted(size for queue in queues for batch in queue for _, _, size in batch) == sorted(
        [*range(1, len(messages) + 1)] * 2
    )
    assert is_carried_out(queues)


def test_receives_before_sends_in_batches_would_wait() -> None:
    """The check above detects a deadlock. Each rank receives from a rank whose own receive comes first."""
    queues = [[[(1, 0, 1)], [(0, 1, 2)]], [[(0, 1, 2)], [(1, 0, 1)]]]
    assert not is_carried_out(queues)


def test_no_batch_is_larger_than_nccl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = batches_of(0, [(0, peer) for peer in range(1, 301)] + [(peer, 0) for peer in range(1, 301)], monkeypatch)
    assert [len(batch) for batch in batches] == [256, 256, 88]


def test_links_are_connected_before_their_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL connects in the first operation. If it were a message between some ranks, they would wait for the others."""
    events: list[Any] = []
    monkeypatch.setattr(transports, "connect_device", lambda group: events.append(group))
    monkeypatch.setattr(dist, "P2POp", lambda *args, **kwargs: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda batch: events.append("message") or [])
    group: Any = Group(0)
    links = GroupLinks(group)
    assert events == [group]
    links.exchange([(torch.empty(1), 1)], [], 0)
    assert events == [group, "message"]
