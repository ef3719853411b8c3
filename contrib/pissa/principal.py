"""Initialize adapters with the principal singular vectors of the weights: PiSSA (Meng et al. 2024, arXiv 2404.02948).

Let s * B0 A0 = U_r S_r V_r^T be the principal part of a weight W. PiSSA trains A and B, which start as A0 and B0, and freezes the
rest: y = (W - s * B0 A0) x + s * B A x. Here the weight stays W, and the adapters are [A; A0] and [B, -B0]. They have twice the rank,
and their second halves are frozen. The model therefore starts as W, and the adapters add the learned difference to W. PEFT converts
its PiSSA adapters to the same form. The reference is W without adapters, and W - s * B0 A0 is never rounded to 16 bits.
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
    """Fill this rank's adapters from the weights of ``base``. Collective over the world.

    Each rank decomposes a share of the matrices. The factors are computed once from the whole matrix, so they do not depend on the
    layout. ``field``: the LoRA group of the configuration, for messages.

    Raises:
        ConfigError: the adapter rank is larger than a side of a matrix.
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
                f"{field}.init=pissa: {module} is {shape[0]} x {shape[1]}, with fewer than {rank} singular vectors; lower {field}.rank"
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
        parameter.tensor.zero_()  # rows that pad the vocabulary
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
    """Return A [rank, in] and B [out, rank], fp32 on the host. scale * B A is the best approximation of ``weight`` with this rank.

    With W = U S V^T, A = (S / scale)^1/2 V^T and B = U (S / scale)^1/2. The vectors of the smaller side are eigenvectors of W W^T or
    W^T W, in fp64. This is much cheaper than all singular vectors of W, and equally exact for the principal vectors.
    """
    w = weight.to(current_platform().device()).double()
    is_wide = w.size(0) <= w.size(1)
    side = w if is_wide else w.t()  # the smaller side first
    squares, vectors = torch.linalg.eigh(side @ side.t())
    values, vectors = squares[-rank:].flip(0).clamp(min=0).sqrt(), vectors[:, -rank:].flip(1)
    root = (values / scale).sqrt()
    inverse = torch.where(root > 0, 1 / (root * scale), 0.0)  # zero if the matrix has a lower rank
    front, back = vectors * root, (vectors.t() @ side) * inverse[:, None]
    a, b = (back, front) if is_wide else (front.t(), back.t())
    return a.float().cpu().contiguous(), b.float().cpu().contiguous()
