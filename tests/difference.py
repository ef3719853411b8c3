"""Compare sets of tensors. A failure shows the position and both values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def first_difference(
    found: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0
) -> str:
    """Describe the first tensor that differs between ``found`` and ``expected``, or is missing; "" if there is none.

    NaN equals nothing. ``found`` is read to its end, because other ranks may wait for its collectives.
    """
    first, names = "", set()
    for name, tensor in found.items() if isinstance(found, Mapping) else found:
        names.add(name)
        if not first:
            first = (
                _difference(name, tensor, expected[name], tolerance) if name in expected else f"{name} is unexpected"
            )
    missing = [name for name in expected if name not in names]
    return first or (f"{missing[0]} is missing" if missing else "")


def _difference(name: str, found: Tensor, expected: Tensor, tolerance: float) -> str:
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{name} is {found.dtype} {list(found.shape)}, expected {expected.dtype} {list(expected.shape)}"
    close = (found - expected).abs() <= tolerance if tolerance else found == expected
    if close.all():
        return ""
    index = tuple((~close).nonzero()[0].tolist())
    count = int((~close).sum())
    return f"{name}{list(index)} is {found[index].item()!r}, expected {expected[index].item()!r} ({count} of {close.numel()} differ)"


def any_rank(differences: Iterable[str]) -> str:
    """Return the first difference that any rank found, with the rank; "" if there is none."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(differences) if text), "")


def zeros_like(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
