"""Map the live model of an engine: traced from vLLM's loaders, or read from a transformers model.

A vLLM layer with adapters has one tensor of As and one tensor of Bs for each of its Hugging Face matrices, with a
slot for each adapter. The trace calls its ``set_lora`` with meta tensors of whole matrices and records the writes
into its buffers instead of executing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.map.rules import Shapes
from rlhf_mcore.bridge.map.strided import covered_rectangles, find_padding
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter, Recorder, recorded_layout, trace
from rlhf_mcore.families.adapters import hf_module, pairs_of
from rlhf_mcore.families.quantised import quantisation as quantisation_of
from rlhf_mcore.protocols import ADAPTER_SLOTS
from rlhf_mcore.rollout.hf.checkpoint_tensors import checkpoint_tensors
from rlhf_mcore.rollout.vllm.adapters import SLOT, base_layers, set_adapter

Weights = Literal["loaders", "plain"]  # declared by each engine kind


def map_engine(
    model: nn.Module, shapes: Shapes, weights: Weights, *, has_adapters: bool = False, quantisation: str | None = None
) -> EngineMap:
    """Map the live model of an engine.

    Args:
        model: the engine's model, before its first sleep.
        shapes: shapes of the sent tensors by name, in Hugging Face's format (in PEFT's format for adapters).
        weights: "loaders" traces the loaders of vLLM's models; "plain" reads a transformers model.
        has_adapters: the engine applies adapters itself.
        quantisation: the name of the format to which a sync quantises weights. An engine that stores other weights
            gets dequantised values.
    """

    if weights == "plain":
        return map_plain_model(model)
    if quantisation is not None and _holds(model, getattr(torch, (kind := quantisation_of(quantisation)).dtype)):
        shapes = kind.with_scales(shapes)
    return trace_with_adapters(model, shapes) if has_adapters else trace(model, shapes)


def _holds(model: nn.Module, dtype: torch.dtype) -> bool:
    """Return whether vLLM loads some weights of the model in this dtype."""
    return any(tensor.dtype == dtype for module in model.modules() for tensor in recorded_layout(module).values())


def map_plain_model(model: nn.Module) -> EngineMap:
    """Map a live model whose parameters store Hugging Face tensors, or parts of them."""
    live, parts = model.state_dict(keep_vars=True), checkpoint_tensors(model)
    first = {id(tensor): name for name, tensor in reversed(live.items())}  # tied tensors are sent once
    pieces: dict[str, list[Piece]] = {name: [] for name in first.values()}
    for part in parts:
        if part.holder in pieces:
            pieces[part.holder].append(Piece(part.name, (0,) * len(part.shape), part.shape, part.offset, part.strides))
    return EngineMap(
        tuple(
            EngineParameter(name, tuple(live[name].shape), live[name].dtype, tuple(pieces[name]))
            for name in live
            if name in pieces
        )
    )


def trace_with_adapters(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> EngineMap:
    """Trace the live model of a vLLM rank that applies adapters: see :func:`trace`.

    ``shapes`` contains the shapes of the model's tensors, and of the adapters' tensors under PEFT's names.
    """
    adapters = {name: shape for name, shape in shapes.items() if ".lora_" in name}
    with base_layers(model):
        engine = trace(model, {name: shape for name, shape in shapes.items() if name not in adapters})
    return replace(engine, parameters=(*engine.parameters, *_trace_slots(model, adapters)))


def _trace_slots(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[EngineParameter]:
    slots: dict[str, Tensor] = getattr(model, ADAPTER_SLOTS)
    sources = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    recorder = Recorder(sources, slots)
    with torch.no_grad(), recorder:
        set_adapter(model, SLOT, pairs_of(sources))
    parameters = []
    for name, tensor in slots.items():
        pieces, shape = recorder.of((name,))[0], tuple(tensor.shape)
        padding = find_padding(shape, tuple(box for piece in pieces for box in covered_rectangles(piece, shape)))
        parameters.append(EngineParameter(name, shape, tensor.dtype, tuple(pieces), padding))
    reached = {hf_module(piece.hf_name) for parameter in parameters for piece in parameter.pieces}
    assert reached == {hf_module(name) for name in shapes}, "declared by the engine's kind"
    return parameters


def keep_loading_layout(model: nn.Module) -> list[str]:
    """Make CPU layers multiply with their live parameters, so that a sync can write these in place.

    vLLM's CPU kernels multiply with a packed copy and drop the original. This function restores the live
    parameters of linear layers, embeddings and the output layer, and makes them use plain
    ``torch.nn.functional.linear`` permanently. A later reload does not change this back. MoE experts keep their
    packed kernel. The restored weights are undefined until they are loaded or synchronised. Return the names of
    the changed layers (none on other platforms).

    An update is then a plain copy, as on a GPU, but generation is slower (up to two fifths at 80M parameters). A
    reload costs less than that. For speed, keep the layers unchanged and use :func:`reloading`.

    ``bridge.live_cpu_weights`` turns this on.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

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
    """Restore the weight that packing dropped, and cast a widened bias back to the weight's dtype."""
    from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, restore_layer_refs

    device = layer.weight.device
    if layer.weight.numel() == 0:
        with device:
            layer.weight = restore_layer_refs(materialize_meta_tensor(recorded_layout(layer)["weight"]), layer)
        layer.weight.data.zero_()
    if getattr(layer, "bias", None) is not None:
        layer.bias.data = layer.bias.data.to(layer.weight.dtype)


@contextmanager
def reloading(model: nn.Module, group: Sequence[EngineParameter]) -> Iterator[dict[str, Tensor]]:
    """Replace the repacked parameters of one layer, with vLLM's layerwise reload.

    Yield uninitialised flat tensors in the loading layout, by parameter name. The caller must write every element.
    On exit vLLM processes the layer and copies the result to its kernels' tensors. Enclosing modules that derive
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
    if not hasattr(module, "quant_method"):
        with _loading(module, group) as flats:
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


@contextmanager
def _loading(module: Any, group: Sequence[EngineParameter]) -> Iterator[dict[str, Tensor]]:
    """Replace parameters through their loaders, which compute some of them: the decay rates of state spaces.

    Such a loader takes this rank's rows of a whole tensor. Here all ranks' rows are copies of this rank's.
    """
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader

    live = [getattr(module, parameter.name.rpartition(".")[2]) for parameter in group]
    rows = [torch.empty_like(tensor) for tensor in live]
    yield {parameter.name: each.view(-1) for parameter, each in zip(group, rows, strict=True)}
    for tensor, each in zip(live, rows, strict=True):
        _get_original_loader(tensor)(tensor, torch.cat([each] * get_tensor_model_parallel_world_size()))


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
