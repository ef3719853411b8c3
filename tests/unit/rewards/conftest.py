from __future__ import annotations

import pytest

from rlhf_mcore.rewards import http_pool


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses before retries of failed requests."""
    monkeypatch.setattr(http_pool, "FIRST_PAUSE_S", 0.01)
