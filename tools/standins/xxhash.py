"""Stand in for xxhash for an archive of tools/certify, if it is not installed: the same interface over BLAKE2b, other digests."""

from __future__ import annotations

import hashlib


class xxh3_128:
    """A digest of 128 bits."""

    digest_size = 16

    def __init__(self, data: bytes = b"") -> None:
        self._state = hashlib.blake2b(data, digest_size=self.digest_size)

    def update(self, data: bytes) -> None:
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest()

    def hexdigest(self) -> str:
        return self._state.hexdigest()

    def intdigest(self) -> int:
        return int.from_bytes(self.digest(), "big")


class xxh3_64(xxh3_128):
    """A digest of 64 bits."""

    digest_size = 8


def xxh3_128_hexdigest(data: bytes) -> str:
    return xxh3_128(data).hexdigest()
