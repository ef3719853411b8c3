"""Places: local tensors described in Hugging Face coordinates, and the sets of ranks that hold them alike.

Ranks of the same layout position (same tensor, pipeline and expert coordinates; any data-parallel coordinate) hold the same pieces
at the same local views. They are described once, with their ranks as an arithmetic progression, so the description of 16,384
ranks is no longer than that of one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.bridge.map.regions import Piece

Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Place:
    """One local tensor as it is stored on each of ``ranks`` (ascending; a range where the layout is regular).

    ``numel`` counts the local tensor's elements; ``padding`` lists half-open intervals of them that no Hugging Face tensor fills.
    Both are used by :func:`rlhf_mcore.bridge.map.coverage.check_coverage` only; ``numel`` 0 means that the size is not known.
    """

    buffer: str
    pieces: tuple[Piece, ...]
    ranks: Sequence[int]
    numel: int = 0
    padding: tuple[tuple[int, int], ...] = ()


class RankSets:
    """Numbers the distinct sets of ranks that places mention, in order of first mention."""

    def __init__(self) -> None:
        self._numbers: dict[Sequence[int], int] = {}
        self._unions: dict[frozenset[int], Ranks] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, ranks: Sequence[int]) -> int:
        """The number of a set of ranks, new or known."""
        key = ranks if isinstance(ranks, range) else tuple(ranks)
        known = self._numbers.get(key)
        if known is None:
            if len(key) == 0 or key[0] < 0 or any(a >= b for a, b in pairwise(key)):
                raise ValueError(f"ranks of a place must be ascending and not negative, got {key}")
            known = self._numbers[key] = len(self._numbers)
        return known

    @property
    def world_size(self) -> int:
        """One more than the highest rank mentioned."""
        return max((ranks[-1] for ranks in self._numbers), default=-1) + 1

    def containing(self, rank: int) -> frozenset[int]:
        """Numbers of the sets that a rank belongs to."""
        return frozenset(number for ranks, number in self._numbers.items() if rank in ranks)

    def union(self, numbers: frozenset[int]) -> Ranks:
        """Ascending ranks of the union of some sets."""
        if numbers not in self._unions:
            every = list(self._numbers)
            self._unions[numbers] = np.unique(np.concatenate([np.asarray(every[n], dtype=np.int64) for n in numbers]))
        return self._unions[numbers]

    def profiles(self) -> NDArray[np.bool_]:
        """[profiles, sets]: the distinct ways in which a rank belongs to sets. Ranks of one profile are loaded alike."""
        member = np.zeros((self.world_size, len(self)), dtype=bool)
        for ranks, number in self._numbers.items():
            member[np.asarray(ranks), number] = True
        packed = np.packbits(member, axis=1)
        rows = np.ascontiguousarray(packed).view(np.dtype((np.void, packed.shape[1]))).ravel()
        _, first = np.unique(rows, return_index=True)
        return member[np.sort(first)]
