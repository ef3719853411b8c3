"""Reload layers whose kernels do not read live parameters, with vLLM's layerwise reload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rlhf_mcore.bridge.map.trace import EngineParameter

if TYPE_CHECKING:
    from torch import Tensor, nn


@contextmanager
def reloading(model: nn.Module, group: Sequence[EngineParameter]) -> Iterator[dict[str, Tensor]]:
    """Replace the repacked parameters of one layer, with vLLM's layerwise reload.

    Yield uninitialised flat tensors in the loading layout, by parameter name. The caller must write every element.
    On exit vLLM processes the layer and puts the result where its kernels read it. Enclosing modules that derive
    data from the layer's weights are processed again, too (latent attention absorbs a projection). The peak extra
    memory is one layer. Run it under vLLM's ``set_current_vllm_config``.

    Args:
        model: the live model.
        group: an element of ``EngineMap.repacked``.
    """
    from vllm.model_executor.model_loader.reload import layerwise, meta
    from vllm.platforms import current_platform

    module: Any = model.get_submodule(group[0].module)
    if _has_packed_weight_alone(module, group):
        with _packing(module, group[0]) as flats:
            yield flats
        return
    layerwise.initialize_layerwise_reload(module)
    info = layerwise.get_layerwise_info(module)
    names = {name for parameter in group for name in (parameter.name, *parameter.aliases)}
    above = {id(parent): parent for name in names for parent in _processing_above(model, name)}
    for parameter in group if above else ():
        kernel = info.kernel_tensors[0][parameter.name.rpartition(".")[2]]
        if not kernel.numel():  # the enclosing module has emptied it, and empties it again after processing
            kernel.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=kernel.device)
    try:
        meta.materialize_layer(module, info)
        yield {p.name: getattr(module, p.name.rpartition(".")[2]).data.view(-1) for p in group}
        if current_platform.is_cpu() and getattr(module.quant_method, "moe_kernel", None) is not None:
            module.quant_method.moe_kernel = None  # vLLM 0.32 packs experts only when it builds their kernel
        layerwise._layerwise_process(module, info)
        for processing in above.values():
            processing.process_weights_after_loading(group[0].dtype)
    finally:
        if info.can_load():  # processing failed: restore the old tensors
            layerwise._place_kernel_tensors(module, info)
            info.reset()
    for alias in {alias for parameter in group for alias in parameter.aliases}:
        sharer: Any = model.get_submodule(alias.rpartition(".")[0])
        if sharer is not module:
            sharer.quant_method.process_weights_after_loading(sharer)


def _has_packed_weight_alone(module: Any, group: Sequence[EngineParameter]) -> bool:
    """Return whether the module is a CPU linear layer without bias whose only weight copy is its kernel's packed copy."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    is_linear = type(getattr(module, "quant_method", None)) is UnquantizedLinearMethod and hasattr(module, "cpu_linear")
    return is_linear and len(group) == 1 and not group[0].aliases and not module.weight.numel()


@contextmanager
def _packing(module: Any, weight: EngineParameter) -> Iterator[dict[str, Tensor]]:
    """Replace a packed weight like :func:`reloading`, without vLLM's reload records."""
    empty, whole = module.weight, torch.empty(weight.shape, dtype=weight.dtype)
    yield {weight.name: whole.view(-1)}
    module.weight = torch.nn.Parameter(whole, requires_grad=False)
    try:
        module.quant_method.process_weights_after_loading(module)
    finally:
        module.weight = empty


def _processing_above(model: nn.Module, parameter: str) -> Iterator[Any]:
    """Yield the modules around a parameter's own module that process inner weights after loading."""
    name = parameter.rpartition(".")[0].rpartition(".")[0]
    while name:
        module = model.get_submodule(name)
        if hasattr(module, "process_weights_after_loading"):
            yield module
        name = name.rpartition(".")[0]
