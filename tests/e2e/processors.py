"""Skip tests whose kernels this processor lacks, and emulate a processor that lacks them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from rlhf_mcore.machine import processor

OLDER = Path(__file__).with_name("older_processor")  # folder for PYTHONPATH


# vLLM's 8-bit layers as on a processor with AMX. Its build for other processors cannot pack their weights.
INSTRUCTIONS = {"fp8": ("amx_tile", "avx512_bf16"), "int8": ("avx512_bf16",)}  # names in /proc/cpuinfo


def missing_instructions(kind: str) -> str:
    """Return the instructions of vLLM's 8-bit kernels that this processor lacks."""
    return " and ".join(flag for flag in INSTRUCTIONS[kind] if flag not in processor().split())


def needs_kernel(kind: str) -> pytest.MarkDecorator:
    """Skip a test if this processor cannot run its 8-bit kernels."""
    missing = missing_instructions(kind)
    return pytest.mark.skipif(bool(missing), reason=f"vLLM's {kind} kernels need {missing}, which this processor lacks")


has_amx = "amx_tile" in processor().split()
# vLLM's build for AVX2 has no all-reduce through shared memory.
ALL_REDUCE = "shared memory or gloo" if "avx512f" in processor().split() else "gloo"
has_delta_kernels = "avx512f" not in processor().split() or "avx512_bf16" in processor().split()


def older_processor(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process without AMX and avx512_bf16."""
    paths = [str(OLDER), *filter(None, [environment.get("PYTHONPATH", "")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def layers_of_8_bits() -> Iterator[None]:
    """Let vLLM build its 8-bit layers as with AMX, on any processor. Only their kernels need the instructions."""
    import torch
    from vllm import _custom_ops

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True))
        stack.enter_context(mock.patch.object(_custom_ops, "_supports_cpu_fp8_w8a16", True))
        yield
