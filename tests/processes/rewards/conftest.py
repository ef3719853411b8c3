from __future__ import annotations

from tests.unit.rewards.conftest import short_pauses

__all__ = ["short_pauses"]
