"""Keep a share of the optimizer state in host memory, and step it there.

An update copies the gradient of a hosted range to the host, makes AdamW's step there, and copies the new weights to
the device. Ranges are stepped in buckets that alternate between two slots of pinned memory. While the host steps one
bucket, the weights of the bucket before it and the gradients of the next bucket are copied.

Megatron's HybridDeviceOptimizer does not fit here. It leaves the fp32 masters on the device. Its moments do not exist
before its first step, and its state cannot be read or changed in place, as checkpoints do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.platform import Platform

_BUCKET = 1 << 25  # elements of a bucket


@dataclass(frozen=True, slots=True)
class HostRange:
    """A flat range [n] of a parameter whose state is in host memory.

    ``weights`` [n] views the range on the device. ``stepped`` [n] is Megatron's tensor that receives the gradient.
    ``group`` contains the settings of the step. ``state`` contains ``step`` [], ``exp_avg`` and ``exp_avg_sq`` [n],
    and with 16-bit weights ``master`` [n], all fp32.
    """

    weights: Tensor
    stepped: Tensor
    group: dict[str, Any]
    state: dict[str, Tensor]


def move_to_host(weights: Tensor, stepped: Tensor) -> dict[str, Tensor]:
    """Allocate the state of a range that has made no update. Free the master on the device, if there is one."""
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros(len(stepped)), "exp_avg_sq": torch.zeros(len(stepped))}
    if weights.dtype != torch.float32:
        state["master"] = torch.empty(len(stepped)).copy_(stepped)
        stepped.untyped_storage().resize_(0)
    return state


def choose_hosted(sizes: Sequence[int], share: float) -> set[int]:
    """Choose indices of ranges that together contain at most ``share`` of all elements, large ranges first."""
    left, chosen = round(share * sum(sizes)), set()
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        if sizes[number] <= left:
            chosen.add(number)
            left -= sizes[number]
    return chosen


@dataclass(frozen=True, slots=True)
class _Piece:
    """The elements ``span`` of a range, and their place in a slot."""

    owner: HostRange
    span: slice
    place: slice


class _Slot:
    """Pinned memory for a bucket of at most ``size`` elements, and a queue of copies that run in order.

    ``has_masters``: all ranges have masters, so only gradients are copied to the host.
    """

    def __init__(self, size: int, has_masters: bool, platform: Platform) -> None:
        self._grads = platform.host_buffer(size * 4).view(torch.float32)
        self._masters = platform.host_buffer(0 if has_masters else size * 4).view(torch.float32)
        self._width = 2 if has_masters else 4
        self._weights = platform.host_buffer(size * self._width)
        self._copies = platform.copies()
        self.wait: Callable[[], None] = lambda: None  # makes the device wait for the last copies

    def fetch(self, bucket: Sequence[_Piece], grads: dict[int, Tensor]) -> None:
        """Start to copy gradients to the host, and weights without masters."""
        pairs = [(self._grads[piece.place], grads[id(piece.owner)][piece.span]) for piece in bucket]
        without = [piece for piece in bucket if "master" not in piece.owner.state]
        self._copies(pairs + [(self._masters[piece.place], piece.owner.weights[piece.span]) for piece in without])

    def step(self, bucket: Sequence[_Piece]) -> None:
        """Wait for the gradients, step the bucket, and start to copy its weights to the device."""
        self._copies.synchronize()
        for piece in bucket:
            state, group = piece.owner.state, piece.owner.group
            master = state["master"][piece.span] if "master" in state else self._masters[piece.place]
            torch._fused_adamw_(
                [master],
                [self._grads[piece.place]],
                [state["exp_avg"][piece.span]],
                [state["exp_avg_sq"][piece.span]],
                [],
                [state["step"]],
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )
            self._staging_of(piece).copy_(master)
        self.wait = self._copies([(piece.owner.weights[piece.span], self._staging_of(piece)) for piece in bucket])

    def _staging_of(self, piece: _Piece) -> Tensor:
        """View the place of a piece's weights, in their dtype."""
        start, weights = piece.place.start * self._width, piece.owner.weights[piece.span]
        return self._weights[start : start + weights.nbytes].view(weights.dtype)


class HostSteps:
    """Step the ranges ``hosted`` in host memory. ``bucket``: elements that are copied and stepped together."""

    def __init__(self, hosted: Sequence[HostRange], platform: Platform, bucket: int = _BUCKET) -> None:
        self._hosted, self._buckets = hosted, _fill_buckets(hosted, bucket)
        size = max((pieces[-1].place.stop for pieces in self._buckets), default=0)
        has_masters = all("master" in one.state for one in hosted)
        self._slots = [_Slot(size, has_masters, platform) for _ in self._buckets[:2]]

    def step(self) -> None:
        """Make one update with the gradients and drop them. Later work of the device waits for the new weights."""
        # The gradients stay alive until their copies are complete.
        grads: dict[int, Tensor] = {}
        for one in self._hosted:
            assert one.stepped.grad is not None
            grads[id(one)], one.stepped.grad = one.stepped.grad, None
            one.state["step"] += 1
        for slot, bucket in zip(self._slots, self._buckets, strict=False):
            slot.fetch(bucket, grads)
        for number, bucket in enumerate(self._buckets):
            slot = self._slots[number % 2]
            slot.step(bucket)
            if number + 2 < len(self._buckets):
                slot.fetch(self._buckets[number + 2], grads)
        for slot in self._slots:
            slot.wait()


def _fill_buckets(hosted: Sequence[HostRange], size: int) -> list[list[_Piece]]:
    """Divide ranges into buckets of at most ``size`` elements. Large ranges are split."""
    buckets: list[list[_Piece]] = []
    used = size
    for one in hosted:
        start, end = 0, len(one.stepped)
        while start < end:
            if used == size:
                buckets.append([])
                used = 0
            count = min(end - start, size - used)
            buckets[-1].append(_Piece(one, slice(start, start + count), slice(used, used + count)))
            start, used = start + count, used + count
    return buckets
