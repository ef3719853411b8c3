"""State that ranks share in the store of their world: a progress counter, and a counter of claimed numbers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions

from rlhf_mcore.parallel.collectives import broadcast_json, world_group
from rlhf_mcore.protocols import PeersLost

POLL_S = 1.0
_FOREVER = timedelta(days=3650)


class SharedProgress:
    """A barrier of the world without a fixed deadline, with a progress counter in the world's store.

    All ranks build it together.

    The deadline of a collective starts when the first rank enters. A rank that samples a long response would miss it.
    The barrier is a sum on the host, so it fails at once if another process stops.

    Args:
        limit_s: seconds to wait without progress of any rank.
        beat: reports progress to the watchdog.
    """

    def __init__(self, limit_s: float, beat: Callable[[], object]) -> None:
        self._limit_s, self._beat = limit_s, beat
        # A store can serve several runs, so the counter has a random name.
        self._key = f"progress/{broadcast_json(secrets.token_hex(8), 0)}"
        self._store = dist.distributed_c10d._get_default_store()

    def note(self) -> None:
        """Report progress of this rank, about once per second."""
        self._beat()
        self._store.add(self._key, 1)

    def wait(self) -> None:
        """Wait until all ranks arrive. Collective over the world.

        Raises:
            PeersLost: no rank made progress for ``limit_s``.
        """
        options = AllreduceOptions()
        options.timeout = _FOREVER
        work = world_group().allreduce([torch.zeros(1)], options)
        seen, since = -1, time.monotonic()
        while not work.is_completed():
            try:
                work.wait(timedelta(seconds=POLL_S))
            except RuntimeError:  # not yet complete, or failed
                if work.is_completed():
                    break
            if (count := self._store.add(self._key, 0)) != seen:
                seen, since = count, time.monotonic()
                self._beat()
            elif time.monotonic() - since > self._limit_s:
                raise PeersLost(
                    f"other ranks are still sampling, but no rank generated a token for {self._limit_s:g} s "
                    "(trainer.collective_timeout_s)"
                )
        work.wait()


class StoreClaims:
    """Give each of the numbers 0, 1, 2, ... to one engine, in the order of requests.

    All ranks build it together. Only the leads of engines use it.
    """

    def __init__(self) -> None:
        # A store can serve several runs, so the counter has a random name.
        name = broadcast_json(secrets.token_hex(8), 0)
        self._store = dist.PrefixStore(f"claims/{name}", dist.distributed_c10d._get_default_store())
        self._round = 0

    def begin(self) -> None:
        """Restart counting at 0. Every engine calls it the same number of times."""
        self._round += 1

    def claim(self, count: int) -> int:
        """Return the first of ``count`` numbers."""
        return int(self._store.add(f"{self._round}", count)) - count
