"""Reads the state of an optimizer for any layout, and refuses what no optimizer can have come to."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhf_mcore.bridge.files.state_files import (
    FORMAT_OF_ALL,
    FORMAT_OF_SOME,
    KINDS,
    SECOND_MOMENT,
    STATE_INDEX,
    Region,
    region_key,
    regions,
)
from rlhf_mcore.bridge.map.rectangles import Rectangle, gaps, whole
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, Fields, read_json
from rlhf_mcore.geometry import ModelGeometry, StateShard

_REMEDY = "Resume from another checkpoint, or start from the weights alone (model.path)."


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """Hold what an index knows of one tensor: its kinds of state, and the rectangles, each with the number of its file."""

    kinds: list[str]
    regions: list[tuple[int, Rectangle]]


class StateReader:
    """Reads the state of an optimizer for any layout. Only what is asked for is read from disk.

    ``covers`` are the Hugging Face names of the tensors that have state.

    Raises:
        ConfigError: the index is not that of this model, or damaged; the message names file and tensor.
    """

    def __init__(self, directory: Path, geometry: ModelGeometry):
        self.directory = directory.resolve()
        self._path = self.directory / STATE_INDEX
        self._geometry = geometry
        self._open: dict[str, safe_open] = {}
        index = read_json(self._path, limits=INDEX, remedy="choose another checkpoint")
        if set(index) - {"covers"} != {"format", "files", "tensors", "scalars"}:
            raise ConfigError(f"{self._path}: not an index of an optimizer's state. {_REMEDY}")
        version = index.integer("format")
        if version not in (FORMAT_OF_ALL, FORMAT_OF_SOME):
            raise ConfigError(
                f"{self._path}: format {version}, this version reads {FORMAT_OF_ALL} and {FORMAT_OF_SOME}. {_REMEDY}"
            )
        if ("covers" in index) != (version == FORMAT_OF_SOME):
            raise self._damage_error(f"format {version} {'without' if version == FORMAT_OF_SOME else 'with'} covers")
        self._files = index.texts("files")
        self.scalars = index.object("scalars")
        for name in self._files:
            path = self.directory / name
            if Path(name).name != name or os.path.dirname(os.path.realpath(path)) != str(self.directory):
                raise self._damage_error(f"file {name!r} is not a plain file in this directory")
            if not path.is_file():
                raise ConfigError(f"{self.directory}: {name} is missing. {_REMEDY}")
        shapes = hf_shapes(geometry, trained=True)
        self.covers = frozenset(index.texts("covers") if version == FORMAT_OF_SOME else shapes)
        if unknown := sorted(self.covers - shapes.keys()):
            raise self._damage_error(
                f"it covers {len(unknown)} tensors that are not config.json's, among them {unknown[0]}"
            )
        stored = index.object("tensors").content
        if odd := sorted(self.covers ^ stored.keys()):
            problem = "unknown" if odd[0] in stored else "missing"
            source = "config.json's" if version == FORMAT_OF_ALL else "those that it covers"
            raise self._damage_error(f"{len(odd)} tensors differ from {source}, among them {odd[0]} ({problem})")
        self._tensors = {name: self._parse(name, entry, shapes[name]) for name, entry in stored.items()}

    def check_whole(self) -> None:
        """Check that the files hold both moments of AdamW, or momentum, of every tensor, each element once. Headers are read, no
        values.

        Raises:
            ConfigError: they do not.
        """
        shapes = hf_shapes(self._geometry)
        for name, stored in self._tensors.items():
            kinds = {"momentum"} if "momentum" in stored.kinds else {"exp_avg", SECOND_MOMENT}
            if absent := sorted(kinds - set(stored.kinds)):
                raise self._damage_error(f"tensor {name}: no {absent[0]}")
            self._check_filled(name, shapes[name], [rectangle for _, rectangle in stored.regions])
        for file, kind, name, rectangle in self.regions():
            self._check_header(file, region_key(kind, name, rectangle), rectangle.shape)

    def regions_of(self, name: str) -> list[tuple[str, Rectangle]]:
        """List the stored rectangles of a Hugging Face tensor, each with the name of its file."""
        return [(self._files[number], rectangle) for number, rectangle in self._tensors[name].regions]

    def regions(self) -> Iterator[tuple[str, str, str, Rectangle]]:
        """List every stored rectangle: file, kind, Hugging Face name, place in that tensor."""
        for name, stored in self._tensors.items():
            for kind in stored.kinds:
                for file, rectangle in self.regions_of(name):
                    yield file, kind, name, rectangle

    def read_region(self, file: str, kind: str, name: str, rectangle: Rectangle) -> Tensor:
        """Map a rectangle that ``regions`` lists from its file.

        Raises:
            ConfigError: it is not in the file that the index names, or of another shape or dtype.
        """
        return self._map(file, region_key(kind, name, rectangle), rectangle.shape)

    def read_into(self, shards: Sequence[StateShard]) -> None:
        """Fill the tensors of ``shards`` in place; what is padding becomes zero.

        Raises:
            ConfigError: the files do not hold it, or hold what no optimizer can have come to: a value that is not finite, a second
                moment below zero.
        """
        for shard in shards:
            parts = regions(pieces(shard.name, self._geometry, shard.shard), shard.start, shard.stop)
            for kind, tensor in shard.tensors.items():
                if sum(region.rectangle.numel for region in parts) < tensor.numel():
                    tensor.zero_()
                for region in parts:
                    self._read_region(kind, region, values := region.of(tensor))
                    called = f"{self.directory}: {kind} of tensor {region.hf_name}"
                    if problem := value_problem(called, values, kind == SECOND_MOMENT):
                        raise ConfigError(problem)

    def _read_region(self, kind: str, region: Region, target: Tensor) -> None:
        """Put together a rectangle from the parts of the stored ones that are in it."""
        name, target_rectangle = region.hf_name, region.rectangle
        if name not in self.covers:
            raise ConfigError(
                f"{self._path}: no state of tensor {name}, which the run that wrote it did not train. Train what that run "
                "trained, or start from the weights alone (model.path)."
            )
        if kind not in self._tensors[name].kinds:
            raise ConfigError(
                f"{self._path}: no {kind} of tensor {name}; was model.dtype or the optimizer another? {_REMEDY}"
            )
        filled: list[Rectangle] = []
        for number, stored in self._tensors[name].regions:
            shared = target_rectangle.intersection(stored)
            if shared is not None:
                part = self._map(self._files[number], region_key(kind, name, stored), stored.shape)
                target[shared.slices(target_rectangle.start)].copy_(part[shared.slices(stored.start)])
                filled.append(shared.relative_to(target_rectangle.start))
        self._check_filled(name, target_rectangle.shape, filled)

    def _check_filled(self, name: str, shape: Sequence[int], filled: Sequence[Rectangle]) -> None:
        try:
            missing = gaps(tuple(shape), filled)
        except ValueError as error:
            raise self._damage_error(f"tensor {name}: some elements are stored twice") from error
        if missing:
            raise self._damage_error(f"tensor {name}: {sum(box.numel for box in missing)} elements are missing")

    def _check_header(self, name: str, key: str, shape: Sequence[int]) -> safe_open:
        """Compare the header of a file with the index, and return the open file.

        No tensor is mapped: that would read its first page, and the system would read megabytes ahead.
        """
        path = self.directory / name
        if name not in self._open:
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: not a readable safetensors file ({error}). {_REMEDY}") from error
        try:
            stored = self._open[name].get_slice(key)
        except SafetensorError as error:
            raise ConfigError(f"{path}: {key} is missing. {_REMEDY}") from error
        if stored.get_dtype() != "F32" or stored.get_shape() != list(shape):
            tensor = self._open[name].get_tensor(key)
            raise ConfigError(
                f"{path}: {key} is {tensor.dtype} {list(tensor.shape)}, but float32 {list(shape)} in the index. {_REMEDY}"
            )
        return self._open[name]

    def _map(self, name: str, key: str, shape: Sequence[int]) -> Tensor:
        """Map a stored rectangle from the file: pages are read when they are used."""
        return self._check_header(name, key, shape).get_tensor(key)

    def _parse(self, name: str, entry: Any, shape: tuple[int, ...]) -> _StoredTensor:
        """Parse an entry of the index, and check all of it that needs no file of tensors."""

        def damaged(problem: str) -> ConfigError:
            return self._damage_error(f"tensor {name}: {problem}")

        if not isinstance(entry, dict) or entry.keys() != {"shape", "kinds", "regions"}:
            raise damaged("no entry with shape, kinds and regions")
        kinds, listed = entry["kinds"], entry["regions"]
        if entry["shape"] != list(shape):
            raise damaged(f"shape {entry['shape']}, but config.json asks for {list(shape)}")
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= set(KINDS):
            raise damaged(f"kinds {kinds} are not of {list(KINDS)}")
        if not isinstance(listed, list):
            raise damaged("regions are no list")
        full, parsed = whole(shape), []
        for region in listed:
            if (rectangle := _rectangle_of(region)) is None or not full.contains(rectangle):
                raise damaged(f"{region} is no region of it")
            if type(region[0]) is not int or not 0 <= region[0] < len(self._files):
                raise damaged(f"{region} is no region of it")
            parsed.append((region[0], rectangle))
        return _StoredTensor(kinds, parsed)

    def _damage_error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {problem}. {_REMEDY}")


def _rectangle_of(region: Any) -> Rectangle | None:
    """Return the rectangle of a region ``[file, start, shape]`` of an index, or None where it is none, or empty."""
    if not isinstance(region, list) or len(region) != 3:
        return None
    _, start, shape = region
    if not isinstance(start, list) or not isinstance(shape, list):
        return None
    if not all(type(value) is int for value in (*start, *shape)) or not all(size > 0 for size in shape):
        return None
    return Rectangle(tuple(start), tuple(shape))


def value_problem(name: str, values: Tensor, is_mean_of_squares: bool = False) -> str | None:
    """Describe a value to which no training can come: not finite, or a mean of squares below zero. Returns None where all are
    possible.

    ``name``: what the message calls the tensor.
    """
    low, high = (float(value) for value in values.aminmax())  # both NaN if any is
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{name} has values that are not finite. {_REMEDY}"
    if is_mean_of_squares and low < 0:
        return f"{name} is a mean of squares and has a value of {low:g}. {_REMEDY}"
    return None


def check_scalars(scalars: Fields) -> None:
    """Check that an optimizer and its role can have these counts and this loss scale.

    Raises:
        ConfigError: they cannot, or one of them is missing.
    """
    expected = {"step", "loss_scale", "num_updates", "num_bad_updates"}
    if set(scalars) != expected:
        raise ConfigError(f"{scalars.where}: scalars {sorted(scalars)}, expected {sorted(expected)}. {_REMEDY}")
    step, updates, _ = map(scalars.integer, ("step", "num_updates", "num_bad_updates"))
    if step > updates:
        raise ConfigError(f"{scalars.where}: Adam's step={step} is more than num_updates={updates}. {_REMEDY}")
    scaler = scalars.object("loss_scale", None)
    if scaler is None:
        return
    if set(scaler) != {"scale", "growth_tracker", "hysteresis_tracker"}:
        raise scalars.wrong("loss_scale", "an object with scale, growth_tracker and hysteresis_tracker")
    if scaler.number("scale") <= 0:
        raise scaler.wrong("scale", "a positive number")
    for tracker in ("growth_tracker", "hysteresis_tracker"):
        scaler.integer(tracker, minimum=-(2**31))  # Megatron counts hysteresis down, below zero too
