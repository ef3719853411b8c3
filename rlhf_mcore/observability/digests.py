"""Short names for contents: BLAKE2b, 16 hexadecimal digits. They tell contents apart, they do not protect anything."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

DIGEST_BYTES = 8
READ_BYTES = 1 << 20
SKETCH_BLOCKS = 256
SKETCH_BLOCK_BYTES = 4096


def digest_of_json(content: Any) -> str:
    """Of a JSON-able value."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def digest_of_file(file: Path) -> str:
    """Of all bytes of a file."""
    state = blake2b(digest_size=DIGEST_BYTES)
    with file.expanduser().open("rb") as content:
        while block := content.read(READ_BYTES):
            state.update(block)
    return state.hexdigest()


def sketch_of_file(file: Path) -> str:
    """Of the size of a file of weights and of blocks spread over it: training changes every tensor, so a megabyte is enough."""
    size = file.stat().st_size
    state = blake2b(str(size).encode(), digest_size=DIGEST_BYTES)
    with file.open("rb") as content:
        last = max(size - SKETCH_BLOCK_BYTES, 0)
        for block in range(SKETCH_BLOCKS + 1):
            content.seek(last * block // SKETCH_BLOCKS)
            state.update(content.read(SKETCH_BLOCK_BYTES))
    return state.hexdigest()
