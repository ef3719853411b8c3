"""Whether the weights beside a config.json are those that it describes, from the headers of their files: no tensor is read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, Fields, open_file, parse_json

SINGLE_FILE = "model.safetensors"
_REMEDY = "download or export the model again"
_SHOWN = 3


def tensor_problems(
    folder: Path,
    prefix: str,
    shard_of: Mapping[str, str] | None,
    num_layers: int,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    """What differs between the files of weights in ``folder`` and ``shapes``, some of the tensors that config.json asks for.

    ``shard_of``: the file of each tensor, None where all are in ``model.safetensors``. Absent or empty files are left to others.
    """
    files = {SINGLE_FILE} if shard_of is None else set(shard_of.values())
    if not all(os.path.isfile(folder / file) and os.path.getsize(folder / file) for file in files):
        return
    headers: dict[str, Fields] = {}
    names = _header(folder, SINGLE_FILE, headers) if shard_of is None else shard_of
    if f"model.layers.{num_layers}.input_layernorm.weight" in names:
        yield f"{prefix}: the weights have more layers than config.json's num_hidden_layers={num_layers}; {_REMEDY}"
    different = []
    for name, shape in shapes.items():
        file = SINGLE_FILE if shard_of is None else shard_of.get(name)
        entry = _header(folder, file, headers).object(name, default=None) if file is not None else None
        if entry is None:
            different.append(f"{name} is missing")
        elif tuple(found := entry.integers("shape")) != shape:
            different.append(f"{name} is {found[:8]}, config.json asks for {list(shape)}")
    if different:
        more = f"; and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        yield f"{prefix}: the weights are not those that config.json describes: {'; '.join(different[:_SHOWN])}{more}; {_REMEDY}"


def _header(folder: Path, name: str, known: dict[str, Fields]) -> Fields:
    """The header of a safetensors file: an entry for every tensor.

    Raises:
        ConfigError: it is not such a file.
    """
    if name not in known:
        path = folder / name
        with open_file(path, remedy=_REMEDY) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(INDEX.num_bytes, num_bytes - 8):
                raise ConfigError(
                    f"{path}: not a readable safetensors file (a header of {length:,} bytes in a file of {num_bytes:,}); {_REMEDY}"
                )
            data = file.read(length)
        known[name] = parse_json(data, limits=INDEX, where=str(path), remedy=_REMEDY)
    return known[name]
