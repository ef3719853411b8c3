"""fp32 master weights of bf16 weights, and their storage as 16-bit remainders by Transformer Engine's FusedAdam.

As integers, the bits of a master are the bits of its weight, shifted by 16, plus a remainder from -2^15 to 2^15 - 1. A
weight is therefore its master, rounded to the nearest value. A remainder of -2^15 is a tie, rounded away from zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HALF = 1 << 15  # half of a bf16 weight's last bit, in last bits of its master


def rounds_to(master: Tensor, weights: Tensor) -> bool:
    """Return whether fp32 masters round to 16-bit weights of the same shape. Both neighbours of a bf16 tie are right."""
    if weights.dtype == torch.bfloat16:
        return bool((_distance(master, weights).abs() <= _HALF).all())
    return torch.equal(master.to(weights.dtype), weights)


@dataclass(frozen=True, slots=True)
class SplitMaster:
    """A view of fp32 masters: bf16 ``weights`` and int16 ``remainders`` of the same shape.

    It supports the operations on views that checkpoints use.
    """

    weights: Tensor
    remainders: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.remainders.shape

    def numel(self) -> int:
        return self.remainders.numel()

    def __getitem__(self, place: Any) -> SplitMaster:
        return SplitMaster(self.weights[place], self.remainders[place])

    def view(self, shape: Any) -> SplitMaster:
        return SplitMaster(self.weights.view(shape), self.remainders.view(shape))

    def permute(self, axes: Any) -> SplitMaster:
        return SplitMaster(self.weights.permute(axes), self.remainders.permute(axes))

    def float(self) -> Tensor:
        """Compute the masters."""
        return (_shift(self.weights) + self.remainders.to(torch.int32)).view(torch.float32)

    def copy_(self, masters: Tensor) -> None:
        """Store masters of the present weights. A tie that was rounded towards zero moves by the master's last bit.

        Raises:
            ValueError: the masters do not round to the weights.
        """
        masters = masters.to(self.weights.device)
        if not rounds_to(masters, self.weights):
            raise ValueError("the weights differ from the rounded fp32 master weights")
        self.remainders.copy_(_distance(masters, self.weights).clamp(-_HALF, _HALF - 1))

    def zero_(self) -> None:
        """Make the masters equal to the weights."""
        self.remainders.zero_()


def _shift(weights: Tensor) -> Tensor:
    return weights.contiguous().view(torch.int16).to(torch.int32) << 16


def _distance(master: Tensor, weights: Tensor) -> Tensor:
    return master.contiguous().view(torch.int32) - _shift(weights)
