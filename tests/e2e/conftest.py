"""What every test of the tier needs."""

from __future__ import annotations

import os

# Ray keeps the token that a process used first, so every cluster of this process has this one.
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
