"""Check that the table of metrics contains every metric of a real run in tests/e2e."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_mcore.metrics.catalogue import find_metric


def assert_registered(run: Path, *wanted: str) -> None:
    """Assert that every metric in a run directory has an entry, and that each entry in ``wanted`` has a metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {name for line in lines for name in line} - {"step"}
    entries = {name: entry.name if (entry := find_metric(name)) else None for name in names}
    assert names and not (unknown := sorted(name for name, entry in entries.items() if entry is None)), unknown
    assert not (missing := set(wanted) - set(entries.values())), missing
