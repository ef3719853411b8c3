"""Build a group of two processes with separate worlds, with torch's bookkeeping. Other ends are forks of this process."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rlhf_mcore.parallel.addresses import LOOPBACK, listener
from rlhf_mcore.parallel.collectives import (
    all_gather_json,
    all_gather_rows,
    all_gather_unique_json,
    broadcast_json,
    gather_json,
    on_every_rank,
    reduce_sums,
)
from rlhf_mcore.parallel.joint_group import JointGroup, connections
from rlhf_mcore.protocols import GroupSpec, PeersLost

pytestmark = pytest.mark.usefixtures("world")  # a world of one, in which this process is rank 0


@contextmanager
def fork(body: Callable[[], None]) -> Iterator[int]:
    """Fork this process, and run ``body`` in the child. The child exits with code 0 if it succeeds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        os._exit(code)
    yield pid
    assert os.waitpid(pid, 0)[1] == 0


@contextmanager
def two(body: Callable[[dist.ProcessGroup], None], name: str) -> Iterator[JointGroup]:
    """Build a group of this process as the second rank and a child that runs ``body``."""
    listening = listener(LOOPBACK)
    port = listening.getsockname()[1]

    def other() -> None:
        group = JointGroup(GroupSpec(name, LOOPBACK, port, 0, 2, 120), listening)
        body(group.group)
        group.close()

    with fork(other):
        listening.close()
        joint = JointGroup(GroupSpec(name, LOOPBACK, port, 1, 2, 120))
        try:
            yield joint
        finally:
            joint.close()


def collectives(group: dist.ProcessGroup) -> list[object]:
    """Run all collectives of the bridge on one rank."""
    rank, peer = group.rank(), 1 - group.rank()
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, group=group, tag=7, group_peer=peer),
            dist.P2POp(dist.isend, sent, group=group, tag=7, group_peer=peer),
        ]
    )
    for work in works:
        work.wait()
    dist.barrier(group)
    rows = torch.full((rank + 1, 2), rank)
    return [
        [dist.get_rank(group), dist.get_world_size(group), rank, group.size()],
        received.tolist(),
        all_gather_json({"rank": rank}, group),
        [broadcast_json(["from", rank], source, group) for source in (0, 1)],
        gather_json(rank, group),
        all_gather_unique_json("alike", group),
        all_gather_unique_json(rank, group),
        all_gather_rows(rows, group).tolist(),
        reduce_sums({"a": 2.0 * rank + 1, "b_max": float(rank)}, group),
        on_every_rank(lambda: rank, group),
    ]


def test_functions_take_it_as_a_group_though_both_ends_are_rank_0_of_their_worlds() -> None:
    def expected_results(rank: int) -> list[object]:
        return [
            [rank, 2, rank, 2],
            [1.0 - rank] * 3,
            [{"rank": 0}, {"rank": 1}],
            [["from", 0], ["from", 1]],
            [0, 1] if rank == 0 else [],
            [("alike", [0, 1])],
            [(0, [0]), (1, [1])],
            [[0, 0], [1, 1], [1, 1]],
            {"a": 4.0, "b_max": 1.0},
            rank,
        ]

    def other(group: dist.ProcessGroup) -> None:
        assert collectives(group) == expected_results(0)

    assert dist.get_rank() == 0
    with two(other, "functions") as joint:
        assert collectives(joint.group) == expected_results(1)
        assert all_gather_json("mine") == ["mine"]  # the world is unchanged


def test_nothing_is_left_of_a_group_that_was_left() -> None:
    def counts() -> list[int]:
        return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(c10d._world.pg_names)]

    def round(number: int) -> None:
        with two(dist.barrier, f"left {number}") as joint:
            dist.barrier(joint.group)  # a rank that leaves while the other connects makes the other fail
            assert joint.group in c10d._world.pg_group_ranks
        joint.close()  # a second call has no effect

    round(0)  # the first group of a process may start permanent threads
    before = counts()
    for number in range(1, 6):
        round(number)
    until = time.monotonic() + 60
    while counts() != before and time.monotonic() < until:  # the threads of the last group end when they are joined
        time.sleep(0.01)
    assert counts() == before


def test_who_waits_for_a_rank_that_leaves_is_told_even_if_something_refers_to_the_group() -> None:
    def leaves(group: dist.ProcessGroup) -> None:
        dist.barrier(group)  # the other rank has connected
        held.append(group)

    held: list[dist.ProcessGroup] = []
    with two(leaves, "leaves") as joint:
        dist.barrier(joint.group)
        with pytest.raises(PeersLost), connections():
            all_gather_json("anybody?", joint.group)


def test_who_does_not_come_is_not_waited_for_longer_than_was_said() -> None:
    listening = listener(LOOPBACK)
    spec = GroupSpec("alone", LOOPBACK, listening.getsockname()[1], 0, 2, timeout_s=0.2)
    with pytest.raises(PeersLost):
        JointGroup(spec, listening)
    assert "alone" not in c10d._world.pg_names.values()


def test_a_process_without_a_world_can_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(c10d._world, "_default_pg", None)
    with two(dist.barrier, "no world") as joint:
        dist.barrier(joint.group)
        assert joint.group.rank() == 1
