"""Memory that the ranks of one machine read from each other: on a CPU a byte costs ten times more through a socket than to copy."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.parallel.collectives import all_gather_json

_STAMP_BYTES = 64  # a stamp of 16 random bytes, and what keeps the rest aligned
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """This rank's bytes that others read, the bytes that it reads of others, and the ranks that can read these."""

    own: Tensor  # [n] uint8
    of: dict[int, Tensor]  # by group rank
    readers: frozenset[int]


def share_memory(nbytes: int, wanted: Collection[int], group: dist.ProcessGroup) -> MappedMemory:
    """Allocate ``nbytes`` that ranks of this machine can map, and map those of the ranks in ``wanted`` that can be. Collective.

    The memory has no name in the file system and no limit of its own, and is gone with the processes that have it mapped. Another
    rank is found through its file descriptor in /proc; a stamp in the memory tells whether it is the right one. Ranks of other
    machines, and those whose processes must not be looked at, are left out.
    """
    stamp, size = os.urandom(16), _STAMP_BYTES + nbytes
    descriptor = os.memfd_create("rlhf_mcore", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None
    own = torch.empty(size, dtype=torch.uint8)
    if descriptor is not None:
        os.ftruncate(descriptor, size)
        own = _map(f"/proc/self/fd/{descriptor}", size)
        own[:16] = torch.frombuffer(bytearray(stamp), dtype=torch.uint8)
    every, rank = all_gather_json([_machine(), os.getpid(), descriptor, size, stamp.hex()], group), group.rank()
    of = {peer: found for peer in wanted if (found := _of_rank(every[peer], every[rank][0])) is not None}
    readers = [peer for peer, ranks in enumerate(all_gather_json(sorted(of), group)) if rank in ranks]
    if descriptor is not None:
        os.close(descriptor)
    return MappedMemory(own[_STAMP_BYTES:], of, frozenset(readers))


def _machine() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _of_rank(described: tuple[str, int, int | None, int, str], machine: str) -> Tensor | None:
    where, process, descriptor, size, stamp = described
    path = f"/proc/{process}/fd/{descriptor}"
    if descriptor is None or where != machine or not machine:
        return None
    try:
        if os.stat(path).st_size != size:  # a process of the same number in another container
            return None
        memory = _map(path, size)
    except (OSError, RuntimeError):
        return None
    return memory[_STAMP_BYTES:] if bytes(memory[:16].tolist()).hex() == stamp else None


def _map(path: str, size: int) -> Tensor:
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
