"""Live parameters on a CPU in the place of vLLM's packed copies (``bridge.live_cpu_weights``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_mcore.bridge.map.trace import recorded_layout


def keep_loading_layout(model: nn.Module) -> list[str]:
    """Let layers multiply with their live parameters on the CPU, so that these can be written in place.

    vLLM's CPU kernels multiply with a packed copy, and drop the original. Here the linear layers, the embeddings and the
    output layer get live parameters back and plain ``torch.nn.functional.linear``, for good: a later reload leaves it so.
    Experts of a mixture keep their packed kernel. Returned are the names of the layers that have changed; on other
    platforms there is none. The weights are undefined until they are loaded or synchronised.

    An update then is a plain copy, as on a GPU, but generation gets slower (by up to two fifths at 80M parameters), and a
    reload costs less than that: for speed leave the layers as they are and use ``reload.reloading``.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from rlhf_mcore.platform.wrapped_layers import base_layers

    changed = []
    with base_layers(model):
        modules = dict(model.named_modules())
    for name, module in modules.items():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "cpu_linear") and isinstance(method, (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)):
            _restore_weight(module)
            _multiply_plainly(module)
            method.process_weights_after_loading = _multiply_plainly
            changed.append(name)
    return changed


def _multiply_plainly(layer: Any) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def _restore_weight(layer: Any) -> None:
    """Give back the weight that packing has dropped; a bias that it has widened gets the weight's dtype again."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, restore_layer_refs

    device = layer.weight.device
    if layer.weight.numel() == 0:
        with device:
            layer.weight = restore_layer_refs(materialize_meta_tensor(recorded_layout(layer)["weight"]), layer)
        layer.weight.data.zero_()
    if getattr(layer, "bias", None) is not None:
        layer.bias.data = layer.bias.data.to(layer.weight.dtype)
