"""The one file that reads and writes pickles, because formats of others are made of them.

Reading runs no code of the file: tensors go through torch's weights-only unpickler, and the index of a distributed checkpoint
through one that knows the classes of an index and makes inert shells of anything from Megatron.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed.tensor  # registers the classes of a DTensor as safe
from torch.distributed._shard.sharded_tensor import metadata as sharded
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.utils import _create_file_view

from rlhf_mcore.config.errors import ConfigError

MAX_INDEX_BYTES = 2**30
_DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint8",
    "int8",
    "int16",
    "int32",
)
_INDEX_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    **{  # where torch had them before 2.3
        (sharded.__name__, name): getattr(sharded, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    **{("torch", name): getattr(torch, name) for name in (*_DTYPES, "int64", "bool", "strided")},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class _Shell:
    """Stands for an object of a class that nobody needs here. It has no behaviour."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Only what an index is made of."""
        if (module, name) in _INDEX_CLASSES:
            return _INDEX_CLASSES[module, name]
        if module.split(".")[0] == "megatron" or module == "torch.distributed.checkpoint.planner":
            return _Shell
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return _Shell
        raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")


def read_index(path: Path) -> metadata.Metadata:
    """The ``.metadata`` of a distributed checkpoint.

    Raises:
        ConfigError: it cannot be read, or holds anything but an index.
    """
    try:
        if path.stat().st_size > MAX_INDEX_BYTES:
            raise ValueError("too large for an index")
        with path.open("rb") as file:
            found = _IndexUnpickler(file).load()
        if not isinstance(found, metadata.Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError("not the index of a checkpoint")
    except Exception as error:  # an unpickler fails in every way there is
        raise ConfigError(f"{path}: refused ({error}). The file is damaged or is not what it says it is.") from error
    return found


def load_tensors(path: Path) -> dict[str, Any]:
    """A dictionary of tensors as ``torch.save`` wrote it, mapped from the file: its pages are read when they are needed.

    Raises:
        ConfigError: it cannot be read, or holds more than tensors and plain values.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        if not isinstance(found, dict):
            raise ValueError("not a dictionary of tensors")
    except Exception as error:
        raise ConfigError(
            f"{path}: refused ({_first_line(error)}). The file is damaged or holds other things than tensors."
        ) from error
    return found


def record_offsets(path: Path) -> list[int]:
    """Where the storages of a ``torch.save`` file begin, in bytes."""
    reader: Any = torch._C.PyTorchFileReader(str(path))
    return [reader.get_record_offset(name) for name in reader.get_all_records() if name.startswith("data/")]


def load_chunk(path: Path, offset: int, length: int) -> torch.Tensor:
    """One tensor of a ``.distcp`` file.

    Raises:
        ConfigError: there is none.
    """
    try:
        with path.open("rb") as file:
            view: Any = _create_file_view(file, offset, length)
            found = torch.load(view, map_location="cpu", weights_only=True)
        if not isinstance(found, torch.Tensor):
            raise ValueError("not a tensor")
    except Exception as error:
        raise ConfigError(f"{path}: no tensor at byte {offset} ({_first_line(error)}). The file is damaged.") from error
    return found


def save_values(values: dict[str, Any], path: Path) -> None:
    """Write plain values as Megatron's ``common.pt`` holds them."""
    torch.save(values, path)


def save_chunk(value: torch.Tensor | list[None], file: BinaryIO) -> None:
    """Append a tensor, or an empty object, to a ``.distcp`` file."""
    torch.save(value, file)


def save_index(index: metadata.Metadata, path: Path) -> None:
    """Write the ``.metadata`` of a distributed checkpoint."""
    path.write_bytes(pickle.dumps(index))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
