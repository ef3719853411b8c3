"""Test the order of a trainer's calls to remote engines. tests/distributed/test_remote_bridge.py tests real transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf_mcore.bridge.run import remote
from rlhf_mcore.bridge.run.endpoints import HostCopies
from rlhf_mcore.bridge.run.remote import BridgeJob, RemoteBridge, Side
from rlhf_mcore.bridge.run.sync import NoTarget
from rlhf_mcore.geometry import ExpertSizes
from rlhf_mcore.parallel.addresses import LOOPBACK
from rlhf_mcore.parallel.collectives import world_group
from rlhf_mcore.protocols import EngineProcess, GroupSpec, PeersLost, SyncStats
from tests.messages import expect_error
from tests.unit.bridge.geometry import GEOMETRY
from tests.unit.parallel.world import world

__all__ = ["world"]
pytestmark = pytest.mark.usefixtures("world")

JOIN, SYNC = ["pause", "join", "finish", "begin_sync", "finish"], ["pause", "begin_sync", "finish"]


@dataclass
class Engines:
    """A stand-in for :class:`Fleet` that records its calls. ``problems``: results of ``finish``, call by call."""

    processes: list[EngineProcess] = field(default_factory=lambda: [EngineProcess("a", "a1"), EngineProcess("b", "b1")])
    problems: list[list[str]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    specs: list[GroupSpec] = field(default_factory=list)
    synced: list[Any] = field(default_factory=list)

    def pause(self) -> list[EngineProcess]:
        self.told.append("pause")
        return list(self.processes)

    def join(self, specs: Sequence[GroupSpec], bridge: str) -> None:
        self.told.append("join")
        self.specs = list(specs)
        assert remote._JSON.validate_json(bridge) == JOB

    def begin_sync(self, version: int) -> None:
        self.told.append("begin_sync")
        self.synced.append(version)

    def finish(self, timeout_s: float) -> list[str]:
        self.told.append("finish")
        return self.problems.pop(0) if self.problems else []

    def resume(self, version: int) -> None:
        self.told.append("resume")
        self.resumed.append(version)


class End:
    """The trainer's end of a group that does not exist."""

    lost: list[str] = []  # noqa: RUF012 - what syncs raise
    sent: list[Any] = []  # noqa: RUF012 - the sources of syncs

    def __init__(self, side: Side, job: BridgeJob, spec: GroupSpec, listening: Any) -> None:
        listening.close()
        self.sources = side.sources

    def sync(self, version: int) -> SyncStats:
        if self.lost:
            raise PeersLost(self.lost.pop())
        self.sent.append(self.sources)
        return SyncStats(0.0, 0, 0, 7, 11)

    def close(self) -> None: ...


BUCKET: Any = SimpleNamespace(source_buffers=["w"])
JOB = BridgeJob(
    replace(GEOMETRY, experts=ExpertSizes(4, 8, 2, dense_layers=(0, 3))),
    1 << 20,
    verify=True,
    live_cpu_weights=True,
    changing=("x", "y"),
)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    monkeypatch.setattr(remote, "_End", End)
    return Engines()


def bridge_to(engines: Engines, notes: list[str] | None = None) -> RemoteBridge:
    note = [].append if notes is None else notes.append
    return RemoteBridge(Side([], NoTarget()), JOB, world_group(), engines, address=LOOPBACK, timeout_s=9.0, note=note)


def test_a_group_is_made_once_and_kept(engines: Engines) -> None:
    bridge = bridge_to(engines)
    stats = bridge.sync(3)
    assert (stats.sent_bytes, stats.peak_bytes) == (11, 7)
    bridge.sync(4)
    assert engines.told == [*JOIN, "resume", *SYNC, "resume"]
    assert engines.synced == [3, 4]
    (name,), (port,) = {spec.name for spec in engines.specs}, {spec.port for spec in engines.specs}
    assert engines.specs == [GroupSpec(name, LOOPBACK, port, rank, 3, 9.0) for rank in (1, 2)]


def test_a_process_that_was_started_again_is_another_one(engines: Engines) -> None:
    bridge = bridge_to(engines)
    bridge.sync(0)
    engines.processes[1] = EngineProcess("b", "b2")
    bridge.sync(1)
    assert engines.told == [*JOIN, "resume", *JOIN, "resume"]


@pytest.mark.usefixtures("late_cuda")
def test_fault_36_what_was_sent_last_is_kept_and_sent_again(engines: Engines) -> None:
    """Every sync copies its tensors, and a new group gets these copies. The next sync sends the model's current weights."""
    live = torch.zeros(3)
    kept = HostCopies({"w": live})
    End.sent.clear()
    bridge = RemoteBridge(Side([], NoTarget()), JOB, world_group(), engines, address=LOOPBACK, timeout_s=9.0, kept=kept)
    bridge.sync(4)
    live += 1  # the update of step 5
    engines.processes = [EngineProcess("a", "a2")]
    bridge.sync_again()
    assert End.sent == [None, kept] and kept.open(BUCKET)["w"].tolist() == [0, 0, 0]
    bridge.sync(5)
    assert End.sent == [None, kept, None] and kept.open(BUCKET)["w"].tolist() == [1, 1, 1]
    assert engines.synced == [4, 4, 5] and engines.resumed == [4, 4, 5]
    assert engines.told == [*JOIN, "resume"] * 3


@pytest.mark.parametrize("who", ["an engine", "the trainer"])
def test_a_transfer_that_somebody_has_lost_is_made_again_in_another_group(engines: Engines, who: str) -> None:
    notes: list[str] = []
    bridge = bridge_to(engines, notes)
    if who == "an engine":
        engines.problems = [[], ["engine b is gone"]]
    else:
        End.lost.append("Connection closed by peer")
    bridge.sync(5)
    assert engines.told == [*JOIN, *JOIN, "resume"]
    assert engines.synced == [5, 5]
    assert notes == ["some engines did not receive the weights; sending them again to all healthy engines"]


def test_where_nobody_has_failed_and_it_does_not_work_the_run_ends_with_the_reasons(engines: Engines) -> None:
    engines.problems = [["engine a has lost c"]] * 9
    with expect_error(RuntimeError, value=("3 times", "engine a")):
        bridge_to(engines).sync(0)
    assert engines.told == ["pause", "join", "finish"] * 3 + ["pause"]


def test_without_engines_there_is_nothing_to_do(engines: Engines) -> None:
    engines.processes = []
    assert bridge_to(engines).sync(0).sent_bytes == 0
    assert engines.told == ["pause", "resume"]
