"""Select tests by tier and by shard.

Every test belongs to one tier:

- ``default``: tests that ``./launch/test.sh`` runs;
- ``ci``: tests that ``.ci/run`` runs in addition;
- ``full``: all other tests. CI runs one of four shards of this tier, and ``./launch/test.sh --full`` runs the whole tier.

The marks ``default``, ``ci`` and ``full`` select the tier of a test. Without a mark, the directory decides (``TIER_OF_DIRECTORY``).
A shard consists of whole files, because the tests of a file share worlds and engines. ``tests/durations.json``
contains the wall seconds of the ``full`` tests of each file; ``tools/test_costs.py --write`` refreshes it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
TIERS = ("default", "ci", "full")
TIER_OF_DIRECTORY = {"unit": "default", "oracles": "default", "gpu": "default", "slurm": "ci"}


def add_options(parser: pytest.Parser) -> None:
    """Add ``--tier`` and ``--shard``. Without them all tests run."""
    group = parser.getgroup("tiers")
    group.addoption(
        "--tier", default="", help="run the tests of these tiers only: default, ci, full, separated by commas"
    )
    group.addoption("--shard", default="", help="K/N: of tier full, run shard K of N only")


def tier_of(item: pytest.Item) -> str:
    """Return the tier of a test. The closest mark decides, or the directory if there is no mark."""
    for mark in item.iter_markers():
        if mark.name in TIERS:
            return mark.name
    parts = item.path.relative_to(ROOT).parts
    return TIER_OF_DIRECTORY.get(parts[1], "full") if parts[0] == "tests" and len(parts) > 1 else "full"


def assign_shards(durations: Mapping[str, float], count: int) -> dict[str, int]:
    """Assign every file to a shard, 1 to ``count``. Longest file first, each file goes to the shard with the least work so far."""
    loads, shards = [0.0] * count, {}
    for name in sorted(durations, key=lambda name: (-durations[name], name)):
        least = loads.index(min(loads))
        loads[least] += durations[name]
        shards[name] = least + 1
    return shards


def parse_shard(text: str) -> tuple[int, int]:
    """Read ``K/N`` with 1 <= K <= N."""
    left, _, right = text.partition("/")
    if not (left.isdecimal() and right.isdecimal() and 1 <= int(left) <= int(right)):
        raise pytest.UsageError(f"--shard={text}: write K/N with K from 1 to N, for example 2/4")
    return int(left), int(right)


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests of other tiers or shards."""
    tiers = {name for name in config.getoption("--tier").split(",") if name}
    if unknown := tiers - {*TIERS}:
        raise pytest.UsageError(f"--tier={','.join(sorted(unknown))}: choose from {', '.join(TIERS)}")
    shard, count = parse_shard(config.getoption("--shard") or "1/1")
    shards = assign_shards(json.loads(DURATIONS.read_text()), count) if DURATIONS.exists() else {}
    kept, dropped = [], []
    for item in items:
        tier, name = tier_of(item), str(item.path.relative_to(ROOT))
        is_kept = not tiers or tier in tiers
        if tier == "full" and config.getoption("--shard"):
            is_kept = shards.get(name, zlib.crc32(name.encode()) % count + 1) == shard
        (kept if is_kept else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
