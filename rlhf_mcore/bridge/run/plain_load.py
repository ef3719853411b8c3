"""``bridge.verify: full``: whether a sync has left an engine as loading all weights the plain way leaves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.protocols import LiveWeights, SyncMismatch

if TYPE_CHECKING:
    from rlhf_mcore.bridge.files.gather import Gatherer

    Written = Callable[[EngineParameter, Tensor], None]


def compare_with_plain_load(
    target: LiveWeights,
    engine: EngineMap,
    gatherer: Gatherer,
    copies: dict[str, Tensor],
    version: int,
    group: dist.ProcessGroup,
) -> None:
    """Load the engine again as vLLM does, from gathered tensors: every parameter must come out as the sync has left it.

    ``copies`` are the parameters after the sync, by name. Collective over the group.

    Raises:
        SyncMismatch: naming a parameter that differs at any rank. The weights are unusable then.
    """
    wrong: list[str] = []

    def check(parameter: EngineParameter, flat: Tensor) -> None:
        synced = copies.pop(parameter.name, None)
        if synced is not None and not torch.equal(synced.view(torch.uint8), flat.view(torch.uint8)):
            wrong.append(parameter.name)

    derived = {name: target.model.get_parameter(name).detach().clone() for name in engine.derived}
    with watching(target.model, engine, check):
        target.load_weights(iter(gatherer), version=version)
    wrong += [name for name, tensor in derived.items() if not torch.equal(tensor, target.model.get_parameter(name))]
    flats = engine.views(target.model)
    for parameter in engine.direct:
        check(parameter, flats[parameter.name])
    wrong = sorted({name for names in all_gather_json([*wrong, *copies], group) for name in names})
    if wrong:
        problem = f"{len(wrong)} engine parameters differ from a plain load, among them {wrong[0]}"
        target.abandon(problem)
        raise SyncMismatch(problem)


@contextmanager
def watching(model: nn.Module, engine: EngineMap, written: Written) -> Iterator[None]:
    """Watch what a reload by vLLM itself writes into repacked parameters.

    ``written`` is called with each and its flat tensor in the loading layout, just before its layer processes it.
    """
    with ExitStack() as stack:
        for group in engine.repacked:
            method: Any = model.get_submodule(group[0].module).quant_method
            original = method.process_weights_after_loading
            stack.callback(setattr, method, "process_weights_after_loading", original)
            method.process_weights_after_loading = partial(_process_watched, original, group, written)
        yield


def _process_watched(original: Any, group: Sequence[EngineParameter], written: Written, layer: Any) -> None:
    for parameter in group:
        tensor = getattr(layer, parameter.name.rpartition(".")[2])
        if tensor.numel() == torch.Size(parameter.shape).numel():  # not the empty rest of one that is packed already
            written(parameter, tensor.data.view(-1))
    original(layer)
