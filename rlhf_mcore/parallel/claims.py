"""A counter that the engines of a world share, in the world's store."""

from __future__ import annotations

import secrets

import torch.distributed as dist

from rlhf_mcore.parallel.collectives import broadcast_json
from rlhf_mcore.protocols import EngineRank


class StoreClaims:
    """Gives each of the numbers 0, 1, 2, ... to one engine, in the order of their requests. All ranks build it together."""

    def __init__(self, engine: EngineRank) -> None:
        self._engine = engine
        # A store may see several runs, so the counter's name is random.
        name = broadcast_json(secrets.token_hex(8), 0)
        self._store = dist.PrefixStore(f"claims/{name}", dist.distributed_c10d._get_default_store())
        self._round = self._number = 0

    def begin(self) -> None:
        """Count from 0 again. Every rank calls it equally often."""
        self._round, self._number = self._round + 1, 0

    def claim(self, count: int) -> int:
        """Return the first of ``count`` numbers. All ranks of an engine call it; its lead claims them and shares the result."""
        self._number += 1
        key = f"{self._round}/{self._engine.engine_index}/{self._number}"
        others = dist.get_world_size() // self._engine.num_engines - 1
        if not self._engine.is_lead:
            first = int(self._store.get(key))
            # A store keeps keys until they are deleted.
            if self._store.add(f"{key}/read", 1) == others:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/read")
            return first
        first = int(self._store.add(f"{self._round}", count)) - count
        if others:
            self._store.set(key, str(first))
        return first
