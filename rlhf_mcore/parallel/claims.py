"""A counter that engines of a world share, in the store that its ranks have met at."""

from __future__ import annotations

import secrets

import torch.distributed as dist

from rlhf_mcore.parallel.collectives import broadcast_json
from rlhf_mcore.protocols import EngineRank


class StoreClaims:
    """Numbers 0, 1, 2, ... of which each goes to one engine; whoever asks first gets the next. Made by all ranks together."""

    def __init__(self, engine: EngineRank) -> None:
        self._engine = engine
        name = broadcast_json(secrets.token_hex(8), 0)  # of this counter: a store may see several runs
        self._store = dist.PrefixStore(f"claims/{name}", dist.distributed_c10d._get_default_store())
        self._round = self._number = 0

    def begin(self) -> None:
        """Count from 0 again. Every rank calls it equally often."""
        self._round, self._number = self._round + 1, 0

    def claim(self, count: int) -> int:
        """The first of ``count`` numbers. The lead of an engine takes them, and its other ranks, which ask alike, are told."""
        self._number += 1
        told = f"{self._round}/{self._engine.engine_index}/{self._number}"
        others = dist.get_world_size() // self._engine.num_engines - 1
        if not self._engine.is_lead:
            first = int(self._store.get(told))
            if self._store.add(f"{told}/read", 1) == others:  # a store keeps what nobody deletes
                self._store.delete_key(told)
                self._store.delete_key(f"{told}/read")
            return first
        first = int(self._store.add(f"{self._round}", count)) - count
        if others:
            self._store.set(told, str(first))
        return first
