"""Add low-rank adapters to a model: place them by the bridge's map, and initialise their values."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlhf_mcore.bridge.files.hf_files import load, open_adapters
from rlhf_mcore.bridge.map.rules import adapter_names, blocks, hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.families.adapters import EMBEDDING, B, M, base_name, hf_module, is_trained_whole
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.mcore.build import require_gradient
from rlhf_mcore.mcore.lora import Adapters, MatrixRows
from rlhf_mcore.mcore.weights import global_names, unwrap
from rlhf_mcore.parallel.layout import ParallelLayout
from rlhf_mcore.readers.adapter_files import check_same


def add_adapters(
    chunks: Sequence[torch.nn.Module],
    geometry: ModelGeometry,
    layout: ParallelLayout,
    dropout: float,
    role: str = "actor",
) -> Adapters:
    """Freeze this rank's model, which is not wrapped for training yet, and add its adapters.

    A scalar head stays trained.

    ``geometry`` is the geometry of the adapters. ``role`` is the config group, for messages.

    Raises:
        ConfigError: a layer does not support adapters, or this rank contains no layer with an adapter.
    """
    assert geometry.adapter is not None
    rank, count = dist.get_rank(), 0
    adapters = Adapters(geometry.adapter, dropout, role=role)
    for chunk in map(unwrap, chunks):
        chunk.requires_grad_(False)
        for name, full_name, _ in list(global_names(chunk)):
            if not (weight := re.fullmatch(r"(.+)\.weight(\d*)", name)):
                continue
            if num_a := _rows_of_a(full_name, geometry, layout, rank):
                module = chunk.get_submodule(weight.group(1))
                if not full_name.startswith("decoder."):
                    adapters.add_to_end(module)
                    count += 1
                    continue
                matrices = _matrices(full_name, geometry, layout, rank)
                if not matrices:
                    raise ConfigError(
                        f"{role}.lora.targets={join_first(geometry.adapter.targets)}: a tensor-parallel rank holds no row of these "
                        f"targets in {full_name}, which joins queries, keys and values; name all three, or lower {role}.layout.tp"
                    )
                adapters.add(module, matrices, num_a, full_name, weight.group(2))
                count += 1
        if geometry.head != "lm" and hasattr(chunk, "output_layer"):
            chunk.output_layer.requires_grad_(True)
            count += 1
        if hasattr(chunk, "embedding"):
            require_gradient(chunk.embedding)
    if not count:
        raise ConfigError(
            f"{role}.lora.targets={join_first(geometry.adapter.targets)} leaves a pipeline stage without adapters; name more layers"
        )
    return adapters


def _rows_of_a(weight: str, geometry: ModelGeometry, layout: ParallelLayout, rank: int) -> int:
    """Return the number of rows of a weight's A, or 0 if the weight has no adapter."""
    try:
        parts = pieces(adapter_names(weight)[0], geometry, layout.shard_of(weight, rank))
    except KeyError:
        return 0
    return sum(piece.shape[0] for piece in parts)


def _matrices(weight: str, geometry: ModelGeometry, layout: ParallelLayout, rank: int) -> list[MatrixRows]:
    """Join the blocks of each of a weight's matrices, in the order of their rows in A."""
    own_blocks = blocks(weight, geometry, layout.shard_of(weight, rank))
    return [
        MatrixRows(
            a_row,
            tuple(
                row for block in own_blocks if block.a_row == a_row for row in range(block.row, block.row + block.count)
            ),
            tuple(
                row
                for block in own_blocks
                if block.a_row == a_row
                for row in range(block.b_row, block.b_row + block.count)
            ),
        )
        for a_row in sorted({block.a_row for block in own_blocks})
    ]


def initialize(parameters: Iterable[LocalParameter], geometry: ModelGeometry, seed: int) -> None:
    """Initialise A as PEFT does, and set B to zero.

    A is uniform within Kaiming's bound for a = sqrt 5. For the embedding it is Gaussian. The values of a matrix
    depend only on ``seed`` and its name, so they are equal in every layout.
    """
    shapes = hf_shapes(geometry)
    for parameter in parameters:
        if is_trained_whole(parameter.name, geometry):
            continue  # it keeps the model's values
        side = base_name(parameter.name)[1]
        if side == M:
            continue  # the plug-in ``dora`` initialises them
        if side == B:
            parameter.tensor.zero_()  # including the padding of a vocabulary
            continue
        for piece in pieces(parameter.name, geometry, parameter.shard):
            shape = shapes[piece.hf_name]
            target: Any = parameter.tensor.view(-1).as_strided(
                piece.shape, piece.strides, piece.offset + parameter.tensor.storage_offset()
            )
            digest = hashlib.sha256(f"{seed} {piece.hf_name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            whole, bound = torch.empty(shape), shape[1] ** -0.5
            if hf_module(piece.hf_name) == EMBEDDING:
                whole.normal_(generator=generator)
            else:
                whole.uniform_(-bound, bound, generator=generator)
            target.copy_(whole[tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))])


def load_adapters(
    parameters: list[LocalParameter], geometry: ModelGeometry, directory: str | Path, field: str = "actor.lora"
) -> None:
    """Load this rank's adapters from a PEFT directory. ``field``: the config group that ``geometry`` comes from.

    Raises:
        ConfigError: the directory is damaged, or its adapters do not match ``geometry``.
    """
    reader, saved = open_adapters(directory, replace(geometry, adapter=None))
    check_same(directory, saved, geometry, field)
    load(parameters, geometry, reader)
