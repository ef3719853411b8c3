"""Pairs of equal and of different answers, by kind.

``answers.jsonl`` contains a row for each ground truth. Equal answers score 1 under ``math``. Different answers score 0 under
all rules.
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
