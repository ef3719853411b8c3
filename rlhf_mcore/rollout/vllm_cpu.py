"""What vLLM lacks on a CPU: norms by kernels, which it takes on GPUs alone, and draws of prompts that are computed in parts."""

from __future__ import annotations

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
    """As vLLM's ``RMSNorm.forward``: with a residual both are overwritten. The kernels read rows that are back to back."""
    import torch

    x = x.contiguous()
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, module.weight, module.variance_epsilon)
        return out
    residual = residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
    return x, residual


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
