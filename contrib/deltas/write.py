"""Write the weights of a checkpoint as compressed differences to the last full checkpoint.

The base of a difference is always a full checkpoint. ``rlhf_mcore.checkpoint.delta`` defines the format and reads it.
``choose_base`` and ``encode`` are the hook ``DeltaHook`` of ``CheckpointWriter``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import zstandard

from rlhf_mcore.checkpoint.delta import (
    FORMAT,
    VERSION,
    BaseFiles,
    Difference,
    Stored,
    map_file,
    parse_header,
    split_into_chunks,
)
from rlhf_mcore.checkpoint.layout import DELTA_DATA, DELTA_INDEX, scan
from rlhf_mcore.checkpoint.manifest import Base, hash_file, read_manifest, relative_name
from rlhf_mcore.config.errors import ConfigError

T = TypeVar("T")

_LEVEL = 1  # for updates of bf16 weights, as small as level 3 in two thirds of the time
_THREADS = 4


def is_weight_file(name: str) -> bool:
    """Return whether a path in a checkpoint is a weight file, ``actor/*.safetensors``, and not training state."""
    parts = name.split("/")
    return len(parts) == 2 and name.endswith(".safetensors")


def choose_base(run: Path, full_every: int) -> Base | None:
    """Return the newest full checkpoint as the base of the next save, or None if a full save is due.

    Args:
        run: the run directory.
        full_every: interval in saves between full saves.
    """
    full: Base | None = None
    # Position of the newest delta for each base. Retention may have removed earlier deltas.
    last: dict[str, int] = {}
    for checkpoint in scan(run):
        try:
            manifest = read_manifest(checkpoint.path)
        except ConfigError:
            continue
        if manifest.info.base is not None:
            last[manifest.info.base.name] = manifest.info.base.position
        else:
            full = Base(checkpoint.path.name, manifest.digest)
    position = last.get(full.name, 0) + 1 if full else 0
    return replace(full, position=position) if full and position < full_every else None


def encode(directory: Path, paths: Iterable[str | Path], base: Path) -> list[Path]:
    """Replace the weight files among ``paths`` by differences to ``base``, a full checkpoint.

    Each rank replaces the files that it wrote, without communication. Returns the paths of all files after the replacement.
    """
    out = []
    for path in paths:
        name = relative_name(directory, path)
        if is_weight_file(name):
            out += encode_file(directory, name, base)
        else:
            out.append(directory / name)
    return out


def encode_file(directory: Path, name: str, base: Path) -> list[Path]:
    """Replace a weight file by its difference to ``base``. ``name``: its path in a checkpoint. Returns the two new files."""
    path = directory / name
    header, tensors = _read_header(path)
    known = _read_tensors(base, name.split("/")[0])
    delta, index = path.with_name(path.name + DELTA_DATA), path.with_name(path.name + DELTA_INDEX)
    data, files = map_file(path), BaseFiles(base)
    sources = [(tensor, *_locate(known, tensor)) for tensor in tensors]
    differences = []
    with delta.open("wb") as out:
        frames = _map_in_threads(lambda s: _compress(data, s[0], files.get(s[1]), s[2]), sources)
        for (tensor, base_file, base_begin), frame in zip(sources, frames, strict=True):
            begin = out.tell()
            out.write(frame)
            differences.append(Difference(tensor.name, begin, out.tell(), base_file, base_begin))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "header": header.decode("utf-8"),
        **asdict(hash_file(path)),
        "tensors": [asdict(difference) for difference in differences],
    }
    index.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    path.unlink()
    return [delta, index]


def _compress(data: memoryview, tensor: Stored, base: memoryview | None, base_begin: int) -> bytes:
    """Return one frame with the byte planes of each chunk of the difference."""
    compressor = zstandard.ZstdCompressor(_LEVEL).compressobj(size=tensor.size)
    out = []
    for begin, end in split_into_chunks(tensor):
        part = np.frombuffer(data[tensor.begin + begin : tensor.begin + end], np.uint8)
        if base is not None:
            part = part ^ np.frombuffer(base[base_begin + begin : base_begin + end], np.uint8)
        planes = np.ascontiguousarray(part.reshape(-1, tensor.item_bytes).T)
        out.append(compressor.compress(planes.data))
    return b"".join([*out, compressor.flush()])


def _map_in_threads(action: Callable[[T], bytes], items: list[T]) -> Iterator[bytes]:
    """Compute ``action`` of each item in threads and yield the results in order. At most ``_THREADS`` results wait."""
    with ThreadPoolExecutor(_THREADS) as pool:
        rest = iter(items)
        while group := list(islice(rest, _THREADS)):
            yield from pool.map(action, group)


def _locate(known: Mapping[str, tuple[str, Stored]], tensor: Stored) -> tuple[str | None, int]:
    """Return file and offset of the base's tensor with the same name and size, or (None, 0) if there is none."""
    file, of_base = known.get(tensor.name, (None, tensor))
    return (file, of_base.begin) if file is not None and of_base.size == tensor.size else (None, 0)


def _read_tensors(base: Path, role: str) -> dict[str, tuple[str, Stored]]:
    """Return name -> (file, tensor) for all tensors of a model in a full checkpoint."""
    files = sorted((base / role).glob("*.safetensors"))
    return {tensor.name: (f"{role}/{path.name}", tensor) for path in files for tensor in _read_header(path)[1]}


def _read_header(path: Path) -> tuple[bytes, list[Stored]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size)
    tensors = parse_header(header, path)
    end = tensors[-1].begin + tensors[-1].size if tensors else 8 + size
    assert end == path.stat().st_size, f"{path}: {end} bytes by the header, but the file has {path.stat().st_size}"
    return header, tensors
