"""Read the tensors of ``torch.save`` files from other trainers, with torch's restricted unpickler.

It builds tensors and the parts of DTensors, and rejects every other object, so no code in a file runs. Files are
mapped, so only the pages of used rows are in memory.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import warnings
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import open_file, shorten

MAX_PICKLE_BYTES = 64 * 2**20  # a tensor's description takes about 200 bytes
MAX_MESH = 2**20
# Names of the same classes before torch 2.5.
_FORMER = "torch.distributed._tensor"
_PLACEMENTS = (Partial, Replicate, Shard, _StridedShard)
_ALIASES: list[Any] = [
    (DTensor, f"{_FORMER}.api.DTensor"),
    *((kind, f"{_FORMER}.placement_types.{kind.__name__}") for kind in _PLACEMENTS),
    *(
        (kind, f"{_FORMER}.{module}.{kind.__name__}")
        for kind in (DTensorSpec, TensorMeta)
        for module in ("placement_types", "_dtensor_spec")
    ),
]


@dataclass(frozen=True, slots=True)
class ForeignTensor:
    """A tensor in a file. For a DTensor, this is the local part.

    ``whole`` (the full shape), ``placements`` and ``mesh`` (ranks by mesh coordinates) describe the DTensor.
    """

    local: Tensor
    whole: tuple[int, ...] | None = None
    placements: tuple[Placement, ...] = ()
    mesh: Tensor | None = None


def load_file(path: Path, *, check: bool = True) -> dict[str, ForeignTensor]:
    """Map the tensors of a file by name. With ``check``, compare the checksum of every record.

    Raises:
        ConfigError: the file cannot be read, is damaged, or contains other objects.
    """
    with open_file(path, remedy="save it again with torch.save") as file:
        try:
            sizes = _check_archive(file, check=check)
            content = _load(path, is_mapped=True)
            if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
                raise ValueError("not a dictionary of tensors")
            return {name: _describe(name, value, sizes) for name, value in content.items()}
        except Exception as error:  # an unpickler may raise any exception
            raise ConfigError(
                f"{path}: refused ({_shorten_reason(error)}). The file is damaged or contains other objects than tensors."
            ) from error


def load_part(path: Path, offset: int, length: int, *, check: bool = True) -> Tensor:
    """Read a tensor that was saved alone, as a file inside a file.

    Raises:
        ConfigError: there is no tensor, or it is damaged.
    """
    with open_file(path, remedy="save it again") as file:
        content = io.BytesIO(os.pread(file.fileno(), length, offset))
    try:
        sizes = _check_archive(content, check=check)
        content.seek(0)
        return _check_plain(_load(content), sizes)
    except Exception as error:  # an unpickler may raise any exception
        raise ConfigError(
            f"{path}: no tensor at byte {offset} ({_shorten_reason(error)}). The file is damaged."
        ) from error


def _load(file: Path | IO[bytes], *, is_mapped: bool = False) -> Any:
    with torch.serialization.safe_globals(_ALIASES), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about objects that are rejected afterwards
        return torch.load(file, map_location="cpu", mmap=is_mapped, weights_only=True)


def drop_pages(tensors: Iterable[Tensor]) -> None:
    """Free the pages of mapped tensors. They are read again when they are used."""
    for tensor in tensors:
        storage = tensor.untyped_storage()
        first = storage.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        size = storage.data_ptr() + storage.nbytes() - first
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _check_archive(file: IO[bytes], *, check: bool) -> set[int]:
    """Check that records are stored as they are, and with ``check`` their checksums. Return the records' sizes."""
    archive = zipfile.ZipFile(file)
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ValueError(f"record {shorten(info.filename)} is compressed or encrypted")
        if info.filename.endswith("/data.pkl") and info.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"data.pkl has {info.file_size:,} bytes, at most {MAX_PICKLE_BYTES:,} are read")
    if check and (damaged := archive.testzip()) is not None:
        raise ValueError(f"record {shorten(damaged)} does not match its checksum")
    return {info.file_size for info in archive.infolist()}


def _shorten_reason(error: Exception) -> str:
    """Return one line of an error's message, without torch's advice to trust the file."""
    lines = str(error).rpartition("WeightsUnpickler error: ")[2].strip().splitlines() or [type(error).__name__]
    reason = next((line for line in lines if "GLOBAL" in line), lines[0])
    return shorten(reason.partition(" by default. Please use")[0], 300)


def _describe(name: str, value: Any, sizes: Collection[int]) -> ForeignTensor:
    try:
        if not isinstance(value, DTensor):
            return ForeignTensor(_check_plain(value, sizes))
        spec, mesh = value._spec, _read_mesh(vars(value._spec.mesh))
        placements = tuple(spec.placements)
        if mesh.dim() != len(placements) or not all(isinstance(placement, Placement) for placement in placements):
            raise ValueError(f"{len(placements)} placements on a mesh of {mesh.dim()} dimensions")
        assert spec.tensor_meta is not None
        local = _check_plain(value._local_tensor, sizes)
        return ForeignTensor(local, tuple(torch.Size(spec.tensor_meta.shape)), placements, mesh)
    except Exception as error:  # every field of a DTensor comes from the file
        raise ValueError(f"{shorten(name)}: {_shorten_reason(error)}") from error


def _check_plain(value: Any, sizes: Collection[int]) -> Tensor:
    """Return a tensor with plain values. ``sizes`` are the sizes of the file's records."""
    if not isinstance(value, Tensor):
        raise ValueError("not a tensor")
    kinds = {
        "quantised": value.is_quantized,
        "sparse": value.layout != torch.strided,
        "meta": value.is_meta,
        "nested": value.is_nested,
    }
    for kind, is_such in kinds.items():
        if is_such:
            raise ValueError(f"a {kind} tensor; convert the model in its plain form")
    if value.untyped_storage().nbytes() not in sizes:  # torch does not compare the description with the record
        raise ValueError("its storage is not as large as its description states")
    return value.detach()


def _read_mesh(state: dict[str, Any]) -> Tensor:
    """Return the ranks by mesh coordinates.

    A mesh contains them as a tensor. Since torch 2.9 it contains a flat tensor and a layout for each dimension, whose
    form has changed.
    """
    if isinstance(ranks := state.get("mesh"), Tensor):
        return ranks
    layout = state["_layout"]
    if hasattr(layout, "axes"):
        axes = [(axis.shape, axis.stride) for axis in layout.axes]
    else:
        axes = (
            list(zip(layout.shape, layout.stride, strict=True))
            if isinstance(layout.shape, tuple)
            else [(layout.shape, layout.stride)]
        )
    axes = [(a, b) if isinstance(a, tuple) else ((a,), (b,)) for a, b in axes]
    sizes, strides = ([n for axis in axes for n in axis[k]] for k in (0, 1))
    if prod(sizes) > MAX_MESH:
        raise ValueError(f"a mesh of more than {MAX_MESH} ranks")
    return state["_rank_map"].as_strided(sizes, strides).reshape([prod(shape) for shape, _ in axes])
