"""Add features to vLLM on a CPU that it has only on GPUs, and repair its start next to llvmlite.

The features are norm kernels, rotary embeddings for all heads of latent attention, sampling after partially computed prompts,
and the temperature of drafted tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rlhf_mcore.config.schema.rollout import RolloutLayoutConfig


def use_norm_kernels(model: nn.Module) -> None:
    """Replace each norm of an fp32 model by a single kernel. vLLM runs eight operations on a CPU."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    layers: list[Any] = [layer for layer in model.modules() if type(layer) is RMSNorm]
    for layer in layers:
        if layer.has_weight and layer.variance_size_override is None:
            layer._forward_method = partial(_norm, layer)


def _norm(module: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise like vLLM's ``RMSNorm.forward``. With a residual, both are overwritten. The kernels require contiguous rows."""
    import torch

    x = x.contiguous()
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, module.weight, module.variance_epsilon)
        return out
    residual = residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
    return x, residual


def rotate_every_head(model: nn.Module) -> None:
    """Rotate all heads of queries with a separate head dimension, as in latent attention.

    vLLM 0.32's CPU kernel divides the last dimension by the head size to count heads. For a query [tokens, heads, size] it
    finds one head, and rotates rows that do not match the tokens. In 16 bits it ends with SIGSEGV if the rotated part of a
    head is not a multiple of 16. vLLM's torch implementation is correct.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for layer in model.modules():
        # vLLM caches rotary embeddings for the next engine of a process, so this one may already be patched.
        if isinstance(layer, RotaryEmbedding) and getattr(layer._forward_method, "func", None) is not _rotate:
            layer._forward_method = partial(_rotate, layer, layer._forward_method)


def _rotate(module: Any, usual: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    fits_kernel = query.dim() == 2 and (query.element_size() == 4 or module.rotary_dim % 16 == 0)
    return (usual if fits_kernel else module.forward_native)(positions, query, key)


def spare_generators_of_cut_prompts(runner: Any) -> None:
    """Prevent a partially computed prompt from advancing its random generator.

    vLLM samples a token for every request of a pass, and discards the tokens of prompts that the token budget has cut. It
    then resets the request's generator by an offset, which CPU generators do not have (vLLM 0.32: "CPU Generator does not use
    offset"). Here such a request has no generator while the discarded token is sampled, so its generator does not advance.
    """
    sample = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        generators, cut = runner.input_batch.generators, runner.discard_request_mask.np
        spared = {index: generators.pop(index) for index in list(generators) if cut[index]}
        try:
            return sample(*args, **kwargs)
        finally:
            generators.update(spared)

    runner.sample_tokens = sample_tokens


def verify_drafts_at_their_temperature() -> None:
    """Repair two functions that vLLM uses to verify drafted tokens. Idempotent.

    ``expand_batch_to_tokens`` of vLLM 0.32 on a CPU returns uninitialised memory for a temperature. Its replacement for the
    kernel (``vllm/utils/cpu_triton_utils.py``, ``_expand_kernel_impl``) writes to an int64 copy of its output tensor, and
    drops the copy. ``apply_top_k_top_p`` fails in a pass without drafts, because it takes the maximum of an empty top_k.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _repeat
    rejection_sampler.apply_top_k_top_p = _truncate


def _repeat(x: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Repeat ``x[i]`` for each token of request i, up to ``ends[i]`` exclusive. Replace ``replace_from`` by ``replace_to``."""
    import torch

    replaced = x.masked_fill(x == replace_from, replace_to)
    return torch.repeat_interleave(replaced, ends.diff(prepend=ends.new_zeros(1)), output_size=num_tokens)


def _truncate(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits, top_k, top_p) if len(logits) else logits


@contextmanager
def hide_llvmlite() -> Iterator[None]:
    """Hide llvmlite while an engine is built, because vLLM searches the attributes of all modules for its kernels.

    vLLM 0.32 fails at llvmlite's library object, which returns a function for every attribute, including ``__dict__``. The
    object exists after numba has compiled something, for example when an earlier engine of the process has drafted by
    n-grams.
    """
    from vllm.triton_utils import dispatcher

    bind, name = dispatcher._rebind_kernels, "llvmlite.binding.ffi"

    def bind_elsewhere(overrides: Any) -> None:
        hidden = sys.modules.pop(name, None)
        try:
            bind(overrides)
        finally:
            if hidden is not None:
                sys.modules[name] = hidden

    dispatcher._rebind_kernels = bind_elsewhere
    try:
        yield
    finally:
        dispatcher._rebind_kernels = bind


def complete_grid(runner: Any, layout: RolloutLayoutConfig) -> None:
    """Prepare a model runner for its layout."""
    if layout.pp > 1:
        _make_inputs_of_stage(runner)
    if layout.ep > 1:
        _compute_own_experts()
    if layout.dp > 1:
        _exchange_rows()


def _make_inputs_of_stage(runner: Any) -> None:
    """Allocate the inputs of a pipeline stage. vLLM 0.32 does this in a warm-up pass, which it skips if nothing is compiled."""
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


def _compute_own_experts() -> None:
    """Make the expert kernels compute this rank's experts only. Idempotent.

    vLLM 0.32's CPU kernel receives the map from a layer's experts to the rank's experts. It does not apply the map, and takes
    the numbers of the layer for numbers of the rank. Here experts of other ranks get weight zero. The sum over ranks includes
    them.
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
    """Let data-parallel groups exchange tokens with experts. Idempotent.

    vLLM 0.32 calls two operations with parts of unequal sizes, which its CPU communicator does not implement.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator: Any = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gather_rows, _reduce_scatter_rows


def _all_gather_rows(
    communicator: Any, parts: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> Any:
    """Concatenate the rows [n_r, ...] of all ranks r in rank order. ``sizes`` contains the numbers of rows n_r."""
    if isinstance(parts, list):
        return [_all_gather_rows(communicator, part, dim, sizes) for part in parts]
    import torch
    import torch.distributed as dist

    assert dim == 0
    sizes = sizes or [len(parts)] * communicator.world_size
    padded = parts.new_zeros(max(sizes), *parts.shape[1:])  # gloo gathers parts of equal size only
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
