"""``bridge.verify: full``: whether a sync has left an engine as loading all weights the plain way leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.reload import watching
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.protocols import LiveWeights, SyncMismatch

if TYPE_CHECKING:
    from rlhf_mcore.bridge.files.gather import Gatherer


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
