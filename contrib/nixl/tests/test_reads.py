"""Messages that receivers read with NIXL: the calls of the library and, if it is installed, their effects."""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_mcore.bridge.run.transports import PointToPoint
from rlhf_mcore.protocols import PeersLost
from rlhf_mcore_contrib.nixl.reads import ReadLinks

CPU = torch.device("cpu")


@dataclass
class Wire:
    """State that fake agents share: notifications, and the memory that was registered before its metadata was read."""

    notices: dict[str, dict[str, list[bytes]]] = field(default_factory=dict)
    registered: dict[bytes, list[tuple[int, int]]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class FakeAgent:
    """A fake of the used calls of ``nixl._api.nixl_agent`` 1.5.1. A transfer is in progress at the first check and then done.

    Like the library, it rejects transfers of unregistered memory, and transfers from agents whose metadata is unknown.
    """

    def __init__(self, name: str, wire: Wire) -> None:
        self.name, self._wire = name, wire
        self._memory: list[tuple[int, int]] = []
        self._remote: dict[str, list[tuple[int, int]]] = {}
        self.transfers: list[dict[str, Any]] = []
        self.ends = "DONE"
        wire.notices[name] = {}

    def register_memory(self, tensors: list[Tensor]) -> None:
        assert all(tensor.is_contiguous() and tensor.nbytes for tensor in tensors)
        self._memory += [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]

    def get_agent_metadata(self) -> bytes:
        metadata = self.name.encode()
        self._wire.registered[metadata] = list(self._memory)
        return metadata

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._remote[metadata.decode()] = self._wire.registered[metadata]
        return metadata

    def send_notif(self, name: str, notice: bytes) -> None:
        assert name in self._remote, "NIXL_ERR_NOT_FOUND"
        with self._wire.lock:
            self._wire.notices[name].setdefault(self.name, []).append(notice)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        with self._wire.lock:
            notices, self._wire.notices[self.name] = self._wire.notices[self.name], {}
        return notices

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int, int]]:
        assert kind == "DRAM" and all(device == 0 for _, _, device in places)
        return places

    def initialize_xfer(self, operation: str, here: Any, there: Any, name: str, notice: bytes) -> dict[str, Any]:
        assert operation == "READ"
        for (address, nbytes, _), memory in ((here[0], self._memory), (there[0], self._remote[name])):
            assert any(begin <= address and address + nbytes <= end for begin, end in memory), "NIXL_ERR_NOT_FOUND"
        transfer = {"here": here[0], "there": there[0], "name": name, "notice": notice, "released": False}
        self.transfers.append(transfer)
        return transfer

    def transfer(self, handle: dict[str, Any]) -> str:
        return "PROC"

    def check_xfer_state(self, handle: dict[str, Any]) -> str:
        if self.ends == "DONE":
            ctypes.memmove(handle["here"][0], handle["there"][0], handle["here"][1])
            self.send_notif(handle["name"], handle["notice"])
        return self.ends

    def release_xfer_handle(self, handle: dict[str, Any]) -> None:
        assert not handle["released"]
        handle["released"] = True


@pytest.fixture(params=["fake", "nixl"])
def make_agent(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    if request.param == "fake":
        wire = Wire()
        return lambda name: FakeAgent(name, wire)
    api: Any = pytest.importorskip("nixl._api")
    return lambda name: api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))


class Ranks:
    """Ranks as threads. Each rank has links and memory that is registered for sends."""

    def __init__(self, make_agent: Callable[[str], Any], sizes: list[int], timeout_s: float = 60.0) -> None:
        self.agents = [make_agent(f"agent-{rank}") for rank in range(len(sizes))]
        self._meeting, self._said = threading.Barrier(len(sizes)), [None] * len(sizes)
        gathers = [self._gather(rank) for rank in range(len(sizes))]
        self.links = [
            ReadLinks(agent, rank, gather, timeout_s)
            for rank, (agent, gather) in enumerate(zip(self.agents, gathers, strict=True))
        ]
        self.memory = self.run(lambda rank: self.links[rank].share(sizes[rank], [], CPU).own)

    def _gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gather(mine: Any) -> list[Any]:
            self._said[rank] = mine
            self._meeting.wait(60)
            return list(self._said)

        return gather

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.links)) as pool:
            return list(pool.map(body, range(len(self.links))))


def test_messages_in_both_directions_are_read_in_two_runs(make_agent: Callable[[str], Any]) -> None:
    """Rank 0 sends two messages to rank 1, and one of them also to rank 2. Rank 1 sends one to rank 0. Run 2 sends new bytes."""
    ranks = Ranks(make_agent, [300, 100, 0])
    taken = [
        torch.zeros(100, dtype=torch.uint8),
        torch.zeros(300, dtype=torch.uint8),
        torch.zeros(250, dtype=torch.uint8),
    ]

    def transfer(rank: int, first: int) -> None:
        own, into = ranks.memory[rank], taken[rank]
        if len(own):
            own.copy_(torch.arange(len(own)) * (rank + 1) + first)
        sends = [[(own[:250], 1), (own[250:], 1), (own[:250], 2)], [(own, 0)], []][rank]
        receives = [[(into, 1)], [(into[:250], 0), (into[250:], 0)], [(into, 0)]][rank]
        for wait in ranks.links[rank].exchange(sends, receives, tag=4):
            wait()

    for first in (0, 7):
        ranks.run(lambda rank, first=first: transfer(rank, first))
        assert taken[0].tolist() == [(2 * number + first) % 256 for number in range(100)]
        assert taken[1].tolist() == [(number + first) % 256 for number in range(300)]
        assert taken[2].tolist() == [(number + first) % 256 for number in range(250)]


def fake(sizes: list[int], timeout_s: float = 60.0) -> Ranks:
    wire = Wire()
    return Ranks(lambda name: FakeAgent(name, wire), sizes, timeout_s)


def test_a_sender_waits_until_its_message_was_read() -> None:
    ranks = fake([8, 0], timeout_s=0.05)
    (wait,) = ranks.links[0].exchange([(ranks.memory[0], 1)], [], 0)
    with pytest.raises(PeersLost, match=r"1 NIXL messages were not read within 0\.05 s"):
        wait()
    assert ranks.agents[1].transfers == []


def test_each_message_is_one_transfer_of_its_bytes_and_is_released() -> None:
    ranks = fake([96, 0])
    into = torch.zeros(64, dtype=torch.uint8)
    ranks.links[0].exchange([(ranks.memory[0][32:64], 1)], [], 0)
    (wait,) = ranks.links[1].exchange([], [(into[16:48], 0)], 0)
    wait()
    (transfer,) = ranks.agents[1].transfers
    assert transfer["there"] == (ranks.memory[0].data_ptr() + 32, 32, 0)
    assert transfer["here"] == (into.data_ptr() + 16, 32, 0) and transfer["released"]


def test_what_is_not_in_registered_memory_is_neither_offered_nor_read() -> None:
    ranks = fake([64, 0])
    with pytest.raises(ValueError, match="a message of 8 bytes is not in the 64 bytes that peers may read"):
        ranks.links[0].exchange([(torch.zeros(8, dtype=torch.uint8), 1)], [], 0)
    ranks.links[0].exchange([(ranks.memory[0][60:], 1)], [], 1)
    (wait,) = ranks.links[1].exchange(
        [], [(torch.zeros(8, dtype=torch.uint8), 0)], 1
    )  # the sender's message has four bytes
    with pytest.raises(ValueError, match="8 bytes at 60 are not in the 64 registered bytes of rank 0"):
        wait()
    assert ranks.agents[1].transfers == []


def test_a_transfer_that_fails_loses_its_peers_and_nothing_is_waited_for_afterwards() -> None:
    ranks = fake([8, 0])
    ranks.agents[1].ends = "ERR"
    ranks.links[0].exchange([(ranks.memory[0], 1)], [], 0)
    (wait,) = ranks.links[1].exchange([], [(torch.zeros(8, dtype=torch.uint8), 0)], 0)
    with pytest.raises(PeersLost, match="NIXL could not read 8 bytes of rank 0: ERR"):
        wait()
    (later,) = ranks.links[1].exchange([], [(torch.zeros(8, dtype=torch.uint8), 0)], 2)
    with pytest.raises(PeersLost, match="could not read"):
        later()


def test_what_the_library_raises_loses_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = fake([8, 0])

    def disconnect(*args: Any) -> None:
        raise Exception("NIXL_ERR_REMOTE_DISCONNECT")  # pybind11 raises errors of the library as Exception

    monkeypatch.setattr(ranks.agents[0], "send_notif", disconnect)
    with pytest.raises(PeersLost, match="NIXL_ERR_REMOTE_DISCONNECT"):
        ranks.links[0].exchange([(ranks.memory[0], 1)], [], 0)


def test_an_exchange_of_nothing_has_nothing_to_wait_for() -> None:
    """A rank can be idle in a phase."""
    ranks = fake([8, 0])
    assert list(PointToPoint(ranks.links[1])._links.exchange([], [], 0)) == []


def test_the_fake_has_the_calls_of_the_library() -> None:
    pytest.importorskip("nixl._api")
    agent = importlib.import_module("nixl._api").nixl_agent
    calls = {name for name, value in vars(FakeAgent).items() if callable(value) and not name.startswith("_")}
    assert calls <= set(dir(agent))
