"""Skip tests whose kernels this processor lacks, and emulate a processor that lacks them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from rlhf_mcore.machine import processor

OLDER = Path(__file__).with_name("older_processor")  # of PYTHONPATH


# vLLM's layers of 8 bits as on a processor with AMX: its build for others does not have what packs their weights.
INSTRUCTIONS = {"fp8": ("amx_tile", "avx512_bf16"), "int8": ("avx512_bf16",)}  # as /proc/cpuinfo names them


def missing_instructions(kind: str) -> str:
    """Name the instructions of vLLM's kernels of 8 bits that this processor lacks."""
    return " and ".join(flag for flag in INSTRUCTIONS[kind] if flag not in processor().split())


def needs_kernel(kind: str) -> pytest.MarkDecorator:
    """Skip a test whose kernels of 8 bits this processor does not have."""
    missing = missing_instructions(kind)
    return pytest.mark.skipif(bool(missing), reason=f"vLLM's {kind} kernels need {missing}, which this processor lacks")


has_amx = "amx_tile" in processor().split()
has_delta_kernels = "avx512f" not in processor().split() or "avx512_bf16" in processor().split()


def older_processor(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that sees no AMX and no avx512_bf16."""
    paths = [str(OLDER), *filter(None, [environment.get("PYTHONPATH", "")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def layers_of_8_bits() -> Iterator[None]:
    """Let vLLM build its layers of 8 bits as with AMX, on any processor. Only their kernels need the instructions."""
    import torch
    from vllm import _custom_ops

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True))
        stack.enter_context(mock.patch.object(_custom_ops, "_supports_cpu_fp8_w8a16", True))
        yield
