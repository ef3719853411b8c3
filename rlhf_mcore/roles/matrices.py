"""Maps the optimizer's flat shards to the 2-d matrices that Muon updates."""

from __future__ import annotations

from torch import Tensor

from rlhf_mcore.bridge.files.state_files import Region, regions
from rlhf_mcore.bridge.map.rules import hf_shapes, holds_matrices, pieces
from rlhf_mcore.geometry import ModelGeometry, Shard
from rlhf_mcore.mcore.momentum import Locate, MatrixPart


def matrices_of(geometry: ModelGeometry) -> Locate:
    """Return a function that locates the matrices for Muon to orthogonalise: Hugging Face's 2-d tensors within layers.

    In a stack of experts' matrices each expert has its own.
    """
    shapes = hf_shapes(geometry)

    def locate(name: str, shard: Shard, start: int, stop: int) -> list[MatrixPart]:
        if not holds_matrices(name, geometry):
            return []
        parts = regions(pieces(name, geometry, shard), start, stop)
        return [_locate_part(region, shapes[region.hf_name]) for region in parts]

    return locate


def _locate_part(region: Region, shape: tuple[int, ...]) -> MatrixPart:
    leading = len(shape) - 2  # of a stack
    first, extent = region.rectangle
    number = f"[{first[0]}]" if leading else ""
    rows, columns = shape[leading:]
    place, size = (first[leading], first[leading + 1]), (extent[leading], extent[leading + 1])

    def of(flat: Tensor) -> Tensor:
        return region.of(flat).squeeze(0) if leading else region.of(flat)

    return MatrixPart(f"{region.hf_name}{number}", (rows, columns), place, size, of)
