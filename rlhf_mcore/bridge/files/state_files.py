"""The state of an optimizer on disk, in Hugging Face coordinates: written by every rank alone, read at any layout.

``training/state-<rank>.safetensors`` holds the rectangles of one rank, each a tensor of its own; ``training/index.json`` says
which rectangle of which Hugging Face tensor is in which file. Padding of the vocabulary is not stored: it is zero.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_mcore.bridge.files.tensor_files import FileImage, FileLayout, bytes_of, create, write_at
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.bridge.map.state_regions import Region, regions, writes
from rlhf_mcore.bridge.map.strided import Rectangle, gaps
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, read_json
from rlhf_mcore.parallel.collectives import gather_json
from rlhf_mcore.types import ModelGeometry, StateShard

STATE_INDEX = "index.json"
SECOND_MOMENT = "exp_avg_sq"
KINDS = ("master", "exp_avg", SECOND_MOMENT)
_FORMAT = 1
_REMEDY = "Resume from another checkpoint, or start from the weights alone (model.path)."

Described = list[tuple[str, list[str], list[int], list[int]]]  # of every region: Hugging Face name, kinds, start, shape


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    tensor: Tensor  # flat
    shape: tuple[int, ...]


class RankState:
    """What one rank writes of the state that its shards hold: its tensors by name, and the file that they make."""

    def __init__(self, shards: Sequence[StateShard], geometry: ModelGeometry):
        self.described: Described = []
        self._entries: list[_Entry] = []
        for shard in shards:
            if not writes(shard.name, geometry, shard.shard):
                continue
            held = regions(pieces(shard.name, geometry, shard.shard), shard.start, shard.stop)
            for region in held:
                kinds = [kind for kind in KINDS if kind in shard.tensors]
                self.described.append((region.hf_name, kinds, list(region.start), list(region.shape)))
            self._entries += [
                _Entry(
                    region_key(kind, region.hf_name, (region.start, region.shape)),
                    tensor[region.offset : region.offset + region.numel],
                    region.shape,
                )
                for kind, tensor in shard.tensors.items()
                for region in held
            ]
        self.layout = FileLayout({entry.key: (entry.tensor.dtype, entry.shape) for entry in self._entries})

    def write(self, path: Path) -> None:
        """Write the file, tensor by tensor; made durable."""
        file = create(path, self.layout)
        try:
            for entry in self._entries:
                write_at(file, bytes_of(entry.tensor), self.layout.offset(entry.key))
            os.fsync(file)
        finally:
            os.close(file)

    def copy_to(self, image: FileImage) -> None:
        """Copy all tensors into the image of the file. Copies from a device must be waited for."""
        for entry in self._entries:
            image.layout.flat(image.body, entry.key).copy_(entry.tensor, non_blocking=True)


def state_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"state-{rank:05d}.safetensors"


def region_key(kind: str, hf_name: str, rectangle: Rectangle) -> str:
    """Name of a rectangle's tensor, such as ``exp_avg/model.norm.weight[0:64]``."""
    spans = ",".join(f"{begin}:{begin + size}" for begin, size in zip(*rectangle, strict=True))
    return f"{kind}/{hf_name}[{spans}]"


def gather_index(
    described: Described, geometry: ModelGeometry, scalars: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The index of all ranks' files on the first rank, None on the others. Collective over the world.

    ``scalars`` are the same on all ranks that write something, and may be None on the others.
    """
    parts = gather_json([described, scalars])
    if not parts:
        return None
    known: Mapping[str, Any] = next((theirs for held, theirs in parts if held), {})
    return make_index({rank: held for rank, (held, _) in enumerate(parts)}, geometry, known)


def make_index(
    described: Mapping[int, Described], geometry: ModelGeometry, scalars: Mapping[str, Any]
) -> dict[str, Any]:
    """The index of what all ranks have described.

    Raises:
        ValueError: the ranks' regions do not cover a tensor exactly once. This is ours, not the user's, to put right.
    """
    shapes = hf_shapes(geometry)
    tensors: dict[str, dict[str, Any]] = {name: {"shape": list(shape), "regions": []} for name, shape in shapes.items()}
    files = [state_file(rank) for rank, found in sorted(described.items()) if found]
    for rank, found in described.items():
        for name, kinds, start, shape in found:
            entry = tensors[name]
            if entry.setdefault("kinds", kinds) != kinds:
                raise ValueError(f"{name}: kinds {kinds} on rank {rank}, {entry['kinds']} on another")
            entry["regions"].append([files.index(state_file(rank)), start, shape])
    for name, entry in tensors.items():
        stored = sum(prod(shape) for _, _, shape in entry["regions"])
        if stored != prod(shapes[name]):
            raise ValueError(f"{name}: the ranks hold {stored} elements of its state, it has {prod(shapes[name])}")
    return {"format": _FORMAT, "files": files, "tensors": tensors, "scalars": dict(scalars)}


class StateReader:
    """Reads the state of an optimizer for any layout. Only what is asked for is read from disk.

    Raises:
        ConfigError: the index is not that of this model, or damaged; the message names file and tensor.
    """

    def __init__(self, directory: Path, geometry: ModelGeometry):
        self.directory = directory.resolve()
        self._geometry = geometry
        self._open: dict[str, safe_open] = {}
        index = _read_index(self.directory / STATE_INDEX)
        self._files: list[str] = index["files"]
        self._tensors: dict[str, Any] = index["tensors"]
        self.scalars: dict[str, Any] = index["scalars"]
        self._check()

    def read_into(self, shards: Sequence[StateShard]) -> None:
        """Fill the tensors of ``shards`` in place; what is padding becomes zero.

        Raises:
            ConfigError: the files do not hold it, or hold what no optimizer can have come to: a value that is not finite, a second
                moment below zero.
        """
        for shard in shards:
            wanted = regions(pieces(shard.name, self._geometry, shard.shard), shard.start, shard.stop)
            for kind, tensor in shard.tensors.items():
                if sum(region.numel for region in wanted) < tensor.numel():
                    tensor.zero_()
                for region in wanted:
                    part = tensor[region.offset : region.offset + region.numel]
                    self._read_region(kind, region, part)
                    self._check_values(kind, region, part)

    def _read_region(self, kind: str, region: Region, flat: Tensor) -> None:
        """Put together a rectangle from the parts of the stored ones that are in it."""
        entry = self._tensors[region.hf_name]
        if kind not in entry["kinds"]:
            raise ConfigError(
                f"{self.directory / STATE_INDEX}: no {kind} of tensor {region.hf_name}; was model.dtype another? {_REMEDY}"
            )
        target = flat.view(region.shape)
        filled: list[Rectangle] = []
        for number, start, shape in entry["regions"]:
            shared = _intersection((region.start, region.shape), (tuple(start), tuple(shape)))
            if shared is None:
                continue
            key = region_key(kind, region.hf_name, (tuple(start), tuple(shape)))
            part = self._mapped(self._files[number], key, shape)[_within(shared, start)]
            target[_within(shared, region.start)].copy_(part)
            filled.append((tuple(a - b for a, b in zip(shared[0], region.start, strict=True)), shared[1]))
        self._check_filled(region, filled)

    def _check_values(self, kind: str, region: Region, values: Tensor) -> None:
        low, high = (float(value) for value in values.aminmax())  # both NaN if any is
        if not (math.isfinite(low) and math.isfinite(high)):
            problem = "has values that are not finite"
        elif kind == SECOND_MOMENT and low < 0:
            problem = f"is a mean of squares and has a value of {low:g}"
        else:
            return
        raise ConfigError(f"{self.directory}: {kind} of tensor {region.hf_name} {problem}. {_REMEDY}")

    def _check_filled(self, region: Region, filled: Sequence[Rectangle]) -> None:
        try:
            missing = gaps(region.shape, filled)
        except ValueError as error:
            raise self._damaged(f"tensor {region.hf_name}: some elements are stored twice") from error
        if missing:
            raise self._damaged(f"tensor {region.hf_name}: {sum(prod(box[1]) for box in missing)} elements are missing")

    def _mapped(self, name: str, key: str, shape: Sequence[int]) -> Tensor:
        """A stored rectangle, mapped from the file: what is not looked at is not read."""
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.directory / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"{self.directory / name}: not a readable safetensors file ({error}). {_REMEDY}"
                ) from error
        try:
            found = self._open[name].get_tensor(key)
        except SafetensorError as error:
            raise ConfigError(f"{self.directory / name}: {key} is missing. {_REMEDY}") from error
        if found.dtype != torch.float32 or list(found.shape) != list(shape):
            raise ConfigError(
                f"{self.directory / name}: {key} is {found.dtype} {list(found.shape)}, the index says float32 {shape}. {_REMEDY}"
            )
        return found

    def _check(self) -> None:
        """All that can be said without opening a file of tensors."""
        for name in self._files:
            path = self.directory / name
            if Path(name).name != name or path.resolve().parent != self.directory:
                raise self._damaged(f"file {name!r} is not a plain file in this directory")
            if not path.is_file():
                raise ConfigError(f"{self.directory}: {name} is missing. {_REMEDY}")
        expected = hf_shapes(self._geometry)
        if odd := sorted(expected.keys() ^ self._tensors.keys()):
            problem = "unknown" if odd[0] in self._tensors else "missing"
            raise self._damaged(f"{len(odd)} tensors differ from config.json's, among them {odd[0]} ({problem})")
        for name, shape in expected.items():
            for problem in _problems(self._tensors[name], shape, len(self._files)):
                raise self._damaged(f"tensor {name}: {problem}")

    def _damaged(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.directory / STATE_INDEX}: {problem}. {_REMEDY}")


def _problems(entry: Any, shape: tuple[int, ...], num_files: int) -> Iterator[str]:
    if not isinstance(entry, dict) or entry.keys() != {"shape", "kinds", "regions"}:
        yield "no entry with shape, kinds and regions"
        return
    if entry["shape"] != list(shape):
        yield f"shape {entry['shape']}, but config.json asks for {list(shape)}"
    if not isinstance(entry["kinds"], list) or not set(map(str, entry["kinds"])) <= set(KINDS):
        yield f"kinds {entry['kinds']} are not of {list(KINDS)}"
    if not isinstance(entry["regions"], list):
        yield "regions are no list"
        return
    for region in entry["regions"]:
        if not _is_region(region, shape, num_files):
            yield f"{region} is no region of it"


def _is_region(region: Any, shape: tuple[int, ...], num_files: int) -> bool:
    if not isinstance(region, list) or len(region) != 3:
        return False
    number, start, extent = region
    if type(number) is not int or not 0 <= number < num_files:
        return False
    if not all(isinstance(part, list) and len(part) == len(shape) for part in (start, extent)):
        return False
    whole = all(type(value) is int for value in (*start, *extent))
    return whole and all(a >= 0 and n > 0 and a + n <= size for a, n, size in zip(start, extent, shape, strict=True))


def _read_index(path: Path) -> dict[str, Any]:
    index = read_json(path, limits=INDEX, remedy="choose another checkpoint")
    if set(index) != {"format", "files", "tensors", "scalars"}:
        raise ConfigError(f"{path}: not an index of an optimizer's state. {_REMEDY}")
    if index.integer("format") != _FORMAT:
        raise ConfigError(f"{path}: format {index.integer('format')}, this version reads {_FORMAT}. {_REMEDY}")
    found = {"files": index.texts("files")}
    return {**found, **{key: dict(index.object(key).content) for key in ("tensors", "scalars")}}


def _intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    start = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    end = tuple(min(x + n, y + m) for x, n, y, m in zip(a[0], a[1], b[0], b[1], strict=True))
    if any(low >= high for low, high in zip(start, end, strict=True)):
        return None
    return start, tuple(high - low for low, high in zip(start, end, strict=True))


def _within(rectangle: Rectangle, origin: Sequence[int]) -> tuple[slice, ...]:
    """A rectangle as an index into a tensor whose first element is at ``origin``."""
    return tuple(slice(begin - o, begin - o + size) for begin, size, o in zip(*rectangle, origin, strict=True))
