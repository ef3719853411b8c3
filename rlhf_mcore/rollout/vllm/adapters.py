"""A vLLM engine that adds adapters to the weights. Its layers have slots, which a bridge writes like weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlhf_mcore.families.adapters import hf_module
from rlhf_mcore.rollout.vllm.wrapped_layers import SLOT, name_slots

if TYPE_CHECKING:
    from torch import nn

Shapes = Mapping[str, tuple[int, ...]]


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
    from vllm.model_executor.layers.fused_moe import layer

    original = layer.FusedMoEConfig

    def configuration(**fields: Any) -> Any:
        return original(**{**fields, "is_lora_enabled": False})

    with mock.patch.object(layer, "FusedMoEConfig", configuration):
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
