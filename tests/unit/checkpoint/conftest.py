from __future__ import annotations

from tests.unit.parallel.world import world

__all__ = ["world"]
