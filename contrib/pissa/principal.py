"""Begins adapters with the principal singular vectors of the weights: PiSSA (Meng et al. 2024, arXiv 2404.02948).

Of a weight W with the principal part s * B0 A0 = U_r S_r V_r^T, PiSSA trains A and B from A0 and B0 on, and keeps the rest frozen:
y = (W - s * B0 A0) x + s * B A x. Here the weight stays W, and the adapters hold both parts: [A; A0] and [B, -B0], of twice the
rank, whose second halves do not learn. So they begin with W itself, and add to W what was learned: PEFT converts its own to the same
form. The reference is W without adapters, and a weight that is rounded to 16 bits loses nothing to a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.map.pieces import Piece, view
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.adapters import EMBEDDING, hf_module, hf_names, is_trained_whole
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.parallel.collectives import on_every_rank
from rlhf_mcore.platform import current_platform
from rlhf_mcore.readers.adapter_files import adapted_modules


def begin_with_principal(
    parameters: Sequence[LocalParameter],
    geometry: ModelGeometry,
    base: str | Path,
    progress: Callable[[str], None] = lambda text: None,
    field: str = "actor.lora",
) -> None:
    """Fill this rank's adapters from the weights of ``base``. Collective over the world: each rank decomposes a share of the matrices.

    The factors of a matrix follow from the whole of it, and are computed once, so no layout changes them. ``field``: the group of the
    configuration that asks for ``geometry``.

    Raises:
        ConfigError: the rank is larger than that of a matrix.
    """
    assert geometry.adapter is not None
    rank, modules, shapes = (
        geometry.adapter.fixed,
        adapted_modules(geometry),
        hf_shapes(replace(geometry, adapter=None)),
    )
    world, own = dist.get_world_size(), dist.get_rank()
    for module in modules:
        if rank > min(shape := shapes[f"{module}.weight"]):
            raise ConfigError(
                f"{field}.init=pissa: {module} is {shape[0]} x {shape[1]} and has no {rank} singular vectors; lower {field}.rank"
            )

    def decompose() -> dict[str, tuple[Tensor, Tensor]]:
        reader, factors = HFReader(base), {}
        for number, module in enumerate(modules[own::world]):
            progress(f"singular vectors of matrix {number * world} of {len(modules)}")
            weight = reader.read(f"{module}.weight", (slice(None),) * 2)
            assert geometry.adapter is not None
            factors[module] = principal_factors(weight, rank, geometry.adapter.scale)
        reader.close()
        return factors

    factors = on_every_rank(decompose)
    held: dict[str, list[tuple[Tensor, Piece]]] = {}
    for parameter in parameters:
        if is_trained_whole(parameter.name, geometry):
            continue
        parameter.tensor.zero_()  # the padding of a vocabulary
        for piece in pieces(parameter.name, geometry, parameter.shard):
            held.setdefault(hf_module(piece.hf_name), []).append((parameter.tensor, piece))
    for number, module in enumerate(modules):
        rows, columns = shapes[f"{module}.weight"]
        a, b = factors.pop(module) if module in factors else (torch.empty(rank, columns), torch.empty(rows, rank))
        for factor in (a, b):
            dist.broadcast(factor, number % world)
        halves = torch.cat([a, a]), torch.cat([b, -b], dim=1)
        of_peft = dict(zip(hf_names(module), (x.t() if module == EMBEDDING else x for x in halves), strict=True))
        for tensor, piece in held.get(module, ()):
            view(tensor, piece).copy_(of_peft[piece.hf_name][piece.slices])


@torch.no_grad()
def principal_factors(weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return A [rank, in] and B [out, rank], fp32 on the host: scale * B A is the best approximation of ``weight`` of this rank.

    With W = U S V^T, A = (S / scale)^1/2 V^T and B = U (S / scale)^1/2. The vectors of the smaller side are eigenvectors of W W^T
    or W^T W, in fp64: far less work than all singular vectors of W, and as exact for the principal ones.
    """
    w = weight.to(current_platform().device()).double()
    is_wide = w.size(0) <= w.size(1)
    side = w if is_wide else w.t()  # U S V^T with the smaller side in front
    squares, vectors = torch.linalg.eigh(side @ side.t())
    values, vectors = squares[-rank:].flip(0).clamp(min=0).sqrt(), vectors[:, -rank:].flip(1)
    root = (values / scale).sqrt()
    inverse = torch.where(root > 0, 1 / (root * scale), 0.0)  # of a matrix of a lower rank, too
    front, back = vectors * root, (vectors.t() @ side) * inverse[:, None]
    a, b = (back, front) if is_wide else (front.t(), back.t())
    return a.float().cpu().contiguous(), b.float().cpu().contiguous()
