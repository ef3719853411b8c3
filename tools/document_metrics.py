#!/usr/bin/env python3
"""Write the tables of docs/metrics.md, which follow from rlhf_mcore/metrics/catalogue.py, again.

    .venv/bin/python tools/document_metrics.py

The text above the first table is kept as it is. A test compares the page with what is made here.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlhf_mcore.metrics.catalogue import GROUPS, Metric  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
_START = f"\n## {next(iter(GROUPS))}\n"


def page(text: str) -> str:
    """Write the page with the head of ``text`` and new tables."""
    parts = [text[: text.index(_START)]]
    for title, metrics in GROUPS.items():
        rows = ["| metric | meaning | unit | healthy | what to do |", "|---|---|---|---|---|", *map(_row, metrics)]
        parts.append(f"\n## {title}\n\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _row(metric: Metric) -> str:
    cells = [f"`{metric.name}`", metric.meaning, metric.unit, metric.range, metric.what_to_do]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
