"""Locate the tensors of a ``torch.save`` file: read the description once, and then only the required bytes.

The file is a zip with one pickle, which describes the tensors, and one uncompressed record per storage. torch
builds nothing from the description. So a malformed description gives an error message, not a crash in torch's C++
code.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rlhf_mcore.bridge.files.formats.foreign_pickle import Name, Shell, read_pickle
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import open_file, shorten

MAX_PICKLE_BYTES = 64 * 2**20  # a tensor's description takes about 200 bytes
MAX_DIRECTORY_BYTES = 64 * 2**20
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48
MAX_MESH = 2**20
_BLOCK_BYTES = 2**20
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (*_STORAGES.values(), torch.float8_e4m3fn, torch.float8_e5m2)
}
_DAMAGE = (ValueError, OSError, zipfile.BadZipFile, NotImplementedError, OverflowError, RecursionError)
_ODD = {"_rebuild_qtensor": "quantised", "_rebuild_sparse_tensor": "sparse", "_rebuild_nested_tensor": "nested"}


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor stored in a file: its first element is at byte ``offset``; strides count elements.

    For a DTensor, this is the local part. ``placements``, ``mesh`` (ranks by mesh coordinates) and ``whole`` (the
    full shape) describe the DTensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    whole: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] = ()
    mesh: Tensor | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


def locate(path: Path, *, check: bool = True) -> dict[str, Located]:
    """Return the tensors of a file by name. With ``check``, compare the checksum of every record.

    Raises:
        ConfigError: the file cannot be read, is damaged, or contains other objects.
    """
    with open_file(path, remedy="save it again with torch.save") as file:
        try:
            archive = _Archive(file, 0, os.fstat(file.fileno()).st_size, check=check)
            content = archive.content()
            if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
                raise ValueError("not a dictionary of tensors")
            return {name: _locate_tensor(archive, name, value) for name, value in content.items()}
        except _DAMAGE as error:
            raise ConfigError(
                f"{path}: refused ({shorten(str(error), 300)}). The file is damaged or contains other objects than tensors."
            ) from error


def locate_one(path: Path, offset: int, length: int, *, check: bool = True) -> Located:
    """Return a tensor that was saved alone, as a file inside a file.

    Raises:
        ConfigError: there is no tensor, or it is damaged.
    """
    with open_file(path, remedy="save it again") as file:
        try:
            archive = _Archive(file, offset, length, check=check)
            return archive.tensor(archive.content())
        except _DAMAGE as error:
            reason = shorten(str(error), 300)
            raise ConfigError(f"{path}: no tensor at byte {offset} ({reason}). The file is damaged.") from error


def read(path: Path, tensor: Located, inside: tuple[slice, ...]) -> Tensor:
    """Read a rectangle of a tensor. ``inside`` must have explicit bounds. Only the intersecting rows are read.

    Raises:
        ConfigError: the file is now shorter than before.
    """
    if not inside:  # a scalar
        return read(path, replace(tensor, shape=(1,), strides=(1,)), (slice(0, 1),)).view(())
    rows = inside[0]
    shape = (rows.stop - rows.start, *tensor.shape[1:])
    if not prod(shape):
        return torch.empty(tuple(s.stop - s.start for s in inside), dtype=tensor.dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, tensor.strides, strict=True))
    buffer = bytearray(elements * tensor.dtype.itemsize)
    view, offset = memoryview(buffer), tensor.offset + rows.start * tensor.strides[0] * tensor.dtype.itemsize
    with path.open("rb", buffering=0) as file:
        while view:
            count = os.preadv(file.fileno(), [view], offset)
            if count == 0:
                raise ConfigError(f"{path}: ends before byte {offset}. The file is truncated.")
            view, offset = view[count:], offset + count
    return torch.frombuffer(buffer, dtype=tensor.dtype).as_strided(shape, tensor.strides)[(slice(None), *inside[1:])]


class _FileSlice:
    """Present a part of a file as a read-only file."""

    def __init__(self, file: BinaryIO, begin: int, size: int):
        self._file, self._begin, self._size, self._at = file, begin, size, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def read(self, size: int = -1) -> bytes:
        rest = max(self._size - self._at, 0)
        data = os.pread(self._file.fileno(), rest if size < 0 else min(size, rest), self._begin + self._at)
        self._at += len(data)
        return data


class _Archive:
    """The zip of a ``torch.save`` file: its pickle, and the places of its storages."""

    def __init__(self, file: BinaryIO, begin: int, size: int, *, check: bool):
        self._file, self._begin, self._size = file, begin, size
        part = _FileSlice(file, begin, size)
        self._check_directory(part)
        archive = zipfile.ZipFile(part)
        self._records: dict[str, tuple[int, int]] = {}
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            start = self._start(info)
            if name in self._records or info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise ValueError(f"record {shorten(name)} is duplicate, compressed or encrypted")
            if start + info.file_size > size:
                raise ValueError(f"record {shorten(name)} reaches beyond the file")
            self._records[name] = (start, info.file_size)
            if check and self._checksum(start, info.file_size) != info.CRC:
                raise ValueError(f"record {shorten(name)} does not match its checksum")
        if self._bytes("byteorder", 16, b"little") != b"little":
            raise ValueError("its numbers are big-endian")

    def content(self) -> Any:
        """Return the inert content of the pickle."""
        return read_pickle(self._bytes("data.pkl", MAX_PICKLE_BYTES))

    def tensor(self, value: Any) -> Located:
        """Return the place and layout of the tensor that a shell describes."""
        if not isinstance(value, Shell):
            raise ValueError("not a tensor")
        maker, args = value.name.name, value.args
        if maker in _ODD:
            raise ValueError(f"a {_ODD[maker]} tensor; convert the model in its plain form")
        if maker in ("_rebuild_parameter", "_rebuild_parameter_with_state") and args:
            return self.tensor(args[0])
        if maker == "_rebuild_from_type_v2" and len(args) == 4:
            return self._of_type(*args)
        if maker == "_rebuild_tensor_v2" and len(args) >= 4:
            return self._plain(*args[:4], dtype=None)
        if maker == "_rebuild_tensor_v3" and len(args) >= 7:
            return self._plain(*args[:4], dtype=dtype_of(args[6]))
        raise ValueError(f"{shorten(value.name.module)}.{shorten(maker)} is not a tensor")

    def _of_type(self, func: Any, kind: Any, args: Any, state: Any) -> Located:
        if not isinstance(kind, Name) or not isinstance(func, Name) or not isinstance(args, tuple):
            raise ValueError("a tensor with a malformed type")
        if kind.name != "DTensor":
            return self.tensor(Shell(func, args))
        fields = _fields(state[1] if isinstance(state, tuple) and len(state) == 2 else state)
        spec = _fields(_state(fields.get("_spec")))
        meta = spec.get("tensor_meta")
        if not isinstance(meta, Shell) or not meta.args:
            raise ValueError("a DTensor without its shape")
        placements = spec.get("placements")
        if not isinstance(placements, tuple):
            raise ValueError("a DTensor without placements")
        mesh = self._mesh(_fields(_state(spec.get("mesh"))))
        if mesh.dim() != len(placements):
            raise ValueError(f"{len(placements)} placements on a mesh of {mesh.dim()} dimensions")
        return replace(
            self.tensor(fields.get("_local_tensor")),
            whole=sizes_of(meta.args[0]),
            placements=tuple(map(_placement, placements)),
            mesh=mesh,
        )

    def _plain(self, storage: Any, first: Any, size: Any, stride: Any, *, dtype: torch.dtype | None) -> Located:
        if not isinstance(storage, Shell) or len(storage.args) != 5 or storage.args[0] != "storage":
            raise ValueError("a tensor without storage")
        _, kind, key, _, numel = storage.args
        stored_dtype = _STORAGES.get(kind.name) if isinstance(kind, Name) else None
        if not isinstance(kind, Name) or not isinstance(key, str) or (stored_dtype is None and dtype is None):
            raise ValueError(f"a storage of an unknown type ({shorten(kind.name if isinstance(kind, Name) else kind)})")
        if dtype is None:
            assert stored_dtype is not None
            dtype = stored_dtype
        shape, strides = sizes_of(size), sizes_of(stride)
        begin, num_bytes = self._records.get(f"data/{key}", (0, -1))
        stated = numel * (1 if stored_dtype is None else stored_dtype.itemsize) if type(numel) is int else None
        if num_bytes != stated:
            raise ValueError(f"storage {shorten(key)} has {num_bytes} bytes, but {stated} in the description")
        if type(first) is not int or first < 0 or len(shape) != len(strides):
            raise ValueError("a tensor with a malformed offset or stride")
        end = first + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if prod(shape) else 0
        if end * dtype.itemsize > num_bytes:
            raise ValueError(f"a tensor of shape {shape} reaches beyond its storage of {num_bytes} bytes")
        return Located(dtype, shape, strides, self._begin + begin + first * dtype.itemsize)

    def _mesh(self, fields: Mapping[str, Any]) -> Tensor:
        """Return the ranks by mesh coordinates.

        The mesh is a tensor. Since torch 2.9 it may also be a flat tensor with a layout for each dimension.
        """
        flat = self._ranks(fields["mesh"] if "mesh" in fields else fields.get("_rank_map"))
        if "mesh" in fields:
            return flat
        layout = _fields(_state(fields.get("_layout")))
        axes = layout.get("axes")
        if isinstance(axes, tuple):
            parts = [_fields(_state(axis)) for axis in axes]
            dims = [list(_offsets(part.get("shape"), part.get("stride"))) for part in parts]
        else:
            shape, stride = layout.get("shape"), layout.get("stride")
            pairs = (
                zip(shape, stride, strict=True)
                if isinstance(shape, tuple) and isinstance(stride, tuple)
                else [(shape, stride)]
            )
            dims = [list(_offsets(*pair)) for pair in pairs]
        if prod(map(len, dims)) > MAX_MESH:
            raise ValueError(f"a mesh of more than {MAX_MESH} ranks")
        places = [sum(place) for place in product(*dims)]
        if any(place >= flat.numel() for place in places):
            raise ValueError("a mesh beyond its ranks")
        return flat.flatten()[places].view([len(dim) for dim in dims])

    def _ranks(self, value: Any) -> Tensor:
        where = self.tensor(value)
        if where.numel > MAX_MESH or where.dtype not in (torch.int32, torch.int64):
            raise ValueError("a mesh without valid ranks")
        elements = 1 + sum((n - 1) * step for n, step in zip(where.shape, where.strides, strict=True))
        data = os.pread(self._file.fileno(), elements * where.dtype.itemsize, where.offset)
        return torch.frombuffer(bytearray(data), dtype=where.dtype).as_strided(where.shape, where.strides).clone()

    def _check_directory(self, part: _FileSlice) -> None:
        """Check the size of the table of contents, because the zip module reads it at once."""
        part.seek(max(self._size - 2**16, 0))
        tail = part.read(2**16)
        at = tail.rfind(b"PK\x05\x06")
        if at >= 0 and len(tail) >= at + 16:
            size = int.from_bytes(tail[at + 12 : at + 16], "little")
            wide = tail.rfind(b"PK\x06\x06", 0, at)
            if size == 2**32 - 1 and wide >= 0:
                size = int.from_bytes(tail[wide + 40 : wide + 48], "little")
            if size > MAX_DIRECTORY_BYTES:
                raise ValueError(f"its table of contents has {size:,} bytes, at most {MAX_DIRECTORY_BYTES:,} are read")

    def _start(self, info: zipfile.ZipInfo) -> int:
        """Return the first byte of a record's data, after its local header."""
        header = os.pread(self._file.fileno(), 30, self._begin + info.header_offset)
        if len(header) < 30 or header[:4] != b"PK\x03\x04":
            raise ValueError(f"record {shorten(info.filename)} has no header")
        lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return info.header_offset + 30 + lengths

    def _checksum(self, start: int, size: int) -> int:
        checksum = 0
        for at in range(start, start + size, _BLOCK_BYTES):
            count = min(_BLOCK_BYTES, start + size - at)
            checksum = zlib.crc32(os.pread(self._file.fileno(), count, self._begin + at), checksum)
        return checksum

    def _bytes(self, name: str, limit: int, default: bytes | None = None) -> bytes:
        start, size = self._records.get(name, (0, -1))
        if size < 0 and default is not None:
            return default
        if not 0 <= size <= limit:
            raise ValueError(
                f"{name} is missing" if size < 0 else f"{name} has {size:,} bytes, at most {limit:,} are read"
            )
        return os.pread(self._file.fileno(), size, self._begin + start)


def _locate_tensor(archive: _Archive, name: str, value: Any) -> Located:
    try:
        return archive.tensor(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{shorten(name)}: {str(error) or 'nested too deep'}") from error


def _state(value: Any) -> Any:
    return value.state if isinstance(value, Shell) else None


def _fields(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a DTensor with an incomplete description")
    return value


def sizes_of(value: Any) -> tuple[int, ...]:
    """Return a shape, an index or strides: a tuple, or a ``torch.Size`` of a tuple.

    Raises:
        ValueError: the value is neither, or is too large for any tensor.
    """
    if isinstance(value, Shell) and value.name == Name("torch", "Size") and value.args:
        value = value.args[0]
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise ValueError("a malformed shape")
    if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value) or prod(value) > MAX_ELEMENTS:
        raise ValueError(f"an impossible shape ({shorten(value)})")
    return tuple(value)


def dtype_of(value: Any) -> torch.dtype:
    """Return the dtype that a pickle names.

    Raises:
        ValueError: weights do not use this dtype.
    """
    dtype = _DTYPES.get(value.name) if isinstance(value, Name) and value.module == "torch" else None
    if dtype is None:
        raise ValueError(
            f"dtype {shorten(value.name if isinstance(value, Name) else value)} is not supported for weights"
        )
    return dtype


def _placement(value: Any) -> Placement:
    if not isinstance(value, Shell):
        raise ValueError("a malformed placement")
    fields = value.state if isinstance(value.state, dict) else {}
    numbers = [fields.get("dim"), fields.get("split_factor")] if fields else [*value.args, None, None][:2]
    dim, split = (n if type(n) is int and abs(n) < 2**31 else None for n in numbers)
    if value.name.name == "Replicate":
        return Replicate()
    if value.name.name == "Shard" and dim is not None:
        return Shard(dim)
    if value.name.name == "_StridedShard" and dim is not None and split is not None and split > 0:
        return _StridedShard(dim, split_factor=split)
    raise ValueError(f"placement {shorten(value.name.name)} is not supported; reduce it before saving")


def _offsets(shape: Any, stride: Any) -> Iterator[int]:
    """Yield the positions along one mesh dimension in the flat list of ranks. The dimension may combine several."""
    sizes, steps = (value if isinstance(value, tuple) else (value,) for value in (shape, stride))
    whole = all(type(n) is int and 0 <= n <= MAX_MESH for n in (*sizes, *steps))
    if not whole or len(sizes) > MAX_DIMENSIONS or prod(sizes) > MAX_MESH:
        raise ValueError("a mesh with a malformed layout")
    for place in product(*(range(size) for size in sizes)):
        yield sum(k * step for k, step in zip(place, steps, strict=True))
