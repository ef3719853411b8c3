"""One file of weights as a difference to a full checkpoint, and back, bit for bit.

A difference is the XOR of the bytes of a tensor with those of the tensor of the same name in the base. After a small update most high
bytes of it are zero. Before compression bytes are grouped by their position in their elements (byte planes).

``model.safetensors`` is replaced by ``model.safetensors.delta``, the tensors' zstandard frames one after the other, and
``model.safetensors.delta.json``, which holds the frames' offsets, the header and the digest of the whole file.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash

from rlhf_mcore.checkpoint.layout import DELTA_DATA, DELTA_INDEX
from rlhf_mcore.checkpoint.manifest import FileEntry, hash_file
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, parse_json, read_json, shorten

FORMAT = "rlhf_mcore.delta"
VERSION = 1

T = TypeVar("T")

_LEVEL = 1  # updates of bf16 weights become as small as with level 3, in two thirds of the time
CHUNK_BYTES = 8 * 2**20
_THREADS = 4
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file: its bytes, where they begin in the file, and the size of an element (1: unknown)."""

    name: str
    begin: int
    size: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor in a delta file: its frame [begin, end), and file and offset of the tensor in the base (None: none of this size)."""

    name: str
    begin: int
    end: int
    base_file: str | None
    base_begin: int


def encode_file(directory: Path, name: str, base: Path) -> list[Path]:
    """Replace a weight file, ``name`` relative to a checkpoint, by its difference to ``base``. Returns the two new files."""
    path = directory / name
    header, tensors = _read_header(path)
    known = _read_tensors(base, name.split("/")[0])
    delta, index = path.with_name(path.name + DELTA_DATA), path.with_name(path.name + DELTA_INDEX)
    data, files = _map(path), _BaseFiles(base)
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


def restore_file(index: Path, base: Path, target: Path) -> None:
    """Write the weight file that an index and its data describe to ``target``.

    Raises:
        ConfigError: the result differs from the file that was saved, because the difference or the base is damaged.
    """
    import zstandard

    try:
        content = read_json(index, limits=INDEX, remedy="choose another checkpoint").content
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(f"{index}: not an index that this release reads; use the release that wrote it")
        restored = _restore(index, content, base, target)
        expected = FileEntry(content["size"], content["xxh3_128"])
    except ConfigError:
        raise
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        AssertionError,
        zstandard.ZstdError,
        FileNotFoundError,
    ) as error:
        raise ConfigError(
            f"{index}: the difference or its base is damaged ({error}); choose another checkpoint"
        ) from error
    if restored != expected:
        target.unlink()
        raise ConfigError(
            f"{index}: the file that it restores is not the one that was saved; choose another checkpoint"
        )


def _restore(index: Path, content: Mapping[str, Any], base: Path, target: Path) -> FileEntry:
    """Write the file, and return its size and hash."""
    header = content["header"].encode("utf-8")
    items = list(zip(_parse_header(header, index), (Difference(**item) for item in content["tensors"]), strict=True))
    data = _map(index.with_name(index.name.removesuffix(DELTA_INDEX) + DELTA_DATA))
    state, size = xxhash.xxh3_128(), 0
    with target.open("wb") as out:
        for part in _decode(header, items, data, _BaseFiles(base)):
            state.update(part)
            size += out.write(part)
    return FileEntry(size, state.hexdigest())


def _decode(
    header: bytes, items: list[tuple[Stored, Difference]], data: memoryview, files: _BaseFiles
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file, from its header and its differences."""
    import zstandard

    yield len(header).to_bytes(8, "little") + header
    for tensor, difference in items:
        assert tensor.name == difference.name, f"{tensor.name} and {difference.name} should be the same tensor"
        base = files.get(difference.base_file)
        stream = zstandard.ZstdDecompressor().stream_reader(data[difference.begin : difference.end])
        for begin, end in _chunks(tensor):
            planes = np.frombuffer(_read_exactly(stream, end - begin), np.uint8)
            part = planes.reshape(tensor.item_bytes, -1).T.reshape(-1)
            if base is not None:
                at = difference.base_begin + begin
                part = part ^ np.frombuffer(base[at : at + end - begin], np.uint8)
            yield np.ascontiguousarray(part).data


def _compress(data: memoryview, tensor: Stored, base: memoryview | None, base_begin: int) -> bytes:
    """Return one frame, which holds the byte planes of each chunk of the difference."""
    import zstandard

    compressor = zstandard.ZstdCompressor(_LEVEL).compressobj(size=tensor.size)
    out = []
    for begin, end in _chunks(tensor):
        part = np.frombuffer(data[tensor.begin + begin : tensor.begin + end], np.uint8)
        if base is not None:
            part = part ^ np.frombuffer(base[base_begin + begin : base_begin + end], np.uint8)
        planes = np.ascontiguousarray(part.reshape(-1, tensor.item_bytes).T)
        out.append(compressor.compress(planes.data))
    return b"".join([*out, compressor.flush()])


def _chunks(tensor: Stored) -> Iterator[tuple[int, int]]:
    for begin in range(0, tensor.size, CHUNK_BYTES):
        yield begin, min(begin + CHUNK_BYTES, tensor.size)


def _read_exactly(stream: Any, count: int) -> bytes:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            raise ConfigError("a difference is shorter than its tensor; the checkpoint is damaged, choose another")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _map_in_threads(action: Callable[[T], bytes], items: list[T]) -> Iterator[bytes]:
    """Yield ``action`` of each item in order, computed in threads. At most ``_THREADS`` results wait."""
    with ThreadPoolExecutor(_THREADS) as pool:
        rest = iter(items)
        while group := list(islice(rest, _THREADS)):
            yield from pool.map(action, group)


def _locate(known: Mapping[str, tuple[str, Stored]], tensor: Stored) -> tuple[str | None, int]:
    """Return file and offset of the tensor of the same name and size in the base, (None, 0) if it has none."""
    file, of_base = known.get(tensor.name, (None, tensor))
    return (file, of_base.begin) if file is not None and of_base.size == tensor.size else (None, 0)


def _read_tensors(base: Path, role: str) -> dict[str, tuple[str, Stored]]:
    """Return all tensors of a model of a full checkpoint, by name, each with its file."""
    files = sorted((base / role).glob("*.safetensors"))
    return {tensor.name: (f"{role}/{path.name}", tensor) for path in files for tensor in _read_header(path)[1]}


def _read_header(path: Path) -> tuple[bytes, list[Stored]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size)
    tensors = _parse_header(header, path)
    end = tensors[-1].begin + tensors[-1].size if tensors else 8 + size
    assert end == path.stat().st_size, f"{path}: {end} bytes by the header, but the file has {path.stat().st_size}"
    return header, tensors


def _parse_header(header: bytes, path: Path) -> list[Stored]:
    """Return the tensors of a safetensors file in the order of their bytes, which follow each other without gaps."""
    tensors = []
    for name, entry in parse_json(
        header, limits=INDEX, where=str(path), remedy="choose another checkpoint"
    ).content.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors.append(Stored(name, 8 + len(header) + begin, end - begin, _ITEM_BYTES.get(entry["dtype"], 1)))
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.size))
    at = 8 + len(header)
    for tensor in tensors:
        assert tensor.begin == at, f"{path}: {tensor.name} begins at {tensor.begin}, not at {at}"
        at += tensor.size
    return tensors


def _map(path: Path) -> memoryview:
    """Map a file into memory. The mapping ends with its last view."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class _BaseFiles:
    """The files of a base, mapped when first used. Their names come from an index, so they must not lead out of the base."""

    def __init__(self, base: Path):
        self._base = base.resolve()
        self._mapped: dict[str, memoryview] = {}

    def get(self, name: str | None) -> memoryview | None:
        if name is None:
            return None
        if name not in self._mapped:
            path = Path(os.path.realpath(self._base / name))
            if self._base not in path.parents:
                raise ConfigError(f"{name} leads out of {self._base}; the checkpoint is damaged, choose another")
            try:
                self._mapped[name] = _map(path)
            except OSError as error:
                raise ConfigError(
                    f"{self._base}: a difference names {shorten(name)}, which cannot be read ({error.strerror}); the checkpoint "
                    "is damaged, choose another"
                ) from error
        return self._mapped[name]
