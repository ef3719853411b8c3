"""Where the matrices of a model's layers are in what a rank's optimizer steps."""

from __future__ import annotations

from torch import Tensor

from rlhf_mcore.bridge.files.state_files import Region, regions
from rlhf_mcore.bridge.map.rules import hf_shapes, holds_matrices, pieces
from rlhf_mcore.mcore.momentum import Locate, MatrixPart
from rlhf_mcore.types import ModelGeometry, Shard


def matrices_of(geometry: ModelGeometry) -> Locate:
    """Those that Muon orthogonalises: Hugging Face's tensors of two dimensions within layers, and each expert's of a stack of such."""
    shapes = hf_shapes(geometry)

    def locate(name: str, shard: Shard, start: int, stop: int) -> list[MatrixPart]:
        if not holds_matrices(name, geometry):
            return []
        found = regions(pieces(name, geometry, shard), start, stop)
        return [_part(region, shapes[region.hf_name]) for region in found]

    return locate


def _part(region: Region, shape: tuple[int, ...]) -> MatrixPart:
    leading = len(shape) - 2  # of a stack
    first, extent = region.rectangle
    number = f"[{first[0]}]" if leading else ""
    rows, columns = shape[leading:]
    place, size = (first[leading], first[leading + 1]), (extent[leading], extent[leading + 1])

    def of(flat: Tensor) -> Tensor:
        return region.of(flat).squeeze(0) if leading else region.of(flat)

    return MatrixPart(f"{region.hf_name}{number}", (rows, columns), place, size, of)
