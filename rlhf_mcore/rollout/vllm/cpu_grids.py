"""Add to vLLM on a CPU what engines need that are cut in other ways than by tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.config.schema.rollout import RolloutLayoutConfig


def complete(runner: Any, layout: RolloutLayoutConfig) -> None:
    """Prepare a model runner for its layout."""
    if layout.pp > 1:
        _make_inputs_of_stage(runner)
    if layout.ep > 1:
        _compute_own_experts()
    if layout.dp > 1:
        _exchange_rows()


def _make_inputs_of_stage(runner: Any) -> None:
    """Allocate what a stage receives: vLLM 0.32 does it in a first pass, which it leaves out where nothing is compiled."""
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _compute_own_experts() -> None:
    """Let kernels compute the experts that a rank has. Called again it changes nothing.

    vLLM 0.32's kernel on a CPU is given the map from a layer's experts to those of the rank, and takes numbers of the former for
    those of the latter. Here experts of other ranks get no weight; the sum over ranks has them.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel: Any = CPUUnquantizedExperts
    if kernel.apply is not _apply_own:
        kernel.apply_all, kernel.apply = kernel.apply, _apply_own


def _apply_own(kernel: Any, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **rest: Any) -> Any:
    if expert_map is not None:
        topk_ids = expert_map[topk_ids.long()]
        topk_weights, topk_ids = topk_weights.masked_fill(topk_ids < 0, 0.0), topk_ids.clamp(min=0)
    return kernel.apply_all(topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **rest)


def _exchange_rows() -> None:
    """Let groups that attend to requests of their own exchange tokens with experts. Called again it changes nothing.

    vLLM 0.32 asks its communicator of a CPU for two operations with parts of unequal sizes, which that does not have.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator: Any = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gather_rows, _reduce_scatter_rows


def _all_gather_rows(
    communicator: Any, parts: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> Any:
    """Join the rows [n_r, ...] of all ranks r, of which ``sizes`` are the numbers, in the order of ranks."""
    if isinstance(parts, list):
        return [_all_gather_rows(communicator, part, dim, sizes) for part in parts]
    import torch
    import torch.distributed as dist

    assert dim == 0
    sizes = sizes or [len(parts)] * communicator.world_size
    padded = parts.new_zeros(max(sizes), *parts.shape[1:])  # gloo gathers equal parts
    padded[: len(parts)] = parts
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=communicator.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _reduce_scatter_rows(communicator: Any, rows: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's rows of the sum of all ranks' rows [sum of n_r, ...]."""
    import torch.distributed as dist

    assert dim == 0
    total = rows.clone()
    dist.all_reduce(total, group=communicator.device_group)
    sizes = list(sizes or [len(rows) // communicator.world_size] * communicator.world_size)
    return total.split(sizes)[communicator.rank_in_group]
