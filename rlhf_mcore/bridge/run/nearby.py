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
class Nearby:
    """This rank's bytes that others read, the bytes that it reads of others, and the ranks that can read these."""

    mine: Tensor  # [n] uint8
    of: dict[int, Tensor]  # by rank
    readers: frozenset[int]


def share(nbytes: int, wanted: Collection[int]) -> Nearby:
    """Allocate ``nbytes`` that ranks of this machine can map, and map those of the ranks in ``wanted`` that can be. Collective.

    The memory has no name in the file system and no limit of its own, and is gone with the processes that have it mapped. Another
    rank is found through its file descriptor in /proc; a stamp in the memory tells whether it is the right one. Ranks of other
    machines, and those whose processes must not be looked at, are left out.
    """
    stamp, size = os.urandom(16), _STAMP_BYTES + nbytes
    descriptor = os.memfd_create("rlhf_mcore", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None
    mine = torch.empty(size, dtype=torch.uint8)
    if descriptor is not None:
        os.ftruncate(descriptor, size)
        mine = _map(f"/proc/self/fd/{descriptor}", size)
        mine[:16] = torch.frombuffer(bytearray(stamp), dtype=torch.uint8)
    every = all_gather_json([_machine(), os.getpid(), descriptor, size, stamp.hex()])
    of = {rank: found for rank in wanted if (found := _of_rank(every[rank], every[dist.get_rank()][0])) is not None}
    readers = [rank for rank, ranks in enumerate(all_gather_json(sorted(of))) if dist.get_rank() in ranks]
    if descriptor is not None:
        os.close(descriptor)
    return Nearby(mine[_STAMP_BYTES:], of, frozenset(readers))


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
