"""Skip tests whose kernels this processor lacks, and emulate a processor that lacks them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest

from rlhf_mcore.machine import processor
from rlhf_mcore.rollout.vllm.limits import FP8_INSTRUCTIONS

OLDER = Path(__file__).with_name("older_processor")  # of PYTHONPATH


def missing_fp8_instructions() -> str:
    """Name the instructions of vLLM's fp8 kernels that this processor lacks."""
    return " and ".join(sorted(set(FP8_INSTRUCTIONS) - set(processor().split())))


needs_fp8_kernel = pytest.mark.skipif(
    bool(missing_fp8_instructions()), reason=f"vLLM's fp8 kernels need {missing_fp8_instructions()}"
)
has_amx = "amx_tile" in processor().split()


def older_processor(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a process that sees no AMX and no avx512_bf16."""
    paths = [str(OLDER), *filter(None, [environment.get("PYTHONPATH", "")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def fp8_layers() -> Iterator[None]:
    """Let vLLM build its fp8 layers on any processor. Only their kernels need the instructions."""
    import torch
    from vllm import _custom_ops

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True))
        stack.enter_context(mock.patch.object(_custom_ops, "_supports_cpu_fp8_w8a16", True))
        yield
