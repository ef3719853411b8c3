from __future__ import annotations

import pytest

from rlhf_mcore.rewards import http_pool


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between one request and the next after it has failed."""
    monkeypatch.setattr(http_pool, "FIRST_PAUSE_S", 0.01)
