"""How a pool and its workers talk over a socket: JSON texts, each behind its length. Nothing is pickled."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

MAX_FRAME_BYTES = 2**28  # what is longer was not written by a worker of ours
DISCONNECTED = 74  # EX_IOERR of sysexits.h: a worker ends with it when it cannot send
_LENGTH = struct.Struct("!I")


class FrameError(ValueError):
    """Bytes that are no frame."""


def pack(text: bytes) -> bytes:
    """One frame that holds a JSON text."""
    if len(text) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(text)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(text)) + text


def encode(value: Any) -> bytes:
    """One frame that holds a JSON-able value. Pure ASCII, so that lone surrogates travel too."""
    return pack(json.dumps(value).encode("ascii"))


def decode(buffer: bytearray) -> Iterator[Any]:
    """The values of all whole frames at the start of ``buffer``, which are taken out of it.

    Raises:
        FrameError: they are not frames.
    """
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a message of {length} bytes is announced")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        text = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        try:
            yield json.loads(text)
        except ValueError as error:
            raise FrameError(f"a message is not JSON: {error}") from error
