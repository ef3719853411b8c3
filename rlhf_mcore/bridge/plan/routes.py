"""Choose the sender of each cell by arithmetic on the sorted holders and needers. Every rank computes its part alone.

A needing rank takes a cell from itself if it holds the cell, or else from a holder on its node. If the node has no
holder, one of the needing ranks imports the cell once and forwards it to the others in a second phase.

Senders and importers take turns (round-robin): cell k of a route starts at the candidate after cell k - 1. So
after any run of consecutive cells, the shares of two equal candidates differ by at most one. Without ``nodes``
every rank is its own node, and no data is forwarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


class RankSets:
    """Number the distinct rank sets of the places, in order of first use."""

    def __init__(self) -> None:
        self._numbers: dict[Sequence[int], int] = {}
        self._unions: dict[frozenset[int], Ranks] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, ranks: Sequence[int]) -> int:
        """Return the number of a rank set. Add the set if it is new."""
        key = ranks if isinstance(ranks, range) else tuple(ranks)
        number = self._numbers.get(key)
        if number is None:
            if len(key) == 0 or key[0] < 0 or any(a >= b for a, b in pairwise(key)):
                raise ValueError(f"ranks of a place must be ascending and not negative, got {key}")
            number = self._numbers[key] = len(self._numbers)
        return number

    @property
    def world_size(self) -> int:
        """The highest rank in any set, plus 1."""
        return max((ranks[-1] for ranks in self._numbers), default=-1) + 1

    def containing(self, rank: int) -> frozenset[int]:
        """Return the numbers of the sets that contain a rank."""
        return frozenset(number for ranks, number in self._numbers.items() if rank in ranks)

    def union(self, numbers: frozenset[int]) -> Ranks:
        """Return the union of some sets, in ascending order."""
        if numbers not in self._unions:
            every = list(self._numbers)
            self._unions[numbers] = np.unique(np.concatenate([np.asarray(every[n], dtype=np.int64) for n in numbers]))
        return self._unions[numbers]

    def profiles(self) -> NDArray[np.bool_]:
        """Return the distinct rows of set membership over all ranks: bool [profiles, sets].

        Ranks with equal rows get equal loads.
        """
        member = np.zeros((self.world_size, len(self)), dtype=bool)
        for ranks, number in self._numbers.items():
            member[np.asarray(ranks), number] = True
        packed = np.packbits(member, axis=1)
        rows = np.ascontiguousarray(packed).view(np.dtype((np.void, packed.shape[1]))).ravel()
        _, first = np.unique(rows, return_index=True)
        return member[np.sort(first)]


class Route:
    """A route from the ranks that hold a cell to the ranks that need it (both ascending).

    Cells with equal ranks share a route.
    """

    def __init__(self, holders: Ranks, needers: Ranks, nodes: Ranks):
        """Sort the needers by their distance to a holder. ``nodes`` contains the node of every rank."""
        self.holders, self.needers, self.nodes = holders, needers, nodes
        holds = _occur(needers, holders)
        self.keepers, self.receivers = needers[holds], needers[~holds]
        is_near = _occur(nodes[self.receivers], np.unique(nodes[holders]))
        self.near, self.far = self.receivers[is_near], self.receivers[~is_near]

    @cached_property
    def imports(self) -> NodeGroups:
        """Receivers on nodes without a holder, by node. These nodes must import."""
        return NodeGroups.by_node(self.far, self.nodes)

    @cached_property
    def near_receivers(self) -> NodeGroups:
        """Receivers that share a node with a holder, by node."""
        return NodeGroups.by_node(self.near, self.nodes)

    @cached_property
    def near_holders(self) -> NodeGroups:
        """Holders on the nodes of ``near_receivers``, with the same groups in the same order."""
        is_near = _occur(self.nodes[self.holders], self.near_receivers.nodes)
        return NodeGroups.by_node(self.holders[is_near], self.nodes)

    def most_sent(self, count: int) -> int:
        """Return an upper bound of the copies that one holder sends over ``count`` consecutive cells."""
        far = -(-count * len(self.imports) // len(self.holders))
        if not len(self.near):
            return far
        return far + int((-(-count * self.near_receivers.sizes // self.near_holders.sizes)).max())

    def most_forwarded(self, count: int) -> int:
        """Return an upper bound of the copies that one receiver forwards over ``count`` consecutive cells."""
        sizes = self.imports.distinct_sizes
        return max((-(-count // size) * (size - 1) for size in sizes), default=0)


@dataclass
class NodeGroups:
    """Ranks grouped by node. The ranks of a node are ascending."""

    ranks: Ranks
    nodes: Ranks
    starts: Ranks
    sizes: Ranks
    distinct_sizes: list[int]

    @classmethod
    def by_node(cls, ranks: Ranks, nodes: Ranks) -> NodeGroups:
        """Group ascending ``ranks`` by their node. ``nodes`` contains the node of every rank."""
        ranks = ranks[np.argsort(nodes[ranks], kind="stable")]
        node = nodes[ranks]
        starts = np.flatnonzero(np.diff(node, prepend=-1))
        sizes = np.diff(starts, append=len(ranks))
        return cls(ranks, node[starts], starts, sizes, sorted(set(sizes.tolist())))

    def __len__(self) -> int:
        return len(self.nodes)

    def find(self, node: int) -> int | None:
        """Return the position of a node, or None."""
        at = int(np.searchsorted(self.nodes, node))
        return at if at < len(self.nodes) and self.nodes[at] == node else None

    def members(self, number: int) -> list[int]:
        """Return the ranks of the node at a position."""
        start = int(self.starts[number])
        members: list[int] = self.ranks[start : start + int(self.sizes[number])].tolist()
        return members


class RankRoute:
    """The view of a route from one rank: the sender and the receivers of the cell in each turn. Turns count from 0."""

    __slots__ = (
        "_holder",
        "_holders",
        "_imports",
        "_near_holders",
        "_near_receivers",
        "_node",
        "_node_receivers",
        "_rank",
    )

    def __init__(self, route: Route, rank: int):
        self._rank, self._holders, self._imports = rank, route.holders, route.imports
        at = int(np.searchsorted(route.holders, rank))
        self._holder = at if at < len(route.holders) and route.holders[at] == rank else None
        node = int(route.nodes[rank])
        near = route.near_receivers.find(node) if len(route.near) else None
        self._near_receivers = [] if near is None else route.near_receivers.members(near)
        self._near_holders = [] if near is None else route.near_holders.members(near)
        self._node = route.imports.find(node)
        self._node_receivers = [] if self._node is None else route.imports.members(self._node)

    def sender(self, turn: int) -> tuple[int, int]:
        """Return the rank that sends the cell to this receiver, and the phase of the message."""
        if self._near_receivers:
            at = self._near_receivers.index(self._rank) + turn * len(self._near_receivers)
            return self._near_holders[at % len(self._near_holders)], 0
        assert self._node is not None
        importer = self._node_receivers[turn % len(self._node_receivers)]
        if importer != self._rank:
            return importer, 1
        return int(self._holders[(self._node + turn * len(self._imports)) % len(self._holders)]), 0

    def receivers(self, turn: int) -> list[int]:
        """List the ranks to which this holder sends the cell."""
        assert self._holder is not None
        receivers = []
        if self._near_receivers:
            count = len(self._near_holders)
            first = (self._near_holders.index(self._rank) - turn * len(self._near_receivers)) % count
            receivers = self._near_receivers[first::count]
        nodes, count = self._imports, len(self._holders)
        for node in range((self._holder - turn * len(nodes)) % count, len(nodes), count):
            receivers.append(int(nodes.ranks[nodes.starts[node] + turn % int(nodes.sizes[node])]))
        return receivers

    def forwarded_to(self, turn: int) -> list[int]:
        """List the ranks of this receiver's node to which it forwards the cell."""
        members = self._node_receivers
        if len(members) < 2 or members[turn % len(members)] != self._rank:
            return []
        return [member for member in members if member != self._rank]


def _occur(values: Ranks, among: Ranks) -> NDArray[np.bool_]:
    """Return, for each value, whether it occurs in an ascending array."""
    if not len(among):
        return np.zeros(len(values), dtype=bool)
    at = np.minimum(np.searchsorted(among, values), len(among) - 1)
    occurs: NDArray[np.bool_] = among[at] == values
    return occurs
