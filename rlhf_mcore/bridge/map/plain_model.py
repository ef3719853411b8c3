"""The map of a transformers model: its tensors are read from it, for there are no loaders to trace."""

from __future__ import annotations

from torch import nn

from rlhf_mcore.bridge.map.pieces import Piece
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.platform.transformers_models import checkpoint_tensors


def map_plain_model(model: nn.Module) -> EngineMap:
    """Map a live model whose parameters hold Hugging Face tensors, or parts of them."""
    live, parts = model.state_dict(keep_vars=True), checkpoint_tensors(model)
    first = {id(tensor): name for name, tensor in reversed(live.items())}  # tied tensors are brought once
    pieces: dict[str, list[Piece]] = {name: [] for name in first.values()}
    for part in parts:
        if part.holder in pieces:
            pieces[part.holder].append(Piece(part.name, (0,) * len(part.shape), part.shape, part.offset, part.strides))
    return EngineMap(
        tuple(
            EngineParameter(name, tuple(live[name].shape), live[name].dtype, tuple(pieces[name]))
            for name in live
            if name in pieces
        )
    )
