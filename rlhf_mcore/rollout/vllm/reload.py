"""vLLM's reload of all weights of a model, and repairs for weights that it would lose without an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rlhf_mcore.platform import current_platform

if TYPE_CHECKING:
    from torch import Tensor


def reload(worker: Any, weights: Iterable[tuple[str, Tensor]], drafted: Any = None) -> list[str]:
    """Reload the weights inside vLLM's worker, and return the parameters that were not written (vLLM only logs them).

    ``drafted`` is the model together with its MTP layers, if these are reloaded too.
    """
    model = drafted or worker.get_model()
    load_weights = model.load_weights
    loaded: set[str] = set()

    def recording(pairs: Iterable[tuple[str, Tensor]]) -> set[str]:
        _prepare_reload(model)
        names = load_weights(_by_expert(pairs))
        lost = _lost_layers(model)
        loaded.update(name for name in names if name.rpartition(".")[0] not in lost)
        return names

    model.load_weights = recording
    worker.model_runner.get_model = lambda: model  # vLLM reloads the weights of this model
    for module in model.modules():
        if (
            getattr(getattr(module, "quant_method", None), "moe_kernel", None) is not None
            and current_platform().name == "cpu"
        ):
            module.quant_method.moe_kernel = None  # vLLM 0.32 packs experts only when it builds their kernel
    try:
        worker.reload_weights(weights_iterator=weights, is_checkpoint_format=True)
    except BaseException:
        _abandon_reload(worker, model)
        raise
    finally:
        # Removes the overrides, so that the classes' methods apply again.
        del model.load_weights, worker.model_runner.get_model
    _reprocess_tied(model)
    return sorted({name for name, _ in model.named_parameters()} - loaded - _derived_parameters(model))


def _derived_parameters(model: Any) -> set[str]:
    """Return the names of the parameters that attention derives from others after loading. No checkpoint contains them.

    Latent attention absorbs a projection into W_UV and W_UK_T, except with AMX kernels. Processing it again recreates them.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return {
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        if is_deferred_attention_layer(module)
        for attribute in module._parameters.keys() - get_layerwise_info(module).restore_metadata[0].keys()
    }


def _prepare_reload(model: Any) -> None:
    """Prepare layers that vLLM's reload would skip without an error, or fail at.

    Layers without post-processing are written in place, because some models write their parameters without loaders (the sinks
    of gpt-oss). A projection that latent attention has absorbed gets its freed memory back.
    """
    import torch
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload import layerwise

    for module in model.modules():
        info = layerwise.get_layerwise_info(module)
        if is_deferred_attention_layer(module):
            if (absorbed := getattr(module, "kv_b_proj", None)) is not None:
                weight = layerwise.get_layerwise_info(absorbed).kernel_tensors[0]["weight"]
                if not weight.numel():
                    weight.data = torch.empty(absorbed.weight.shape, dtype=weight.dtype, device=weight.device)
        elif info.can_load() and getattr(module, "quant_method", None) is None:
            layerwise._place_kernel_tensors(module, info)
            info.reset()
            for tensor in module.parameters(recurse=False):
                # The reload's loader would drop the tensor; biases of norms keep such a loader.
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)


def _by_expert(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor with all experts into single experts. vLLM's gpt-oss loaders would lose the whole tensor during a reload."""
    for name, tensor in pairs:
        block, is_stacked, part = name.rpartition(".mlp.experts.")
        if is_stacked and "." not in part:
            yield from ((f"{block}.mlp.experts.{number}.{part}", expert) for number, expert in enumerate(tensor))
        else:
            yield name, tensor


def _lost_layers(model: Any) -> set[str]:
    """Return the names of layers that vLLM reloads without any tensor, even if its model reports them as loaded."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = {name: get_layerwise_info(module) for name, module in model.named_modules()}
    return {name for name, info in infos.items() if info.can_load() and info.load_numel_total and not info.load_numel}


def _reprocess_tied(model: Any) -> None:
    """Process layers that share a parameter with another layer again.

    vLLM processes the layer whose tensor was loaded. A tied lm_head is not one of these. On the CPU it would continue to
    multiply with the prepacked copy of the old embeddings.
    """
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else []:
            method = getattr(module, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(module)


def _abandon_reload(worker: Any, model: Any) -> None:
    """Close a reload that raised. Otherwise the buffered pieces would count for the next reload."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    with set_current_vllm_config(worker.vllm_config):
        finalize_layerwise_reload(model, worker.model_config)
