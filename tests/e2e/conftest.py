"""Settings that every end-to-end test needs."""

from __future__ import annotations

import os

# Ray keeps the first token of a process, so every cluster of this process uses this token.
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
