"""Find the adapter layers of a live vLLM model, for its engine and the bridge to it.

This is a separate file, because tools/certify looks up the names that a file uses in the libraries that it imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from rlhf_mcore.protocols import ADAPTER_SLOTS

SLOT = 0  # index in each buffer: the trained adapter


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
