"""A vLLM engine that adds adapters to the weights. Its layers have slots, which a bridge finds and writes like weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from rlhf_mcore.families.adapters import hf_module
from rlhf_mcore.protocols import ADAPTER_SLOTS

Shapes = Mapping[str, tuple[int, ...]]
SLOT = 0  # index in each buffer: the trained adapter


def options(shapes: Shapes, count: int) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for ``count`` adapters. ``shapes`` contains the shapes of A and B by their PEFT names."""
    return {
        "enable_lora": True,
        "max_lora_rank": max(shape[0] for name, shape in shapes.items() if "lora_A" in name),
        # On a CPU, vLLM 0.32 adds the last slot to rows without an adapter, so the last slot stays zero.
        "max_loras": count + 1,
        "lora_target_modules": sorted({hf_module(name).rpartition(".")[2] for name in shapes}),
    }


@contextmanager
def experts_without_adapters() -> Iterator[None]:
    """Within this block vLLM builds expert layers as for an engine without adapters, with any of its kernels.

    vLLM 0.32 has one kernel that adds adapters of experts, for GPUs. It selects this kernel for every engine with adapters.
    """
    from vllm.model_executor.layers.fused_moe import layer as experts

    original = experts.FusedMoEConfig

    def configuration(**fields: Any) -> Any:
        return original(**{**fields, "is_lora_enabled": False})

    with mock.patch.object(experts, "FusedMoEConfig", configuration):
        yield


def open_slots(runner: Any, shapes: Shapes, count: int) -> list[Any]:
    """Register zero adapters with vLLM, without loading files. Return the objects by which requests name them."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest

    manager = runner.lora_manager._adapter_manager
    requests = []
    for slot in range(SLOT, SLOT + count):
        number = slot + 1  # vLLM's id of the adapter
        # Same as ``add_adapter``, without stacking the expert matrices, which an adapter without matrices does not have.
        manager._registered_adapters[number] = LoRAModel(number, options(shapes, count)["max_lora_rank"], {})
        manager.activate_adapter(number)
        manager.pin_adapter(number)
        assert manager.lora_index_to_id[slot] == number
        requests.append(LoRARequest(f"adapter {slot}", number, "in memory"))
    model: nn.Module = runner.model
    name_slots(model)
    return requests


def forget_batch(runner: Any) -> None:
    """Discard the layout of the last batch. vLLM reuses it for an equal batch, but a sleep frees its memory."""
    runner.lora_manager._adapter_manager._last_mapping = None


def adapter_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """List the layers that add adapters, with their names."""
    return [(name, module) for name, module in model.named_modules() if "lora_a_stacked" in vars(module)]


def set_adapter(model: nn.Module, slot: int, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Write the A and B matrices of an adapter to the layers' buffers.

    ``pairs`` contains whole matrices, by the names of Hugging Face modules.
    """
    fused = getattr(model, "packed_modules_mapping", {})
    for name, layer in adapter_layers(model):
        head, _, last = name.rpartition(".")
        parts = [pairs.get(f"{head}.{part}", (None, None)) for part in fused.get(last, [last])]
        if any(a is not None for a, _ in parts):
            layer.set_lora(slot, *(map(list, zip(*parts, strict=True)) if len(parts) > 1 else parts[0]))


def name_slots(model: nn.Module) -> None:
    """Register the adapter buffers under separate names.

    Each buffer contains one slot per adapter of the engine.
    """
    slots: dict[str, Tensor] = {
        f"{name}.lora_{side}.{number}": tensor
        for name, layer in adapter_layers(model)
        for side, stacked in (("a", layer.lora_a_stacked), ("b", layer.lora_b_stacked))
        for number, tensor in enumerate(stacked)
    }
    setattr(model, ADAPTER_SLOTS, slots)


@contextmanager
def base_layers(model: nn.Module) -> Iterator[None]:
    """Replace vLLM's wrapper layers by the layers they wrap, within this block.

    Weight loaders only know the wrapped layers.
    """
    wrapped = []
    for parent in model.modules() if hasattr(model, ADAPTER_SLOTS) else ():
        wrapped += [(parent, name, child) for name, child in parent.named_children() if "base_layer" in child._modules]
    for parent, name, child in wrapped:
        parent._modules[name] = child._modules["base_layer"]
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            parent._modules[name] = child
