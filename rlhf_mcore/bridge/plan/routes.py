"""Decide who sends a cell to whom, by arithmetic over the sorted holders and needers: every rank finds its own part alone.

A needing rank takes a cell from itself if it holds it; else from a holder on its node; else the node imports the cell once, at one
of its needing ranks, which forwards it to the others (a second phase). Senders and importers take turns (round-robin): the k-th
cell of a route continues where cell k - 1 stopped, so after any run of consecutive cells the shares of two equal candidates differ
by at most one.
Without nodes every rank is a node of its own: nothing is forwarded.
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
    """Numbers the distinct sets of ranks that places mention, in order of first mention."""

    def __init__(self) -> None:
        self._numbers: dict[Sequence[int], int] = {}
        self._unions: dict[frozenset[int], Ranks] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, ranks: Sequence[int]) -> int:
        """Return the number of a set of ranks, which may be new."""
        key = ranks if isinstance(ranks, range) else tuple(ranks)
        number = self._numbers.get(key)
        if number is None:
            if len(key) == 0 or key[0] < 0 or any(a >= b for a, b in pairwise(key)):
                raise ValueError(f"ranks of a place must be ascending and not negative, got {key}")
            number = self._numbers[key] = len(self._numbers)
        return number

    @property
    def world_size(self) -> int:
        """One more than the highest rank mentioned."""
        return max((ranks[-1] for ranks in self._numbers), default=-1) + 1

    def containing(self, rank: int) -> frozenset[int]:
        """List the numbers of the sets that a rank belongs to."""
        return frozenset(number for ranks, number in self._numbers.items() if rank in ranks)

    def union(self, numbers: frozenset[int]) -> Ranks:
        """Return the ranks of the union of some sets, ascending."""
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


class Route:
    """A route from the ranks with a cell to the ranks that need it (both ascending). Cells with the same ranks share a route."""

    def __init__(self, holders: Ranks, needers: Ranks, nodes: Ranks):
        """Sort the needers by their distance to a holder. ``nodes`` has the node of every rank."""
        self.holders, self.needers, self.nodes = holders, needers, nodes
        holds = _occur(needers, holders)
        self.keepers, self.receivers = needers[holds], needers[~holds]
        is_near = _occur(nodes[self.receivers], np.unique(nodes[holders]))
        self.near, self.far = self.receivers[is_near], self.receivers[~is_near]

    @cached_property
    def imports(self) -> NodeGroups:
        """The receivers of the nodes that have to import, by node."""
        return NodeGroups.by_node(self.far, self.nodes)

    @cached_property
    def near_receivers(self) -> NodeGroups:
        """The receivers that share a node with a holder, by node."""
        return NodeGroups.by_node(self.near, self.nodes)

    @cached_property
    def near_holders(self) -> NodeGroups:
        """The holders on the nodes of ``near_receivers``; same number of groups, same order."""
        is_near = _occur(self.nodes[self.holders], self.near_receivers.nodes)
        return NodeGroups.by_node(self.holders[is_near], self.nodes)

    def most_sent(self, count: int) -> int:
        """Bound the copies that one holder sends over ``count`` consecutive cells."""
        far = -(-count * len(self.imports) // len(self.holders))
        if not len(self.near):
            return far
        return far + int((-(-count * self.near_receivers.sizes // self.near_holders.sizes)).max())

    def most_forwarded(self, count: int) -> int:
        """Bound the copies that one receiver forwards over ``count`` consecutive cells."""
        sizes = self.imports.distinct_sizes
        return max((-(-count // size) * (size - 1) for size in sizes), default=0)


@dataclass
class NodeGroups:
    """Ranks in order of their nodes, on each ascending, cut into runs of the same node."""

    ranks: Ranks
    nodes: Ranks
    starts: Ranks
    sizes: Ranks
    distinct_sizes: list[int]

    @classmethod
    def by_node(cls, ranks: Ranks, nodes: Ranks) -> NodeGroups:
        """Group ascending ``ranks`` by their node. ``nodes`` has the node of every rank."""
        ranks = ranks[np.argsort(nodes[ranks], kind="stable")]
        node = nodes[ranks]
        starts = np.flatnonzero(np.diff(node, prepend=-1))
        sizes = np.diff(starts, append=len(ranks))
        return cls(ranks, node[starts], starts, sizes, sorted(set(sizes.tolist())))

    def __len__(self) -> int:
        return len(self.nodes)

    def find(self, node: int) -> int | None:
        """Return the position of a node."""
        at = int(np.searchsorted(self.nodes, node))
        return at if at < len(self.nodes) and self.nodes[at] == node else None

    def members(self, number: int) -> list[int]:
        """List the ranks of the node at a position."""
        start = int(self.starts[number])
        members: list[int] = self.ranks[start : start + int(self.sizes[number])].tolist()
        return members

    @cached_property
    def local_ranks(self) -> Ranks:
        """For each rank, its place among those of its node."""
        return np.arange(len(self.ranks)) - self.spread(self.starts)

    @cached_property
    def local_sizes(self) -> Ranks:
        """For each rank, the number of those of its node."""
        return self.spread(self.sizes)

    @cached_property
    def by_size(self) -> list[tuple[int, Ranks, Ranks]]:
        """For each size of a node its number of ranks, these ranks of all such nodes, and the place of each on its node."""
        which = [(size, self.local_sizes == size) for size in self.distinct_sizes]
        return [(size, self.ranks[mask], self.local_ranks[mask]) for size, mask in which]

    def spread(self, values: Ranks) -> Ranks:
        """Repeat for each rank the value of its node."""
        return np.repeat(values, self.sizes)


class RankRoute:
    """A route as one rank sees it: the sender and the receivers of the cell of each turn. Turns count from 0."""

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
        """Return, for a receiver, the rank that sends it the cell, and the phase of the message."""
        if self._near_receivers:
            at = self._near_receivers.index(self._rank) + turn * len(self._near_receivers)
            return self._near_holders[at % len(self._near_holders)], 0
        assert self._node is not None
        importer = self._node_receivers[turn % len(self._node_receivers)]
        if importer != self._rank:
            return importer, 1
        return int(self._holders[(self._node + turn * len(self._imports)) % len(self._holders)]), 0

    def receivers(self, turn: int) -> list[int]:
        """List, for a holder, the receivers of the cell."""
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
        """List, for a receiver, the ranks of its node to which it forwards the cell."""
        members = self._node_receivers
        if len(members) < 2 or members[turn % len(members)] != self._rank:
            return []
        return [member for member in members if member != self._rank]


def _occur(values: Ranks, among: Ranks) -> NDArray[np.bool_]:
    """Tell for each value whether it occurs in an ascending array."""
    if not len(among):
        return np.zeros(len(values), dtype=bool)
    at = np.minimum(np.searchsorted(among, values), len(among) - 1)
    occurs: NDArray[np.bool_] = among[at] == values
    return occurs
