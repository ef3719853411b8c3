"""Connect the devices of a group in a world of one. A stand-in simulates a waiting NCCL operation."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rlhf_mcore.parallel.addresses import LOOPBACK, listener
from rlhf_mcore.parallel.joint_group import JointGroup, connect_device
from rlhf_mcore.protocols import GroupSpec, PeersLost
from tests.messages import expect_error

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("limit_s", [None, 60.0])
def test_every_rank_sums_one_number_on_its_device(monkeypatch: pytest.MonkeyPatch, limit_s: float | None) -> None:
    summed: list[tuple[list[float], str, Any]] = []

    def all_reduce(tensor: torch.Tensor, group: Any = None) -> None:
        summed.append((tensor.tolist(), tensor.device.type, group))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    connect_device(dist.group.WORLD, limit_s)
    assert summed == [([1.0], "cpu", dist.group.WORLD)]


def test_a_device_that_never_connects_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the limit, the group's own timeout would apply. NCCL ignores that timeout while it connects."""
    forever = threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: forever.wait())
    with expect_error(PeersLost, value=("1 ranks", "0.1 s")):
        connect_device(limit_s=0.1)
    forever.set()


def test_a_group_that_does_not_connect_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    forever = threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda *args, **kwargs: forever.wait())
    listening = listener(LOOPBACK)
    spec = GroupSpec("never connects", LOOPBACK, listening.getsockname()[1], 0, 1, timeout_s=0.2)
    with pytest.raises(PeersLost, match="not connected"):
        JointGroup(spec, listening)
    assert "never connects" not in dist.distributed_c10d._world.pg_names.values()
    forever.set()


def test_what_a_device_raises_while_it_connects_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    with pytest.raises(RuntimeError, match="remote process exited"):
        connect_device(limit_s=60)
