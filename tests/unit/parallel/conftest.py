from __future__ import annotations

from tests.unit.parallel.world import rank_threads, world

__all__ = ["rank_threads", "world"]
