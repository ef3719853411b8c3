"""Begins the magnitudes of DoRA (arXiv 2402.09353) with the norms of the rows of the weights, so that a run begins with the model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.families.adapters import M, base_name, hf_module, is_trained_whole
from rlhf_mcore.geometry import LocalParameter, ModelGeometry


def begin_with_norms(parameters: Iterable[LocalParameter], geometry: ModelGeometry, base: str | Path) -> None:
    """Fill this rank's magnitudes from the weights of ``base``. They follow from whole rows, so no layout changes them."""
    reader = HFReader(base)
    for parameter in parameters:
        if is_trained_whole(parameter.name, geometry) or base_name(parameter.name)[1] != M:
            continue
        for piece in pieces(parameter.name, geometry, parameter.shard):
            # As the model has them: a file may have more digits, and norms of these would round to others.
            rows = reader.read(f"{hf_module(piece.hf_name)}.weight", (*piece.slices, slice(None))).to(
                parameter.tensor.dtype
            )
            view(parameter.tensor, piece).copy_(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    reader.close()
