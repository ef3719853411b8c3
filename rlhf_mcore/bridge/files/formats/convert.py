"""Convert a source to a directory with a few rows in memory.

Compare its tensors with config.json, hash them all, and write the directory completely or not at all.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from rlhf_mcore.bridge.files.formats import torch_dist
from rlhf_mcore.bridge.files.formats.source import BUFFERS, ModelSource
from rlhf_mcore.bridge.files.formats.torch_dist_writer import TorchDistWriter, write_common
from rlhf_mcore.bridge.files.hf_files import copy_companions
from rlhf_mcore.bridge.files.tensor_files import CODES, ShardFiles, TensorTypes, bytes_of, cut_into_shards, write_index
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.families import embedding_name
from rlhf_mcore.families.mtp import MTP_KEY, mtp_tensors, num_mtp_layers
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.own_files import own_directory
from rlhf_mcore.readers.model_files import read_config

BLOCK_BYTES = 16 * 2**20
RELEASE_BYTES = 96 * 2**20
_COMPARED_ELEMENTS = 2**22


@dataclass(slots=True)
class Reading:
    """Read a source in the dtypes of ``types``, block by block, and hash the returned values.

    ``digests`` covers the values of whole tensors, so it does not depend on the format. A tensor's rows must be
    read in order. ``is_checked``: reject values that are not finite.
    """

    source: ModelSource
    types: TensorTypes
    progress: Callable[[int], None] = lambda num_bytes: None
    is_checked: bool = False
    _hashes: dict[str, xxhash.xxh3_128] = field(default_factory=dict)
    _since_release: int = 0

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Read rows of a tensor.

        Raises:
            ConfigError: a value is too large for the dtype, or not finite.
        """
        stored = self.source.read(name, first, count)
        if self.is_checked and not (finite := stored.isfinite()).all():
            row = int((~finite).reshape(count, -1).any(1).nonzero()[0])
            raise ConfigError(
                f"{self.source.directory}: {name} has values that are not finite (NaN or infinite) from row {first + row} on; "
                "convert an earlier checkpoint, or pass --allow-nonfinite to convert them as they are"
            )
        part = stored.to(self.types[name][0])
        narrowed = part.dtype == torch.float16 != stored.dtype
        if narrowed and bool((part.isinf() & ~stored.isinf()).any()):
            raise ConfigError(
                f"{self.source.directory}: {name} has values outside the range of fp16; use --dtype bf16 or fp32"
            )
        self._hashes.setdefault(name, xxhash.xxh3_128()).update(bytes_of(part))
        self.progress(part.nbytes)
        self._since_release += stored.nbytes
        if self._since_release >= RELEASE_BYTES:
            self.source.release()
            # Return freed memory to the system. glibc keeps free gaps between used blocks, and they accumulate.
            if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
                trim(0)
            self._since_release = 0
        return part

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield the blocks of a tensor, each with the number of its first element."""
        dtype, shape = self.types[name]
        width = prod(shape[1:])
        step = max(BLOCK_BYTES // max(width * dtype.itemsize, 1), 1)
        for first in range(0, shape[0], step):
            yield first * width, self.rows(name, first, min(step, shape[0] - first))

    @property
    def digests(self) -> dict[str, str]:
        """Return the digests of the tensors read so far."""
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}


def write_hf(reading: Reading, directory: Path, shard_bytes: int) -> None:
    """Write a Hugging Face directory with its weights, config and tokenizer."""
    sizes = {name: prod(shape) * dtype.itemsize for name, (dtype, shape) in reading.types.items()}
    shards = cut_into_shards(sizes, 1, shard_bytes)
    for shard in shards:
        files = ShardFiles(directory, [shard], reading.types)
        try:
            for name in shard.tensors:
                for element, part in reading.blocks(name):
                    files.write(name, part, element)
        finally:
            files.close()
    write_index(directory, shards, reading.types)
    copy_companions([reading.source.companions], directory, main_dtype(reading.types), without_mtp(reading))


def write_megatron(reading: Reading, geometry: ModelGeometry, directory: Path, file_bytes: int) -> None:
    """Write a directory for Megatron-LM's ``--load``: the release checkpoint, its tracker file, and the Hugging Face files."""
    weights, companions = directory / "release", directory / torch_dist.COMPANIONS
    weights.mkdir()
    companions.mkdir()
    dtype = main_dtype(reading.types)
    copy_companions([reading.source.companions], companions, dtype, without_mtp(reading))
    writer = TorchDistWriter(weights, geometry, reading.types, block_bytes=BLOCK_BYTES, file_bytes=file_bytes)
    writer.write(reading.rows)
    write_common(weights, companions, geometry, dtype)
    (directory / torch_dist.TRACKER).write_text("release")


def without_mtp(reading: Reading) -> dict[str, int]:
    """Return the keys that differ in a written config.json.

    If the source has no MTP tensors, the number of MTP layers becomes 0.
    """
    where = reading.source.companions
    hf_config = read_config(where, str(where))
    return {MTP_KEY: 0} if num_mtp_layers(hf_config) and not mtp_tensors(reading.types, hf_config) else {}


def main_dtype(types: TensorTypes) -> torch.dtype:
    """Return the dtype of most elements."""
    counts: Counter[torch.dtype] = Counter()
    for dtype, shape in types.values():
        counts[dtype] += prod(shape)
    return counts.most_common(1)[0][0]


@contextmanager
def whole_directory(destination: Path, *, overwrite: bool) -> Iterator[Path]:
    """Create a directory that becomes ``destination`` when the block succeeds, and is removed otherwise.

    Raises:
        ConfigError: the destination exists and may not be replaced, is not a directory, or is being written by
            another process.
    """
    if destination.exists() and not overwrite:
        raise ConfigError(f"{destination} already exists; give another DST or --overwrite")
    if os.path.lexists(destination) and (destination.is_symlink() or not destination.is_dir()):
        raise ConfigError(f"{destination} is not a directory; give another DST")
    replaced = destination.with_name(f".{destination.name}.replaced")
    with transient_directory(destination, "partial") as temporary:
        yield temporary
        _make_durable(temporary)
        shutil.rmtree(replaced, ignore_errors=True)
        if destination.exists():
            destination.rename(replaced)
        temporary.rename(destination)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def transient_directory(destination: Path, kind: str) -> Iterator[Path]:
    """Create an empty directory next to ``destination``, and remove it when the block ends.

    All conversions to one destination use the same name, so the next conversion clears the files of a killed one.

    Raises:
        ConfigError: the directory cannot be created, or another running process uses it.
    """
    temporary = destination.with_name(f".{destination.name}.{kind}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(own_directory(temporary), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise ConfigError(f"{destination} cannot be written ({error}); choose another DST") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise ConfigError(
                f"{destination} is being written by another conversion; wait for it or choose another DST"
            ) from error
        raise ConfigError(f"{destination} cannot be written ({error}); choose another DST") from error
    try:
        for path in temporary.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(lock)


def _make_durable(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


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
        lines = [f"{kind}: {join_first(names, separator=', ')}" for kind, names in problems_by_kind.items() if names]
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
