"""Freeze the weights of a model that are not trained, and find the 2-d matrices in flat shards that Muon updates."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.state_files import Region, regions
from rlhf_mcore.bridge.map.rules import hf_shapes, holds_matrices, pieces
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.families import embedding_name
from rlhf_mcore.geometry import ModelGeometry, Shard
from rlhf_mcore.mcore.build import require_gradient
from rlhf_mcore.mcore.momentum import Locate, MatrixPart
from rlhf_mcore.mcore.weights import global_names, unwrap
from rlhf_mcore.parallel.layout import ParallelLayout


def trained_names(geometry: ModelGeometry, patterns: Sequence[str]) -> list[str]:
    """Return the Hugging Face names of the tensors that match no pattern (``model.layers.0.*``).

    Raises:
        ConfigError: a pattern matches no tensor, or the patterns match all.
    """
    names = list(hf_shapes(geometry, trained=True))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"actor.freeze: {pattern!r} matches no tensor of the model; correct it. The tensors are {join_first(names, 8)}"
            )
    trained = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not trained:
        raise ConfigError(f"actor.freeze={list(patterns)} leaves nothing to train; remove some")
    return trained


def freeze(
    chunks: Sequence[torch.nn.Module], geometry: ModelGeometry, layout: ParallelLayout, patterns: Sequence[str]
) -> None:
    """Turn off the gradients of frozen tensors in this rank's model, which is not wrapped for training yet.

    Raises:
        ConfigError: see ``trained_names``. Also if one Megatron tensor contains frozen and trained tensors, or if
            this rank has nothing to train.
    """
    trained, rank, some = set(trained_names(geometry, patterns)), dist.get_rank(), False
    if geometry.tied_embeddings and layout.pp > 1 and embedding_name(geometry) not in trained:
        raise ConfigError("actor.freeze: tied embeddings cannot be frozen with actor.layout.pp above 1; remove them")
    for chunk in map(unwrap, chunks):
        for name, full_name, parameter in global_names(chunk):
            names = {piece.hf_name for piece in pieces(full_name, geometry, layout.shard_of(name, rank))}
            if len(names & trained) not in (0, len(names)):
                raise ConfigError(
                    f"actor.freeze: {join_first(sorted(names - trained))} and {join_first(sorted(names & trained))} are one tensor in "
                    "Megatron; freeze all of them, or none"
                )
            parameter.requires_grad_(bool(names & trained))
            some |= bool(names & trained)
        if hasattr(chunk, "embedding"):
            require_gradient(chunk.embedding)
    if not some:
        raise ConfigError(f"actor.freeze={list(patterns)} leaves a pipeline stage with nothing to train; remove some")


def freeze_all_but_indexers(chunks: Sequence[torch.nn.Module]) -> None:
    """Turn off the gradients of all tensors except the indexers', as in the warm-up of sparse attention."""
    for chunk in map(unwrap, chunks):
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(".indexer." in name)
        if hasattr(chunk, "embedding"):
            require_gradient(chunk.embedding)


def matrices_of(geometry: ModelGeometry) -> Locate:
    """Return a function that locates the matrices for Muon to orthogonalise: Hugging Face's 2-d tensors within layers.

    In a stack of matrices for experts, each expert's matrix is separate.
    """
    shapes = hf_shapes(geometry)

    def locate(name: str, shard: Shard, start: int, stop: int) -> list[MatrixPart]:
        if not holds_matrices(name, geometry):
            return []
        parts = regions(pieces(name, geometry, shard), start, stop)
        return [_locate_part(region, shapes[region.hf_name]) for region in parts]

    return locate


def _locate_part(region: Region, shape: tuple[int, ...]) -> MatrixPart:
    leading = len(shape) - 2  # dimensions of a stack
    first, extent = region.rectangle
    number = f"[{first[0]}]" if leading else ""
    rows, columns = shape[leading:]
    place, size = (first[leading], first[leading + 1]), (extent[leading], extent[leading + 1])

    def of(flat: Tensor) -> Tensor:
        return region.of(flat).squeeze(0) if leading else region.of(flat)

    return MatrixPart(f"{region.hf_name}{number}", (rows, columns), place, size, of)
