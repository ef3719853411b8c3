"""Describe devices. Everything above this package is the same code on a CPU and on CUDA. Begin with ``base``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rlhf_mcore.platform.base import DTYPES, Copies, ModuleView, Platform

__all__ = ["DTYPES", "Copies", "ModuleView", "Platform", "current_platform", "eager_imports"]


def current_platform() -> Platform:
    """Return CUDA's platform when torch sees a device, else the CPU's."""
    if torch.cuda.is_available():
        from rlhf_mcore.platform.cuda import CudaPlatform

        return CudaPlatform()
    from rlhf_mcore.platform.cpu import CpuPlatform

    return CpuPlatform()


@contextmanager
def eager_imports() -> Iterator[None]:
    """Import Megatron-core for the first time in this block.

    Its fused functions, which ``torch.compile`` decorates, are not called on a CPU. There torch's compiler is not imported for them,
    which would take a second of each rank.
    """
    name = "TORCHDYNAMO_DISABLE"  # read where a function is decorated
    if name in os.environ or torch.cuda.is_available():
        yield
        return
    os.environ[name] = "1"
    decorator = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]  # torch 2.13 imports its compiler all the same
    try:
        yield
    finally:
        torch.compile = decorator
        del os.environ[name]


def _as_it_is(function: Any = None, **_options: Any) -> Any:
    """Return a function as it is, in the place of ``torch.compile``, with and without parentheses."""
    return _as_it_is if function is None else function
