"""Run Megatron-core on a CPU over gloo, with a narrow redirection layer.

Megatron-core uses CUDA names in many places. This module does not change torch for the whole process, because vLLM
runs in it and must see the real torch. Instead, every loaded ``megatron.core`` module gets its own view of torch, in
which the few CUDA names it uses refer to the CPU.

Two names are methods of Tensor and cannot be replaced per module. They are replaced within a Megatron region and
restored after it. This file contains the whole list, with a reason per entry. ``tests/unit/platform`` fails if an
entry is not needed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.platform import cpu_kernels, cpu_libraries
from rlhf_mcore.platform.base import ModuleView, Platform

_CPU = torch.device("cpu")


class _Event:
    """Replace torch.cuda.Event. On a CPU, all work is complete when a call returns."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class _Stream:
    """Replace torch.cuda.Stream."""

    device = _CPU

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None: ...


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _cuda_names() -> dict[str, Any]:
    """Return the replacements in ``torch.cuda`` for Megatron-core."""
    stream = _Stream()
    return {
        "current_device": lambda: _CPU,  # used as device= for buffers and rotary frequencies
        "synchronize": _nothing,  # p2p_communication after batched sends
        "current_stream": lambda device=None: stream,  # DDP buffers order their collectives on streams
        "Stream": _Stream,  # the token dispatcher overlaps copies of counts to the host
        "stream": lambda s: contextlib.nullcontext(),  # gradient buffers enter the communication stream
        "manual_seed": torch.manual_seed,  # tensor_parallel.random seeds per-rank generators
        # tensor_parallel.random and activation recomputation
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "nvtx": SimpleNamespace(range_push=_nothing, range_pop=_nothing),  # profiler ranges
    }


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that ``device="cuda"`` means the CPU.

    Pinned memory (for rotary embeddings) is plain memory.
    """

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


_FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange")  # schedules, P2P shapes, gradient scaler


def _all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None) -> None:
    """Gather like NCCL. Ranks can have different numbers of rows, which gloo does not support."""
    if len({len(output) for output in outputs}) == 1:
        dist.all_gather(outputs, tensor, group=group)
        return
    padded = tensor.new_zeros(max(len(output) for output in outputs), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    parts = [torch.empty_like(padded) for _ in outputs]
    dist.all_gather(parts, padded, group=group)
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part[: len(output)])


def _reduce_scatter(output: torch.Tensor, inputs: list[torch.Tensor], group: Any = None) -> None:
    """Sum the parts of all ranks and keep this rank's rows: the reverse of ``_all_gather``."""
    total = torch.cat(inputs)
    dist.all_reduce(total, group=group)
    output.copy_(total.split([len(part) for part in inputs])[dist.get_rank(group)])


def _reduce_scatter_part(
    output: torch.Tensor,
    inputs: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum flat ``inputs`` over ranks in place. ``output`` is a view of this rank's part.

    All of ``inputs`` is overwritten. gloo's own function copies the buffer several times. It takes five times as long
    as an in-place sum of all parts.
    """
    assert output.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()
    return dist.all_reduce(inputs, op, group, async_op)


def _all_gather_parts(
    output: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> None:
    """Gather the parts of all ranks into a flat ``output``; ``part`` is this rank's view of it.

    The gather is complete on return, even with ``async_op``. gloo's own function copies the buffer several times. It
    takes six times as long as sending each part to its place.
    """
    assert part.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
    for rank, received in enumerate(output.chunk(dist.get_world_size(group))):
        dist.broadcast(received, group=group, group_src=rank)


# Replacements in ``torch.distributed`` for Megatron-core.
_COLLECTIVES = {
    "all_gather": _all_gather,  # gathers an expert's tokens from the ranks that shard it (mappings.py)
    "reduce_scatter": _reduce_scatter,  # the reverse
}


def _get_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Replace the copy of a tensor to the host. The tensor is already there."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


_TYPE_NAMES = {torch.float32: "FloatTensor", torch.float16: "HalfTensor", torch.bfloat16: "BFloat16Tensor"}


def _type(tensor: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Replace ``Tensor.type()``. The optimizers compare it with the CUDA type names to sort parameters."""
    if dtype is None and tensor.dtype in _TYPE_NAMES:
        return f"torch.cuda.{_TYPE_NAMES[tensor.dtype]}"
    return _TENSOR_TYPE(tensor, dtype, non_blocking, **kwargs)


_TENSOR_TYPE = torch.Tensor.type


def _cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace ``Tensor.cuda()``, which is called for tied embeddings and the loss scaler's state."""
    return tensor


class CpuPlatform(Platform):
    """Processes without a GPU that communicate over gloo."""

    name = "cpu"
    collective_backend = "gloo"
    default_dtype = "fp32"

    def device(self) -> torch.device:
        return _CPU

    def setup_process(self, local_rank: int, threads: int, deterministic: bool = False) -> None:
        torch.set_num_threads(threads)
        cpu_libraries.make_reproducible()

    def varying(self) -> str:
        if cpu_libraries.make_reproducible():
            return ""
        return (
            f"MKL ran in this process before {cpu_libraries.VARIABLE} was set, so on some processors two equal runs differ in "
            f"the last bits; set {cpu_libraries.VARIABLE}={cpu_libraries.MODE} in the environment of this process"
        )

    def prepare_megatron(self) -> None:
        """Redirect the loaded modules of Megatron-core.

        Raises:
            RuntimeError: this list does not support the installed minor version of Megatron-core.
        """
        from megatron.core.distributed import param_and_grad_buffer
        from megatron.core.models.common.embeddings import rope_utils
        from megatron.core.tensor_parallel import random as megatron_random
        from megatron.core.transformer import mlp
        from megatron.core.transformer.moe import token_dispatcher

        from rlhf_mcore.platform.megatron_versions import LOCKED, SERIES, VERSION, is_supported

        if not is_supported():
            raise RuntimeError(
                f"megatron-core {VERSION} is installed, but only {' and '.join(SERIES)} are known to work on a CPU. "
                f"Install megatron-core {LOCKED}."
            )
        super().prepare_megatron()
        views = {"cuda": ModuleView(torch.cuda, _cuda_names()), "distributed": ModuleView(dist, _COLLECTIVES)}
        view = ModuleView(torch, {**views, **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}})
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
                module.torch = view  # type: ignore[attr-defined]
        # These two take a device and a graph-safe flag, and access torch.cuda.default_generators.
        megatron_random._get_cuda_rng_state = _get_rng_state
        megatron_random._set_cuda_rng_state = _set_rng_state
        # Collectives take the sizes of parts as numbers. This function converts tensors to numbers only on CUDA.
        token_dispatcher.maybe_move_tensor_to_cpu = _to_host
        # Collectives of DDP and the distributed optimizer on their flat buffers. A rank's part is a view of the
        # buffer.
        param_and_grad_buffer.dist_reduce_scatter_func = _reduce_scatter_part
        param_and_grad_buffer.dist_all_gather_func = _all_gather_parts
        # Operations of transformers other than matrix products. Megatron runs CUDA kernels or separate operations for
        # them.
        mlp.bias_swiglu_impl, mlp.weighted_bias_swiglu_impl = cpu_kernels.swiglu, cpu_kernels.weighted_swiglu
        if not hasattr(plain := rope_utils._apply_rotary_pos_emb_bshd, "__wrapped__"):
            rope_utils._apply_rotary_pos_emb_bshd = cpu_kernels.rotation(plain)

    @contextlib.contextmanager
    def megatron_region(self) -> Iterator[None]:
        before = torch.Tensor.cuda, torch.Tensor.type
        torch.Tensor.cuda, torch.Tensor.type = _cuda, _type  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.Tensor.cuda, torch.Tensor.type = before  # type: ignore[method-assign]
