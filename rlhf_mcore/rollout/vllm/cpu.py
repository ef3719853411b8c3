"""Add to vLLM on a CPU what it has on GPUs alone, and repair its start beside llvmlite.

These are norms by kernels, rotations of latent attention's heads, draws of prompts that are computed in parts, and the temperature
of drafted tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def use_norm_kernels(model: nn.Module) -> None:
    """Let norms of an fp32 model be one operation each, where vLLM runs eight on a CPU."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    layers: list[Any] = [layer for layer in model.modules() if type(layer) is RMSNorm]
    for layer in layers:
        if layer.has_weight and layer.variance_size_override is None:
            layer._forward_method = partial(_norm, layer)


def _norm(module: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Normalise like vLLM's ``RMSNorm.forward``: with a residual both are overwritten. The kernels read rows that are back to back."""
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
    """Let rotary embeddings rotate all heads of a query that has them in a dimension of their own, as latent attention's has.

    vLLM 0.32's kernel on a CPU divides the last dimension by the size of a head to count heads. Of a query [tokens, heads, size] it
    takes one, and the rows that it rotates are not those of the tokens. Its operations in torch are right.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for layer in model.modules():
        # vLLM keeps rotations for the next engine of a process.
        if isinstance(layer, RotaryEmbedding) and getattr(layer._forward_method, "func", None) is not _rotate:
            layer._forward_method = partial(_rotate, layer, layer._forward_method)


def _rotate(module: Any, usual: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
    return (usual if query.dim() == 2 else module.forward_native)(positions, query, key)


def spare_generators_of_cut_prompts(runner: Any) -> None:
    """Keep a prompt that is computed in parts from drawing before it is complete.

    vLLM samples a token for every request of a pass and discards those of prompts that the token budget has cut. It then winds
    the request's generator back by an offset, which generators on a CPU do not have (vLLM 0.32: "CPU Generator does not use
    offset"). Here such a request has no generator while the discarded token is drawn, so its own is where it was.
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
    """Mend two functions with which vLLM verifies drafted tokens. Called again it changes nothing.

    ``expand_batch_to_tokens`` of vLLM 0.32 on a CPU returns uninitialised memory for a temperature: its stand-in for the kernel
    (``vllm/utils/cpu_triton_utils.py``, ``_expand_kernel_impl``) writes to an int64 copy of the tensor that it is given, and drops
    it. ``apply_top_k_top_p`` fails in a pass in which nothing was drafted, as it takes the maximum of no top_k at all.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = _repeat
    rejection_sampler.apply_top_k_top_p = _truncate


def _repeat(x: Tensor, ends: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
    """Repeat ``x[i]`` for each token of request i, which end before ``ends[i]``; ``replace_from`` becomes ``replace_to``."""
    import torch

    replaced = x.masked_fill(x == replace_from, replace_to)
    return torch.repeat_interleave(replaced, ends.diff(prepend=ends.new_zeros(1)), output_size=num_tokens)


def _truncate(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits, top_k, top_p) if len(logits) else logits


@contextmanager
def started_beside_llvmlite() -> Iterator[None]:
    """Hide llvmlite while an engine is built: vLLM looks for its kernels in everything that modules hold.

    vLLM 0.32 fails there: the object for the library of LLVM has a function for every attribute that is asked of it, ``__dict__``
    too. It is there once numba has compiled something, as where an earlier engine of the process has drafted by n-grams.
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
