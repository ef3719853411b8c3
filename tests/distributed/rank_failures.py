"""Record the exception of a rank in a file, for the test that started the world."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "RLHF_MCORE_TEST_FAILURES"  # the folder of the files


@contextmanager
def record_failure() -> Iterator[None]:
    """Record an exception that leaves this block, and raise it again."""
    try:
        yield
    except Exception as error:
        record = {
            "time": time.monotonic(),  # all processes of a machine share this clock
            "message": str(error) or type(error).__name__,
            "traceback": "".join(traceback.format_exception(error)),
        }
        if folder := os.environ.get(VARIABLE):
            rank = os.environ.get("RANK", "0")
            path = Path(folder, f"rank-{rank}.json")
            path.with_suffix(".new").write_text(json.dumps({"rank": rank, **record}))
            path.with_suffix(".new").rename(path)
        raise


def find_first_failure(folder: Path) -> str:
    """Return the message and the traceback of the rank that failed first, "" if no rank raised.

    Other ranks fail later, because their peer has ended.
    """
    records = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    if not records:
        return ""
    first = min(records, key=lambda record: record["time"])
    return f"{first['message']}\nrank {first['rank']} raised this:\n{first['traceback']}"
