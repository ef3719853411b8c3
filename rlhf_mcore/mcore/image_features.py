"""Features of images that frozen towers have made, once in a step, by one of the ranks that need them; and who sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.data.packing import balance
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.context import chunks_of

KEPT_BYTES = 2 * 2**30  # of a process
Key = tuple[tuple[int, ...], str]  # of a tower and an image
Levels = list[Tensor]  # of each level [tokens, hidden]


@dataclass(slots=True, eq=False)
class StepFeatures:
    """Features on the host, for further passes over the rows of a batch. One for the models of a process, whose towers may be equal.

    They are forgotten with the batch: which images a tower reads together, and so the last bits of what it makes of them, then
    depends on nothing before the step.
    """

    limit: int = KEPT_BYTES
    _found: dict[Key, Levels] = field(default_factory=dict)
    _num_bytes: int = 0
    _tokens: Tensor | None = None  # of the batch

    def begin(self, tokens: Tensor) -> None:
        """Forget everything if these are not the tokens of the batch that began last."""
        if self._tokens is not tokens:
            self._found, self._num_bytes, self._tokens = {}, 0, tokens

    def get(self, key: Key) -> Levels | None:
        """Return what is kept of an image."""
        return self._found.get(key)

    def keep(self, key: Key, levels: Levels) -> None:
        """Keep a copy where there is room."""
        size = sum(level.nbytes for level in levels)
        if self._num_bytes + size <= self.limit and key not in self._found:
            self._found[key] = [level.cpu() for level in levels]
            self._num_bytes += size


def fingerprint(tower: torch.nn.Module) -> tuple[int, ...]:
    """Return sums over the bits of a tower's tensors, by which it is known: weights that learn or follow others change them."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [p.detach().view(kinds[p.element_size()]).sum(dtype=torch.int64) for p in tower.parameters()]
    return tuple(torch.stack(sums).tolist())


def read_together(
    costs: Mapping[str, int],
    sizes: Mapping[str, int],
    like: Tensor,
    read: Callable[[Sequence[str]], Mapping[str, Levels]],
    group: dist.ProcessGroup,
) -> dict[str, Levels]:
    """Return features of images, each read by one rank of a group. Collective over it, with the same images on all ranks.

    Args:
        costs: of reading each image, by its digest.
        sizes: tokens of each.
        like: [levels, hidden] of the dtype and on the device of features.
        read: the tower of this rank.
    """
    digests, num_levels, width = list(costs), *like.shape
    shares = [[digests[place] for place in share] for share in balance(list(costs.values()), group.size())]
    found = dict(read(shares[group.rank()]))
    if group.size() == 1:
        return found
    longest = max(sum(sizes[digest] for digest in share) for share in shares)
    mine = like.new_zeros(longest, num_levels, width)
    start = 0
    for digest in shares[group.rank()]:
        mine[start : start + sizes[digest]] = torch.stack(found[digest], dim=1)
        start += sizes[digest]
    parts = [torch.empty_like(mine) for _ in shares]
    dist.all_gather([part.view(torch.uint8) for part in parts], mine.view(torch.uint8), group=group)
    result: dict[str, Levels] = {}
    for share, part in zip(shares, parts, strict=True):
        pieces = part[: sum(sizes[digest] for digest in share)].split([sizes[digest] for digest in share])
        result |= {digest: list(piece.unbind(1)) for digest, piece in zip(share, pieces, strict=True)}
    return result


def needed_by_any(missing: Sequence[str], group: dist.ProcessGroup) -> list[str]:
    """Return the images that some rank of a group does not have: what else they keep may differ. Collective."""
    if group.size() == 1:
        return list(missing)
    return list(dict.fromkeys(digest for of_rank in all_gather_json(list(missing), group) for digest in of_rank))


def mask_with_images(images: Tensor, num_queries: int, window: int | None, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mask [b, 1, queries of this context-parallel rank, keys] of sequences whose tokens are of ``images`` [b, keys].

    Tokens see those before them, and those of their own image, no further back than ``window``; -1 is no image.
    """
    keys = queries = torch.arange(images.size(1), device=images.device)
    if group is not None:
        chunks = queries.split(num_queries // 2)
        queries = torch.cat([chunks[number] for number in chunks_of(group.rank(), group.size())])
    back = queries[:, None] - keys
    own = images[:, queries, None]
    mask = (back >= 0) | ((own == images[:, None]) & (own >= 0))
    return (mask if window is None else mask & (back < window))[:, None]
