"""Pairs of answers that are the same and that are not, by kind.

``answers.jsonl`` holds a row for each ground truth. Equal ones score 1 under ``math``; the others score 0 under every rule.
"""

from __future__ import annotations

import json
from pathlib import Path

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("data").joinpath("answers.jsonl").read_text("utf-8").splitlines()
]
PAIRS = [(row["truth"], each, True) for row in ROWS for each in (row["truth"], *row["same"])]
PAIRS += [(row["truth"], each, False) for row in ROWS for each in row["other"]]
