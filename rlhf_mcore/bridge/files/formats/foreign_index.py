"""Read the ``.metadata`` of a ``torch_dist`` checkpoint: its tensors, their parts, and the place of each part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_mcore.bridge.files.formats.foreign_pickle import Name, Shell, read_pickle
from rlhf_mcore.bridge.files.formats.located import dtype_of, sizes_of
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import read_bytes, shorten

MAX_INDEX_BYTES = 256 * 2**20
_METADATA = Name("torch.distributed.checkpoint.metadata", "Metadata")


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """A rectangle of a tensor, and its bytes in a file in ``torch.save`` format."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: list[ForeignPart]


def read_index(path: Path, is_wanted: Callable[[str], object]) -> dict[str, IndexedTensor]:
    """Read the tensors of an index whose names are wanted.

    Raises:
        ConfigError: the file cannot be read, or is not an index.
    """
    data = read_bytes(path, limit=MAX_INDEX_BYTES, remedy="is it the index of a checkpoint?")
    try:
        content = read_pickle(data)
        state = content.state if isinstance(content, Shell) and content.name == _METADATA else None
        if not isinstance(state, dict) or not all(
            isinstance(state.get(key), dict) for key in ("state_dict_metadata", "storage_data")
        ):
            raise ValueError("not the index of a checkpoint")
        stored = _places_of_parts(state["storage_data"])
        tensors = {
            name: entry
            for name, entry in state["state_dict_metadata"].items()
            if isinstance(name, str)
            and is_wanted(name)
            and isinstance(entry, Shell)
            and entry.name.name == "TensorStorageMetadata"
        }
        budget = len(stored)
        result = {}
        for name, entry in tensors.items():
            result[name] = _tensor(name, entry, stored, budget)
            budget -= len(result[name].parts)
    except ValueError as error:
        raise ConfigError(f"{path}: refused ({error}). The file is damaged or has another format.") from error
    return result


def _places_of_parts(entries: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...]], Shell]:
    """Map each part's tensor and start to its place."""
    places = {}
    for key, info in entries.items():
        place = key.state if isinstance(key, Shell) else None
        if not isinstance(place, dict) or not isinstance(info, Shell) or not isinstance(info.state, dict):
            raise ValueError("an entry of storage_data is malformed")
        if isinstance(place.get("fqn"), str) and place.get("offset") is not None:  # otherwise bytes, not a tensor
            places[place["fqn"], sizes_of(place["offset"])] = info
    return places


def _tensor(name: str, entry: Shell, stored: dict[tuple[str, tuple[int, ...]], Shell], budget: int) -> IndexedTensor:
    shown = shorten(name, 200)
    state = entry.state if isinstance(entry.state, dict) else {}
    chunks = state.get("chunks")
    if not isinstance(chunks, list) or len(chunks) > max(budget, 1):  # a pickle may refer to the same list repeatedly
        raise ValueError(f"{shown} has more parts than there are in files")
    properties = state.get("properties")
    described = properties.state if isinstance(properties, Shell) else None
    if isinstance(described, tuple) and described:
        dtype = dtype_of(described[0])
    elif isinstance(described, dict):
        dtype = dtype_of(described.get("dtype"))
    else:
        raise ValueError(f"{shown} has no dtype")
    return IndexedTensor(dtype, sizes_of(state.get("size")), [_part(shown, name, chunk, stored) for chunk in chunks])


def _part(shown: str, name: str, chunk: Any, stored: dict[tuple[str, tuple[int, ...]], Shell]) -> ForeignPart:
    place = chunk.state if isinstance(chunk, Shell) else None
    if not isinstance(place, dict):
        raise ValueError(f"a part of {shown} is malformed")
    start, shape = sizes_of(place.get("offsets")), sizes_of(place.get("sizes"))
    info = stored.get((name, start))
    if info is None:
        raise ValueError(f"part {start} of {shown} is in no file")
    file, offset, length = (info.state.get(key) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
        raise ValueError(f"part {start} of {shown} has a malformed place")
    if min(offset, length) < 0:
        raise ValueError(f"part {start} of {shown} starts before its file")
    if info.state.get("transform_descriptors"):
        raise ValueError(f"{shown} is compressed ({shorten(info.state['transform_descriptors'])}), which is not read")
    return ForeignPart(start, shape, file, offset, length)
