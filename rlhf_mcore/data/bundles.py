"""Distribute rows with common prefixes to data-parallel ranks: whole groups, or parts of groups if that balances the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlhf_mcore.data import prefixes
from rlhf_mcore.data.packing import balance


@dataclass(slots=True)
class Bundle:
    """Units of rows of one group, each with its separate cost. Each unit after the first saves ``shared`` on the same rank."""

    group: int
    shared: float
    units: list[tuple[float, list[int]]]

    @property
    def cost(self) -> float:
        return sum(cost for cost, _ in self.units) - self.shared * (len(self.units) - 1)

    def halves(self) -> list[Bundle]:
        """Split the units into two bundles of about equal cost. A bundle with one unit stays whole."""
        parts = balance([cost - self.shared for cost, _ in self.units], 2)
        return [Bundle(self.group, self.shared, [self.units[place] for place in part]) for part in parts if part]


def deal_bundles(bundles: Sequence[Bundle], num_ranks: int) -> list[list[Bundle]]:
    """Distribute bundles to ranks with about equal costs.

    The most expensive bundles are halved while this lowers the highest cost of a rank.
    """

    def deal(some: Sequence[Bundle]) -> tuple[float, list[list[Bundle]]]:
        shares = [[some[place] for place in share] for share in balance([bundle.cost for bundle in some], num_ranks)]
        return max(sum(bundle.cost for bundle in share) for share in shares), shares

    highest, shares = deal(bundles)
    count = 1
    while num_ranks > 1 and count <= min(2 * num_ranks, len(bundles)):
        longest = set(sorted(range(len(bundles)), key=lambda place: (-bundles[place].cost, place))[:count])
        if all(len(bundles[place].units) == 1 for place in longest):
            break
        parted = [
            part for place, bundle in enumerate(bundles) for part in (bundle.halves() if place in longest else [bundle])
        ]
        found, others = deal(parted)
        if found < highest:
            highest, shares = found, others
        count *= 2
    return shares


def computed_of_row(ids: NDArray[np.int32], mask: NDArray[np.bool_], sequences: Sequence[int] = ()) -> tuple[int, int]:
    """Return how many tokens of a row are computed, and the length of the prefix that its group may share.

    This prefix ends before the first sampled token. ``sequences`` contains the lengths of several sequences in one row, which
    may share their own prefixes.
    """
    computed = len(ids)
    if len(sequences) > 1:
        parts = np.split(ids.astype(np.int64), np.cumsum(sequences)[:-1])
        computed = prefixes.computed_tokens(parts)
    prompt = int(mask.argmax())
    return computed, prompt if prompt >= prefixes.SHORTEST else 0
