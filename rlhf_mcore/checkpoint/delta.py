"""Verify and read full checkpoints and deltas. A delta stores its weight files as differences to a full checkpoint.

Chains have length one: the base of a delta is always a full checkpoint. The delta's manifest contains the base's
name and the digest of its manifest. The plug-in ``deltas`` writes deltas.

A difference is the XOR of a tensor's bytes with the bytes of the base tensor of the same name. After a small
update, most of its high bytes are zero. Before compression, bytes are grouped by their position in the elements
(byte planes).

Two files replace ``model.safetensors``. ``model.safetensors.delta`` contains the tensors' consecutive zstandard
frames. ``model.safetensors.delta.json`` contains the frames' offsets, the header and the digest of the whole file.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rlhf_mcore.checkpoint.contents import lacking, model_files, model_names
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import DELTA_DATA, DELTA_INDEX, MANIFEST, TRAINING, transitional_path
from rlhf_mcore.checkpoint.manifest import (
    FileEntry,
    Problem,
    base_of,
    compare,
    find_base,
    hash_file,
    read_manifest,
)
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.foreign import INDEX, parse_json, read_json, shorten
from rlhf_mcore.own_files import own_directory, refuse_link

Restored = tuple[Path, Path, Path]  # arguments of ``restore_file``


def verify_chain(
    checkpoint: Path,
    *,
    hashes: bool = True,
    model: str | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
    hash_of: Callable[[Path], FileEntry] = hash_file,
) -> list[Problem]:
    """Return the problems of ``manifest.verify`` and ``contents.lacking``, and damage of a delta's base.

    ``progress`` is called with the size of each file of the checkpoint itself after its comparison. ``hash_of``
    returns the hash of a file, including files of the base. Both are called from any thread.
    """
    try:
        manifest = read_manifest(checkpoint)
    except ConfigError as error:
        return [Problem(MANIFEST, "manifest", str(error))]
    problems = compare(checkpoint, manifest, hashes=hashes, model=model, progress=progress, hash_of=hash_of)
    problems += lacking(checkpoint, manifest.files)
    try:
        base = find_base(checkpoint, manifest)
    except ConfigError as error:
        return [*problems, Problem(MANIFEST, "base", str(error))]
    if base is not None:
        below = compare(base, read_manifest(base), hashes=hashes, model=model, hash_of=hash_of)
        problems += [
            Problem(f"../{base.name}/{problem.path}", "base", problem.detail) for problem in below if problem.is_damage
        ]
    return problems


def restore_files(files: Sequence[Restored]) -> None:
    """Restore weight files, one after the other."""
    for file in files:
        restore_file(*file)


def readable(
    checkpoint: Path,
    role: str = "actor",
    scratch: Path | None = None,
    restore: Callable[[Sequence[Restored]], None] = restore_files,
) -> Path:
    """Return a Hugging Face directory with the manifest's files of a checkpoint's model.

    Only one process may call it.

    Return the checkpoint's own directory, unless the checkpoint is a delta or the directory contains other files.
    Otherwise create a new directory: link whole files, and restore differences.

    Args:
        checkpoint: a committed checkpoint.
        role: the model in it.
        scratch: parent of a new directory; default: the run directory, where ``recover`` removes it.
        restore: restores all files that are stored as differences.

    Raises:
        ConfigError: the manifest names no such model, or a difference or its base is damaged.
    """
    manifest = read_manifest(checkpoint)
    base = base_of(checkpoint)
    names = model_files(manifest.files, role)
    if not names:
        models = ", ".join(model_names(manifest.files))
        raise ConfigError(f"{checkpoint}: the manifest names no model {role!r}, only: {models}; choose one of these")
    if base is None and set(names) >= {path.name for path in (checkpoint / role).iterdir()} - {TRAINING}:
        return checkpoint / role
    scratch = scratch or checkpoint.resolve().parent
    scratch.mkdir(parents=True, exist_ok=True)
    whole = own_directory(transitional_path(scratch, manifest.info.step, "full", manifest.digest[:8])) / role
    refuse_link(whole)
    if not whole.is_dir():
        half = own_directory(transitional_path(scratch, manifest.info.step, "full")) / role
        Disk().remove_tree(half)
        _restore_model(checkpoint / role, names, base, half, restore)
        half.rename(whole)
        half.parent.rmdir()
    return whole


def checked_model(
    checkpoint: Path,
    role: str = "actor",
    scratch: Path | None = None,
    *,
    hashes: bool = True,
    report: Callable[[Sequence[Problem]], None] = lambda ignored: None,
) -> Path:
    """Verify a checkpoint's model and return a directory with its files, like ``readable``.

    Args:
        checkpoint: a committed checkpoint.
        role: the model in it. Files of other models are not read.
        scratch: as in ``readable``.
        hashes: False compares sizes only.
        report: called with the harmless problems: files that the manifest does not name. They are not read.

    Raises:
        ConfigError: the checkpoint is damaged, or has no such model.
    """
    problems = verify_chain(checkpoint, hashes=hashes, model=role)
    if damage := [problem for problem in problems if problem.is_damage]:
        raise ConfigError(f"{checkpoint} is damaged ({join_first(damage, 3)}); choose another checkpoint")
    if problems:
        report(problems)
    return readable(checkpoint, role, scratch)


def _restore_model(
    source: Path, names: list[str], base: Path | None, out: Path, restore: Callable[[Sequence[Restored]], None]
) -> None:
    """Restore the files that are stored as differences, and link the others."""
    out.mkdir(parents=True)
    differences = [name for name in names if name.endswith(DELTA_INDEX)]
    assert base is not None or not differences, f"{source} has no base"
    if base is not None:
        restore([(source / name, base, out / name.removesuffix(DELTA_INDEX)) for name in differences])
    for name in names:
        if not name.endswith((DELTA_INDEX, DELTA_DATA)):
            _link(source / name, out / name)


def _link(file: Path, target: Path) -> None:
    """Hard-link a file that is never written again, or copy it if the storage does not support hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


FORMAT = "rlhf_mcore.delta"
VERSION = 1

CHUNK_BYTES = 8 * 2**20
_ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file: its bytes, their start in the file, and the element size (1: unknown)."""

    name: str
    begin: int
    size: int
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor in a delta file: its frame [begin, end), and the base tensor's file and offset (None: no tensor of this size)."""

    name: str
    begin: int
    end: int
    base_file: str | None
    base_begin: int


def restore_file(index: Path, base: Path, target: Path) -> None:
    """Write the weight file that an index and its data describe to ``target``.

    Raises:
        ConfigError: the result differs from the saved file, because the difference or the base is damaged.
    """
    import zstandard

    try:
        content = read_json(index, limits=INDEX, remedy="choose another checkpoint").content
        if content.get("format") != FORMAT or content.get("version") != VERSION:
            raise ConfigError(f"{index}: not an index that this release reads; use the release that wrote it")
        restored = _write_restored(index, content, base, target)
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
        raise ConfigError(f"{index}: the restored file differs from the saved file; choose another checkpoint")


def _write_restored(index: Path, content: Mapping[str, Any], base: Path, target: Path) -> FileEntry:
    """Write the file, and return its size and hash."""
    header = content["header"].encode("utf-8")
    items = list(zip(parse_header(header, index), (Difference(**item) for item in content["tensors"]), strict=True))
    data = map_file(index.with_name(index.name.removesuffix(DELTA_INDEX) + DELTA_DATA))
    state, size = xxhash.xxh3_128(), 0
    with target.open("wb") as out:
        for part in _decode(header, items, data, BaseFiles(base)):
            state.update(part)
            size += out.write(part)
    return FileEntry(size, state.hexdigest())


def _decode(
    header: bytes, items: list[tuple[Stored, Difference]], data: memoryview, files: BaseFiles
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file, from its header and its differences."""
    import zstandard

    yield len(header).to_bytes(8, "little") + header
    for tensor, difference in items:
        assert tensor.name == difference.name, f"{tensor.name} and {difference.name} should be the same tensor"
        base = files.get(difference.base_file)
        stream = zstandard.ZstdDecompressor().stream_reader(data[difference.begin : difference.end])
        for begin, end in split_into_chunks(tensor):
            planes = np.frombuffer(_read_exactly(stream, end - begin), np.uint8)
            part = planes.reshape(tensor.item_bytes, -1).T.reshape(-1)
            if base is not None:
                at = difference.base_begin + begin
                part = part ^ np.frombuffer(base[at : at + end - begin], np.uint8)
            yield np.ascontiguousarray(part).data


def split_into_chunks(tensor: Stored) -> Iterator[tuple[int, int]]:
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


def parse_header(header: bytes, path: Path) -> list[Stored]:
    """Return the tensors of a safetensors file in the order of their bytes. They must be contiguous."""
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


def map_file(path: Path) -> memoryview:
    """Map a file into memory. The mapping ends when its last view is freed."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class BaseFiles:
    """The files of a base, mapped at first use. Their names come from an index, so they must not lead out of the base."""

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
                self._mapped[name] = map_file(path)
            except OSError as error:
                raise ConfigError(
                    f"{self._base}: a difference names {shorten(name)}, which cannot be read ({error.strerror}); the checkpoint "
                    "is damaged, choose another"
                ) from error
        return self._mapped[name]
