"""Prefix trees: the model computes the common prefix of several rows once.

A packed microbatch has two layouts. Fields, losses and outputs use the row layout [N], with whole rows concatenated. The
model runs the computed layout [M], M < N: the segments of a radix tree over the rows' tokens, parents before children. A
segment and all its descendants are therefore contiguous. ``PrefixTree.sources`` [N] maps positions of the row layout to
positions of the computed layout.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhf_mcore.config.questions import SHORTEST_PREFIX
from rlhf_mcore.data.packing import balance, pack, round_up

SHORTEST = SHORTEST_PREFIX

Ids = NDArray[np.int64]


@dataclass(slots=True)
class Segment:
    """Tokens that the same rows share. ``offset`` is the position of its first token within these rows."""

    begin: int  # position in the computed layout
    size: int  # includes padding, which only leaves have
    offset: int
    parent: int  # index of a segment; -1: none
    end: int  # position after its last descendant, in the computed layout


@dataclass(slots=True)
class PrefixTree:
    """The rows of a microbatch as a tree, in the computed layout.

    ``token_ids`` and ``positions`` are [M] int64. ``uses`` [M] int64 counts the rows that contain a token, and is zero at
    padding. ``sources`` [N] int64 maps each position of the row layout to its computed token, with arbitrary values at
    padding. ``longest`` is the length of the longest path, with padding.
    """

    token_ids: Tensor
    positions: Tensor
    uses: Tensor
    sources: Tensor
    segments: list[Segment]
    longest: int

    @property
    def sizes(self) -> list[int]:
        """Token counts of the segments."""
        return [segment.size for segment in self.segments]

    def path(self, number: int) -> list[int]:
        """Return the indices of a segment's ancestors, starting with the root."""
        found = []
        while (number := self.segments[number].parent) >= 0:
            found.append(number)
        return found[::-1]

    def depths(self) -> list[int]:
        """Return the number of ancestors of each segment."""
        depths: list[int] = []
        for segment in self.segments:
            depths.append(depths[segment.parent] + 1 if segment.parent >= 0 else 0)
        return depths

    def earlier(self, back: int) -> Ids:
        """Return the index of the token ``back`` positions earlier in the same rows, per computed token [M]; M if none."""
        total = len(self.token_ids)
        found = np.arange(total) - back
        for segment in self.segments:
            for place in range(min(back, segment.size)):
                missing, above = back - place, segment.parent
                while above >= 0 and self.segments[above].size < missing:
                    missing -= self.segments[above].size
                    above = self.segments[above].parent
                ancestor = self.segments[above]
                found[segment.begin + place] = total if above < 0 else ancestor.begin + ancestor.size - missing
        return found


def shared_length(a: Ids, b: Ids) -> int:
    """Return the length of the common prefix of two rows."""
    size = min(len(a), len(b))
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if len(differs) else size


@dataclass(slots=True)
class _Node:
    """Rows of ``_Forks.rows`` that share their first ``end`` tokens. The parent covers the first ``depth``. One row is a leaf."""

    first: int
    last: int
    depth: int
    end: int
    parent: int

    @property
    def is_leaf(self) -> bool:
        return self.last - self.first == 1


class _Forks:
    """The points at which rows diverge, parents before children.

    Lengths of inner nodes are multiples of ``multiple``, so only leaves are padded. Rows with indices in ``alone`` share
    nothing.
    """

    def __init__(self, rows: Sequence[Ids], multiple: int, alone: Collection[int] = ()):
        self.multiple = multiple
        self.rows: list[Ids] = []  # distinct rows, sorted by their tokens
        self.members: list[list[int]] = []  # indices of the rows that equal each distinct row
        keys = [(place in alone and place + 1, row.astype(">i8").tobytes()) for place, row in enumerate(rows)]
        for place in sorted(range(len(rows)), key=keys.__getitem__):
            if self.rows and len(rows[place]) >= SHORTEST and keys[place] == keys[self.members[-1][0]]:
                self.members[-1].append(place)
            else:
                self.rows.append(rows[place])
                self.members.append([place])
        are_alone = [equal[0] in alone for equal in self.members]
        common = [
            0 if are_alone[k] or are_alone[k + 1] else shared_length(a, b) // multiple * multiple
            for k, (a, b) in enumerate(pairwise(self.rows))
        ]
        self.nodes: list[_Node] = []
        waiting = [(0, len(self.rows), 0, -1)] if rows else []
        while waiting:
            first, last, depth, parent = waiting.pop()
            if last - first == 1:
                self.nodes.append(_Node(first, last, depth, len(self.rows[first]), parent))
                continue
            shared = min(common[first : last - 1])
            if shared - depth >= SHORTEST:
                self.nodes.append(_Node(first, last, depth, shared, parent))
                depth, parent = shared, len(self.nodes) - 1
            ends = [k + 1 for k in range(first, last - 1) if common[k] - depth < SHORTEST] + [last]
            waiting += [(a, b, depth, parent) for a, b in pairwise([first, *ends])][::-1]

    @property
    def share(self) -> bool:
        """Return whether any two rows share tokens."""
        return any(not node.is_leaf for node in self.nodes) or any(len(equal) > 1 for equal in self.members)

    def places(self, node: _Node) -> list[int]:
        """Return the indices of the rows that contain a node."""
        return [place for row in range(node.first, node.last) for place in self.members[row]]

    def size(self, node: _Node) -> int:
        """Return the number of tokens that a node computes, with padding."""
        return round_up(node.end - node.depth, self.multiple)


def computed_tokens(rows: Sequence[Ids], multiple: int = 1) -> int:
    """Return the number of computed tokens of rows that run together, with padding."""
    forks = _Forks(rows, multiple)
    return sum(map(forks.size, forks.nodes))


def rows_with_other_routes(rows: Sequence[Ids], routes: Sequence[Ids]) -> set[int]:
    """Return the indices of rows that cannot share a prefix, because an earlier row routed its tokens to other experts.

    Args:
        rows: token ids.
        routes: for each row, the routes of the token before each token [length, ...]; zero if unknown.
    """
    forks, found = _Forks(rows, 1), set[int]()
    for node in forks.nodes:
        if len(places := forks.places(node)) == 1:
            continue
        known = np.zeros_like(routes[places[0]][:0], shape=(node.end - node.depth, *routes[places[0]].shape[1:]))
        for place in places:
            own = routes[place][node.depth + 1 : node.end + 1]
            before, is_known = known[: len(own)], (own != 0).reshape(len(own), -1).any(1)
            differs = (before != own).reshape(len(own), -1).any(1) & (before != 0).reshape(len(own), -1).any(1)
            if (differs & is_known).any():
                found.add(place)
            else:
                before[is_known] = own[is_known]
    return found


def units_of(
    rows: Sequence[Ids], max_tokens: int, multiple: int = 1, alone: Collection[int] = ()
) -> tuple[list[list[int]], list[int]] | None:
    """Divide rows, each with at most ``max_tokens`` tokens, into units that share prefixes.

    Rows with a common prefix form one unit if it computes at most ``max_tokens``. Otherwise they are split at their
    points of divergence, into about the fewest units. Each of these units computes the prefix again.

    Returns:
        The row indices of each unit, and the computed tokens of each unit. None if no rows share.
    """
    forks = _Forks(rows, multiple, alone)
    if not forks.share:
        return None
    # For each node: units of sorted rows, with their computed tokens after the prefix of the parent.
    parts: list[list[tuple[list[int], int]]] = [[] for _ in forks.nodes]
    roots: list[tuple[list[int], int]] = []
    for number in reversed(range(len(forks.nodes))):  # children before parents
        node, below = forks.nodes[number], parts[number]
        if node.is_leaf:
            units = [([node.first], forks.size(node))]
        else:
            bins = pack([max(size, 1) for _, size in below], max_tokens - node.end)
            units = [
                ([row for k in bin for row in below[k][0]], forks.size(node) + sum(below[k][1] for k in bin))
                for bin in bins
                if bin
            ]
        (roots if node.parent < 0 else parts[node.parent]).extend(units)
    places = [(sorted(place for row in unit for place in forks.members[row]), size) for unit, size in roots]
    places.sort()
    return [unit for unit, _ in places], [size for _, size in places]


def build_tree(
    rows: Sequence[Ids],
    widths: Sequence[int],
    *,
    multiple: int = 1,
    pad_multiple: int = 1,
    pad_token_id: int = 0,
    alone: Collection[int] = (),
) -> PrefixTree | None:
    """Build the tree of a microbatch's rows. Return None if they share nothing.

    Args:
        widths: tokens of each row in the row layout, with padding; then the padding after all rows, if any.
        multiple: the size of every segment is a multiple of it. Shared lengths are rounded down.
        pad_multiple: the number of computed tokens is a multiple of it. A padding segment fills the gap.
        alone: indices of rows that share nothing.
    """
    forks = _Forks(rows, multiple, alone)
    if not forks.share:
        return None
    segments: list[Segment] = []
    tokens, uses = [], []
    numbers: dict[int, int] = {}  # node -> segment; a row that ends at a fork has no segment of its own
    spans: list[list[Ids]] = [[] for _ in rows]
    total = 0

    def add(ids: Ids, size: int, offset: int, parent: int, count: int) -> None:
        nonlocal total
        segments.append(Segment(total, size, offset, parent, total + size))
        tokens.append(np.pad(ids, (0, size - len(ids)), constant_values=pad_token_id))
        uses.append(np.where(np.arange(size) < len(ids), count, 0))
        total += size

    for number, node in enumerate(forks.nodes):
        if not (size := forks.size(node)):
            continue
        places = forks.places(node)
        numbers[number] = len(segments)
        own = np.arange(total, total + node.end - node.depth)
        add(forks.rows[node.first][node.depth : node.end], size, node.depth, numbers.get(node.parent, -1), len(places))
        for place in places:
            spans[place].append(own)
    if filler := round_up(total, pad_multiple) - total:
        add(np.zeros(0, np.int64), filler, 0, -1, 0)
    for segment in reversed(segments):
        if segment.parent >= 0:
            parent = segments[segment.parent]
            parent.end = max(parent.end, segment.end)
    sources = np.zeros(sum(widths), np.int64)
    begin = 0
    for own_spans, width in zip(spans, widths, strict=False):
        own = np.concatenate(own_spans)
        sources[begin : begin + len(own)] = own
        begin += width
    return PrefixTree(
        torch.from_numpy(np.concatenate(tokens)),
        torch.from_numpy(np.concatenate([np.arange(s.offset, s.offset + s.size) for s in segments])),
        torch.from_numpy(np.concatenate(uses)),
        torch.from_numpy(sources),
        segments,
        max(segment.offset + segment.size for segment in segments),
    )


# --------------------------------------------------------------------------------------------- rows of several ranks
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
        computed = computed_tokens(parts)
    prompt = int(mask.argmax())
    return computed, prompt if prompt >= SHORTEST else 0
