"""Check a model's tensors: names and shapes must match config.json, and dtypes must be supported for weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import torch

from rlhf_mcore.bridge.files.formats.source import ModelSource
from rlhf_mcore.bridge.files.tensor_files import CODES, TensorTypes
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError, shortened
from rlhf_mcore.families import embedding_name
from rlhf_mcore.families.mtp import mtp_tensors
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.model_files import read_config

BUFFERS = ".rotary_emb.inv_freq"  # computed from the config; old checkpoints also store them
_COMPARED_ELEMENTS = 2**22


def checked_types(source: ModelSource, geometry: ModelGeometry) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the tensors to convert in network order: all tensors of the model, and tensors of MTP layers.

    Raises:
        ConfigError: with every kind of difference from the config, and its first tensors.
    """
    expected, where = hf_shapes(geometry), source.directory
    types = {name: stored for name, stored in source.types.items() if not name.endswith(BUFFERS)}
    mtp = mtp_tensors(types, read_config(source.companions, str(source.companions)))
    if geometry.tied_embeddings and "lm_head.weight" in types:
        _check_tied(source, embedding_name(geometry))
        del types["lm_head.weight"]
    problems_by_kind = {
        "missing tensors": [name for name in expected if name not in types],
        "tensors that config.json does not declare": [
            name for name in types if name not in expected and name not in mtp
        ],
        "tensors with a different shape than in config.json": [
            f"{name} {shape} instead of {expected[name]}"
            for name, (_, shape) in types.items()
            if name in expected and tuple(shape) != expected[name]
        ],
        "tensors with an unsupported dtype": [
            f"{name} ({dtype})" for name, (dtype, _) in types.items() if dtype not in CODES
        ],
    }
    if any(problems_by_kind.values()):
        lines = [f"{kind}: {shortened(names, separator=', ')}" for kind, names in problems_by_kind.items() if names]
        raise ConfigError.many([f"{where}: {line}" for line in lines])
    return {name: types[name] for name in (*expected, *mtp)}


def _check_tied(source: ModelSource, embedding: str) -> None:
    """Compare embedding and head if files contain both. They must be one matrix."""
    head = "lm_head.weight"
    shape = source.types[head][1]
    same = embedding in source.types and source.types[embedding] == source.types[head]
    rows = max(_COMPARED_ELEMENTS // max(prod(shape[1:]), 1), 1)
    for first in range(0, shape[0] if same else 0, rows):
        count = min(rows, shape[0] - first)
        same = same and torch.equal(source.read(head, first, count), source.read(embedding, first, count))
    if not same:
        raise ConfigError(
            f"{source.directory}: {head} differs from the embedding, but config.json ties them; set tie_word_embeddings to false there"
        )


def num_parameters(types: TensorTypes) -> int:
    """Return the number of elements of all tensors."""
    return sum(prod(shape) for _, shape in types.values())


def agree(digests: Mapping[str, str], again: Mapping[str, str], where: Path) -> None:
    """Compare two readings of a model.

    Raises:
        ConfigError: with the tensors that differ.
    """
    wrong = [name for name in digests if again.get(name) != digests[name]] + [n for n in again if n not in digests]
    if wrong:
        raise ConfigError(
            f"{where}: {len(wrong)} tensors differ from the written values, among them {wrong[0]}; check the disk"
        )
