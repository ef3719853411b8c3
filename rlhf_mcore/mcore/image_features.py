"""Features of images from frozen vision towers, and attention masks for images.

The ranks that need the same images share the work. Each image is read by one rank, once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.data.packing import balance
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.parallel.context import chunks_of

KEPT_BYTES = 2 * 2**30  # per process
Key = tuple[tuple[int, ...], str]  # fingerprint of a tower, digest of an image
Levels = list[Tensor]  # [tokens, hidden] per level


@dataclass(slots=True, eq=False)
class StepFeatures:
    """Features on the host, for further passes over the rows of a batch.

    The models of a process share one instance, because their towers may be equal. The features are dropped with the
    batch. The images that a tower reads together affect the last bits of its features. They must not depend on
    earlier steps.
    """

    limit: int = KEPT_BYTES
    _found: dict[Key, Levels] = field(default_factory=dict)
    _num_bytes: int = 0
    _tokens: Tensor | None = None  # the tokens of the current batch

    def begin(self, tokens: Tensor) -> None:
        """Drop everything if ``tokens`` are not the tokens of the current batch."""
        if self._tokens is not tokens:
            self._found, self._num_bytes, self._tokens = {}, 0, tokens

    def get(self, key: Key) -> Levels | None:
        """Return the stored features of an image, or None."""
        return self._found.get(key)

    def keep(self, key: Key, levels: Levels) -> None:
        """Store a copy if it fits."""
        size = sum(level.nbytes for level in levels)
        if self._num_bytes + size <= self.limit and key not in self._found:
            self._found[key] = [level.cpu() for level in levels]
            self._num_bytes += size


def fingerprint(tower: torch.nn.Module) -> tuple[int, ...]:
    """Return sums over the bits of a tower's tensors as its identity. Training or copying weights changes them."""
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
    """Return features of images. Each image is read by one rank of the group.

    Collective over the group, with the same images on all ranks.

    Args:
        costs: cost of reading each image, by its digest.
        sizes: number of tokens of each image.
        like: [levels, hidden] with the dtype and device of features.
        read: runs the tower of this rank.
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
    """Return the images that some rank of a group lacks. Ranks may store different images. Collective."""
    if group.size() == 1:
        return list(missing)
    return list(dict.fromkeys(digest for of_rank in all_gather_json(list(missing), group) for digest in of_rank))


def mask_with_images(images: Tensor, num_queries: int, window: int | None, group: dist.ProcessGroup | None) -> Tensor:
    """Return the mask [b, 1, queries of this context-parallel rank, keys] for tokens with image numbers [b, keys].

    Tokens see earlier tokens and the tokens of their own image, up to ``window`` tokens back. -1 means no image.
    """
    keys = queries = torch.arange(images.size(1), device=images.device)
    if group is not None:
        chunks = queries.split(num_queries // 2)
        queries = torch.cat([chunks[number] for number in chunks_of(group.rank(), group.size())])
    back = queries[:, None] - keys
    own = images[:, queries, None]
    mask = (back >= 0) | ((own == images[:, None]) & (own >= 0))
    return (mask if window is None else mask & (back < window))[:, None]
