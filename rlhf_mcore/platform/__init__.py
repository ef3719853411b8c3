"""Device platforms.

All packages above this one run the same code on a CPU and on CUDA. Start reading with ``base``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_mcore.platform.base import DTYPES, Copies, ModuleView, Platform

__all__ = ["DTYPES", "Copies", "ModuleView", "Platform", "current_platform", "eager_imports"]


def current_platform() -> Platform:
    """Return the CUDA platform if torch finds a device, else the CPU platform."""
    if torch.cuda.is_available():
        from rlhf_mcore.platform.cuda import CudaPlatform

        return CudaPlatform()
    from rlhf_mcore.platform.cpu import CpuPlatform

    return CpuPlatform()


@contextmanager
def eager_imports() -> Iterator[None]:
    """Import Megatron-core for the first time within this block, without torch's compiler on a CPU.

    ``torch.compile`` decorates Megatron's fused functions, which a CPU never calls. Importing the compiler for them
    would take a second per rank.
    """
    name = "TORCHDYNAMO_DISABLE"  # read when a function is decorated
    if name in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[name] = "1"
    decorator = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]  # torch 2.13 imports its compiler despite the variable
    try:
        yield
    finally:
        torch.compile = decorator
        del os.environ[name]


def _as_it_is(function: Any = None, **_options: Any) -> Any:
    """Replace ``torch.compile``, with and without parentheses, and return the function unchanged."""
    return _as_it_is if function is None else function
