"""Transport messages with NIXL: receivers read them from the registered memory of senders, by RDMA or another UCX transport.

A sender notifies the receiver of the position of a packed message. The receiver reads it into its own registered memory, and NIXL
notifies the sender. The process group is used once, to exchange the addresses of the agents. The Python API is ``nixl._api`` (version
1.5.1) of github.com/ai-dynamo/nixl.
"""

from __future__ import annotations

import importlib
import secrets
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.run.transports import Links, MappedMemory, Parcel, Wait
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.joint_group import connect_device
from rlhf_mcore.platform import current_platform
from rlhf_mcore.protocols import PeersLost

_NOTICE = struct.Struct("<BQIQ")  # packed or read, tag, number of the message, offset in the sender's memory
_PACKED, _READ = 0, 1
_PAUSE_S = 1e-4  # interval between checks for notifications
_Key = tuple[int, int, int, int]  # peer, packed or read, tag, number among the messages of the two ranks in an exchange


@dataclass(frozen=True, slots=True)
class _Peer:
    """The agent of another rank and its registered memory: ``nbytes`` at ``address`` on ``device``."""

    name: str
    address: int
    nbytes: int
    device: int
    metadata: str  # hex


@dataclass(slots=True)
class _Read:
    key: _Key
    flat: Tensor  # [n] uint8
    handle: Any = None  # handle of the transfer; None before it starts


def read_links(group: dist.ProcessGroup, timeout_s: float) -> ReadLinks:
    """Build links over a process group. Collective over the group.

    ``timeout_s``: time that a rank waits for the next notification of its peers.
    """
    connect_device(group)
    api = importlib.import_module("nixl._api")
    # Ranks poll for notifications while they wait. A progress thread made syncs between busy processes 40 times slower.
    options = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent = api.nixl_agent(f"rlhf-mcore-{secrets.token_hex(8)}", options)
    return ReadLinks(agent, group.rank(), lambda mine: all_gather_json(mine, group), timeout_s)


class ReadLinks(Links):
    """The ranks of a group, each with a NIXL agent.

    Sent messages must lie in the memory that ``share`` returns. Other memory is registered when it first receives a message, and stays
    registered.

    Args:
        agent: a ``nixl_agent`` with a backend.
        rank: rank of this process in the group.
        gather: gathers a JSON value from every rank.
        timeout_s: see :func:`read_links`.
    """

    def __init__(self, agent: Any, rank: int, gather: Callable[[Any], list[Any]], timeout_s: float) -> None:
        self._agent, self._rank, self._gather, self._timeout_s = agent, rank, gather, timeout_s
        self._peers: list[_Peer] = []
        self._ranks: dict[str, int] = {}  # agent name -> rank
        self._known: set[int] = set()  # peers whose addresses the agent knows
        self._own = torch.empty(0, dtype=torch.uint8)
        self._receiving: dict[int, Tensor] = {}  # registered memory, by address
        self._notices: dict[_Key, int] = {}  # received and not yet waited for; the values are offsets
        self._lost = ""

    def share(self, nbytes: int, senders: Collection[int], device: torch.device) -> MappedMemory:
        """Allocate and register memory from which peers read messages. Peers do not map it."""
        self._own = torch.empty(nbytes, dtype=torch.uint8, device=device)
        if nbytes:
            self._agent.register_memory([self._own])
        metadata = self._agent.get_agent_metadata().hex()
        mine = [self._agent.name, self._own.data_ptr(), nbytes, max(self._own.get_device(), 0), metadata]
        self._peers = [_Peer(*fields) for fields in self._gather(mine)]
        self._ranks = {peer.name: rank for rank, peer in enumerate(self._peers)}
        return MappedMemory(self._own, {}, frozenset())

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Sequence[Wait]:
        """Notify receivers of the positions of their messages. Returns the waits of received messages, then the waits
        of sent messages.

        A wait for received messages reads them.
        """
        numbers, waits = Counter[int](), list[Wait]()
        reads = [_Read((peer, _PACKED, tag, _next(numbers, peer)), flat) for flat, peer in receives]
        if reads:
            waits.append(partial(self._read, reads))
        numbers.clear()
        if sends:
            current_platform().synchronize()  # packing must be complete before peers read
            keys = [(peer, _READ, tag, _next(numbers, peer)) for _, peer in sends]
            for (flat, peer), (_, _, _, number) in zip(sends, keys, strict=True):
                self._notify(peer, _NOTICE.pack(_PACKED, tag, number, self._offset(flat)))
            waits.append(partial(self._wait_for, keys))
        return waits

    def _offset(self, flat: Tensor) -> int:
        offset = flat.data_ptr() - self._own.data_ptr()
        if not 0 <= offset <= len(self._own) - len(flat):
            raise ValueError(f"a message of {len(flat)} bytes is not in the {len(self._own)} bytes that peers may read")
        return offset

    def _notify(self, peer: int, notice: bytes) -> None:
        self._meet(peer)
        self._ask(self._agent.send_notif, self._peers[peer].name, notice)

    def _read(self, reads: list[_Read]) -> None:
        """Read messages in the order in which their senders pack them."""
        current_platform().synchronize()  # kernels must finish reading the previous contents
        remaining = list(reads)

        def is_done(read: _Read) -> bool:
            if read.handle is None and read.key in self._notices:
                return self._start(read, self._notices.pop(read.key))
            return read.handle is not None and self._has_ended(read)

        self._until_none(remaining, is_done)

    def _wait_for(self, keys: list[_Key]) -> None:
        self._until_none(keys, lambda key: self._notices.pop(key, None) is not None)

    def _start(self, read: _Read, offset: int) -> bool:
        """Start to read a message. Returns whether it has already arrived."""
        peer, _, tag, number = read.key
        there, nbytes = self._peers[peer], len(read.flat)
        if offset + nbytes > there.nbytes:
            raise ValueError(
                f"{nbytes} bytes at {offset} are not in the {there.nbytes} registered bytes of rank {peer}"
            )
        self._meet(peer)
        self._register(read.flat)
        kind = "DRAM" if read.flat.device.type == "cpu" else "VRAM"
        here = self._agent.get_xfer_descs([(read.flat.data_ptr(), nbytes, max(read.flat.get_device(), 0))], kind)
        place = self._agent.get_xfer_descs([(there.address + offset, nbytes, there.device)], kind)
        notice = _NOTICE.pack(_READ, tag, number, offset)
        read.handle = self._ask(self._agent.initialize_xfer, "READ", here, place, there.name, notice)
        return self._has_ended(read, self._ask(self._agent.transfer, read.handle))

    def _has_ended(self, read: _Read, state: str = "") -> bool:
        state = state or self._ask(self._agent.check_xfer_state, read.handle)
        if state == "PROC":
            return False
        if state != "DONE":
            raise self._lose(f"NIXL could not read {len(read.flat)} bytes of rank {read.key[0]}: {state}")
        self._agent.release_xfer_handle(read.handle)
        return True

    def _register(self, flat: Tensor) -> None:
        memory = flat.untyped_storage()
        if flat.numel() and memory.data_ptr() not in self._receiving:
            whole = torch.empty(0, dtype=torch.uint8, device=flat.device).set_(memory)
            self._ask(self._agent.register_memory, [whole])
            self._receiving[memory.data_ptr()] = whole

    def _meet(self, peer: int) -> None:
        if peer not in self._known:
            self._ask(self._agent.add_remote_agent, bytes.fromhex(self._peers[peer].metadata))
            self._known.add(peer)

    def _until_none(self, remaining: list[Any], is_done: Callable[[Any], bool]) -> None:
        """Remove finished items from a list until it is empty.

        Raises:
            PeersLost: no item has finished within the timeout.
        """
        if self._lost:
            raise PeersLost(self._lost)
        deadline = time.monotonic() + self._timeout_s
        while remaining:
            self._receive_notices()
            before = len(remaining)
            remaining[:] = [one for one in remaining if not is_done(one)]
            if len(remaining) < before:
                deadline = time.monotonic() + self._timeout_s
            elif time.monotonic() > deadline:
                raise self._lose(f"{before} NIXL messages were not read within {self._timeout_s:g} s")
            else:
                time.sleep(_PAUSE_S)

    def _receive_notices(self) -> None:
        for name, notices in self._ask(self._agent.get_new_notifs).items():
            for notice in notices:
                kind, tag, number, offset = _NOTICE.unpack(notice)
                self._notices[self._ranks[name], kind, tag, number] = offset

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call the library and convert its errors, which have no common class in all of its versions."""
        try:
            return call(*args)
        except Exception as error:
            raise self._lose(f"NIXL: {type(error).__name__}: {error}") from error

    def _lose(self, problem: str) -> PeersLost:
        self._lost = problem
        return PeersLost(problem)


def _next(numbers: Counter[int], peer: int) -> int:
    numbers[peer] += 1
    return numbers[peer]
