"""Check that a sync leaves a vLLM engine in the same state as a plain load of all weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.bridge.run.sync import PlannedBridge, _Written
from rlhf_mcore.parallel.collectives import all_gather_json, world_group

Written = Callable[[EngineParameter, Tensor], None]


def sync_and_compare(bridge: PlannedBridge, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
    """Sync, and then reload the engine like vLLM. Every parameter must equal its value after the sync.

    ``bridge`` verifies its syncs. ``weights`` are full tensors. Collective over the world.
    """
    copies, add = dict[str, Tensor](), _Written.add

    def copy_and_add(written: _Written, parameter: EngineParameter, flat: Tensor) -> None:
        copies[parameter.name] = flat.clone()
        add(written, parameter, flat)

    with mock.patch.object(_Written, "add", copy_and_add):
        bridge.sync(version)
    target, engine, wrong = bridge._engine.target, bridge._map, list[str]()
    for group in engine.repacked:
        if not hasattr(target.model.get_submodule(group[0].module), "quant_method"):
            for parameter in group:  # loaders compute its live tensor, which the caller compares
                del copies[parameter.name]

    def check(parameter: EngineParameter, flat: Tensor) -> None:
        synced = copies.pop(parameter.name, None)
        if synced is not None and not torch.equal(synced.view(torch.uint8), flat.view(torch.uint8)):
            wrong.append(parameter.name)

    derived = {name: target.model.get_parameter(name).detach().clone() for name in engine.derived}
    with watching(target.model, engine, check):
        target.load_weights(iter(weights), version=version)
    wrong += [name for name, tensor in derived.items() if not torch.equal(tensor, target.model.get_parameter(name))]
    flats = engine.views(target.model)
    for parameter in engine.direct:
        check(parameter, flats[parameter.name])
    assert not any(all_gather_json([*wrong, *copies], world_group())), [*wrong, *copies]


@contextmanager
def watching(model: nn.Module, engine: EngineMap, written: Written) -> Iterator[None]:
    """Observe the values that vLLM's own reload writes to repacked parameters.

    ``written`` receives each parameter and its flat tensor in the loading layout, just before its layer processes it.
    """
    with ExitStack() as stack:
        for group in engine.repacked:
            method: Any = getattr(model.get_submodule(group[0].module), "quant_method", None)
            if method is None:  # its loaders compute the live tensors
                continue
            original = method.process_weights_after_loading
            stack.callback(setattr, method, "process_weights_after_loading", original)
            method.process_weights_after_loading = partial(_process_watched, original, group, written)
        yield


def _process_watched(original: Any, group: Sequence[EngineParameter], written: Written, layer: Any) -> None:
    for parameter in group:
        tensor = getattr(layer, parameter.name.rpartition(".")[2])
        if tensor.numel() == torch.Size(parameter.shape).numel():  # skip the empty rest of an already packed parameter
            written(parameter, tensor.data.view(-1))
    original(layer)
