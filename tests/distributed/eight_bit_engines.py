"""Check the values that a bridge writes to 8-bit engines of every layout. Like vLLM's engines on CUDA, they hold 8 bits and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.quantised import SCALES, are_quantised, num_scales, scale_pieces
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.bridge.run.endpoints import EngineDestinations
from rlhf_mcore.bridge.run.sync import PlannedBridge
from rlhf_mcore.families.quantised import QUANTISATIONS, Quantisation
from rlhf_mcore.geometry import ExpertSizes, LocalParameter
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.planning.inputs import EngineGrid
from rlhf_mcore.protocols import SyncMismatch
from tests.engine_layout import engine_tensors, weight_bytes
from tests.planned_bridge import planned_bridge
from tests.trainer_layout import stage_names
from tests.unit.bridge.eight_bits import slow
from tests.unit.bridge.engine import Engine
from tests.unit.bridge.geometry import BLOCKS

# The rows of an expert are two and a half blocks, so trainer and engines split blocks at different positions.
MIXTURE = replace(BLOCKS, family="qwen3_moe", vocab_size=128, experts=ExpertSizes(4, 320, per_token=2))
TRAINER = ParallelLayout(4, tp=2, ep=2, etp=2)
GRIDS = {
    "ep2": EngineGrid(2, ep=2),
    "pp2": EngineGrid(pp=2),
    "dp2": EngineGrid(dp=2),
    "dp2_ep2": EngineGrid(dp=2, ep=2),
    "tp2_dp2": EngineGrid(2, dp=2),
    "tp2_dp2_ep4": EngineGrid(2, dp=2, ep=4),
    "tp2_pp2_ep2": EngineGrid(2, pp=2, ep=2),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        name: (torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator)).bfloat16()
        for name, shape in hf_shapes(MIXTURE).items()
    }


def build_trainer_tensors(hf: Mapping[str, Tensor], rank: int) -> list[LocalParameter]:
    """Return the tensors of a trainer rank."""
    found = []
    for name in stage_names(MIXTURE, TRAINER)[0]:
        shard = TRAINER.shard_of(name, rank)
        held = pieces(name, MIXTURE, shard)
        flat = torch.zeros(sum(piece.numel for piece in held), dtype=torch.bfloat16)
        for piece in held:
            view(flat, piece).copy_(hf[piece.hf_name][piece.slices])
        found.append(LocalParameter(name, flat, shard))
    return found


def map_of(grid: EngineGrid, rank: int, kind: Quantisation) -> EngineMap:
    """Return the planner's description of a rank: 8-bit matrices and their scales."""
    parameters = list[EngineParameter]()
    for tensor in engine_tensors(MIXTURE, grid, rank % grid.size):
        name, is_narrow = tensor.name.replace("*", "all"), are_quantised(tensor.pieces, kind)
        dtype = getattr(torch, kind.dtype) if is_narrow else torch.bfloat16
        parameters.append(EngineParameter(name, tensor.shape, dtype, tensor.pieces, tensor.padding))
        if is_narrow:
            scales, count = scale_pieces(tensor.pieces, kind), num_scales(tensor.pieces, kind)
            parameters.append(EngineParameter(name + SCALES, (count,), torch.float32, scales))
    return EngineMap(tuple(parameters))


def measure(group: dist.ProcessGroup, grid: EngineGrid, kind: Quantisation, hf: Mapping[str, Tensor]) -> dict[str, Any]:
    """Compare a rank with slow versions.

    Returns the names of differing tensors, the bytes of the rank, and the results of digests after a bit has changed on the last rank.
    """
    mapped = map_of(grid, group.rank(), kind)
    dtypes = {parameter.name: parameter.dtype for parameter in mapped.parameters}
    engine = Engine({parameter.name: parameter.shape for parameter in mapped.parameters}, dtypes)
    options: dict[str, Any] = {"bucket_bytes": 100_000, "verify": True, "poison": True, "traced": mapped}
    bridge = planned_bridge(
        build_trainer_tensors(hf, group.rank()), MIXTURE, engine, group, quantisation=kind.name, **options
    )
    stats = bridge.sync(0)
    expected, tensors = values(hf, kind), engine.tensors
    wrong = {
        piece.hf_name
        for parameter in mapped.parameters
        for piece in parameter.pieces
        if not torch.equal(
            view(tensors[parameter.name].view(-1), piece).float(), expected[piece.hf_name][piece.slices].float()
        )
    }
    planned = weight_bytes(MIXTURE, grid, 2, kind.name)
    return {
        "wrong": sorted(wrong),
        "8 bits": sum(dtype.itemsize == 1 for dtype in dtypes.values()),
        "bytes": [stats.received_bytes + stats.local_bytes, planned],
        "tampered": check_tampering(
            bridge, next(p for p in reversed(mapped.parameters) if p.name.endswith(SCALES)).name
        ),
    }


def values(hf: Mapping[str, Tensor], kind: Quantisation) -> dict[str, Tensor]:
    """Return the sent values, computed by the slow version."""
    sent = dict(hf)
    for name in filter(kind.applies, hf):
        sent[name], sent[name + kind.suffix] = slow(hf[name], kind)
    return sent


def check_tampering(bridge: PlannedBridge, scales: str) -> list[str]:
    """Change a bit of the last matrix of the last rank without the bridge, then a bit of its scales. Returns the findings."""
    finish, said = EngineDestinations.finish, []
    for version, buffer in enumerate((scales.removesuffix(SCALES), scales), 1):

        def tamper(landing: EngineDestinations, buffer: str = buffer) -> None:
            if dist.get_rank() == dist.get_world_size() - 1:
                landing._flats[buffer].view(torch.uint8)[0] ^= 1
            finish(landing)

        with mock.patch.object(EngineDestinations, "finish", tamper):
            try:
                bridge.sync(version)
            except SyncMismatch as error:
                said.append(str(error))
    return said


def measure_all(group: dist.ProcessGroup) -> dict[str, Any]:
    hf = weights()
    return {
        f"{name} {kind.name}": measure(group, grid, kind, hf)
        for name, grid in GRIDS.items()
        for kind in QUANTISATIONS.values()
    }
