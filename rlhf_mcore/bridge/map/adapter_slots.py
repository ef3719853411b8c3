"""Map the adapters' buffers of a vLLM rank to the coordinates of PEFT, learnt from vLLM's own layers.

A layer that adds adapters has a tensor of all As and one of all Bs for each Hugging Face matrix in it, with a slot for each adapter.
Its ``set_lora`` is given meta tensors of whole matrices, and what it writes into its buffers is recorded instead of executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_mcore.bridge.map.strided import covered, unfilled
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter, Recorder, trace
from rlhf_mcore.families.adapters import hf_module, pairs_of
from rlhf_mcore.platform.wrapped_layers import SLOT, base_layers, set_adapter
from rlhf_mcore.protocols import ADAPTER_SLOTS


def trace_with_adapters(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> EngineMap:
    """Trace the live model of a vLLM rank that adds adapters: see :func:`trace`.

    ``shapes`` are those of the model's tensors, and of the adapters', under the names of PEFT.
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
        padding = unfilled(shape, tuple(box for piece in pieces for box in covered(piece, shape)))
        parameters.append(EngineParameter(name, shape, tensor.dtype, tuple(pieces), padding))
    reached = {hf_module(piece.hf_name) for parameter in parameters for piece in parameter.pieces}
    assert reached == {hf_module(name) for name in shapes}, "declared by the engine's kind"
    return parameters
