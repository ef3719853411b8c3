"""Frames of the sockets between a pool and its workers: JSON texts, each behind its length. Nothing is pickled."""

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
    """Make a frame of a JSON text."""
    if len(text) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(text)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(text)) + text


def encode(value: Any) -> bytes:
    """Make a frame of a value. It is pure ASCII, so that lone surrogates travel too."""
    return pack(json.dumps(value).encode("ascii"))


def decode(buffer: bytearray) -> Iterator[Any]:
    """Take all whole frames from the start of ``buffer``, and yield their values.

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
