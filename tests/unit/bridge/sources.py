"""Sources that are computed bucket by bucket."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_mcore.bridge.plan.rank_plan import Bucket
from rlhf_mcore.bridge.run.endpoints import Sources


class Averages(Sources):
    """Means of two sets of tensors, at least in fp32. Only the tensors of open buckets exist."""

    device, is_static = torch.device("cpu"), False

    def __init__(self, one: Mapping[str, Tensor], other: Mapping[str, Tensor]):
        self._one, self._other = one, other
        self.open_buckets: dict[int, dict[str, Tensor]] = {}
        self.most_open = 0

    def open(self, bucket: Bucket) -> Mapping[str, Tensor]:
        assert bucket.index not in self.open_buckets
        made = {name: _mean(self._one[name], self._other[name]).view(-1) for name in bucket.source_buffers}
        self.open_buckets[bucket.index] = made
        self.most_open = max(self.most_open, len(self.open_buckets))
        return made

    def close(self, bucket: Bucket) -> None:
        for tensor in self.open_buckets.pop(bucket.index).values():
            tensor.fill_(torch.nan)  # makes a later read visible


def _mean(one: Tensor, other: Tensor) -> Tensor:
    dtype = torch.promote_types(one.dtype, torch.float32)
    return (one.to(dtype) + other.to(dtype)) / 2
