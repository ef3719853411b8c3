"""Read an optimizer's state for any layout, and reject states that no optimizer can reach."""

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
from rlhf_mcore.bridge.map.pieces import Rectangle, gaps, whole
from rlhf_mcore.bridge.map.rules import hf_shapes, pieces
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import INDEX, Fields, read_json
from rlhf_mcore.geometry import ModelGeometry, StateShard
from rlhf_mcore.masters import SplitMaster

_REMEDY = "Resume from another checkpoint, or start from the weights alone (model.path)."


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor's entry in an index: its kinds of state, and its rectangles, each with the number of its file."""

    kinds: list[str]
    regions: list[tuple[int, Rectangle]]


class StateReader:
    """Read an optimizer's state for any layout. Only the requested parts are read from disk.

    ``covers`` contains the Hugging Face names of the tensors with state.

    Raises:
        ConfigError: the index belongs to another model, or is damaged. The message names file and tensor.
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
                f"{self._path}: format {version} is not supported; this version reads {FORMAT_OF_ALL} and {FORMAT_OF_SOME}. {_REMEDY}"
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
                f"it covers {len(unknown)} tensors that config.json does not define, among them {unknown[0]}"
            )
        stored = index.object("tensors").content
        if odd := sorted(self.covers ^ stored.keys()):
            problem = "unknown" if odd[0] in stored else "missing"
            source = "config.json" if version == FORMAT_OF_ALL else "its list covers"
            raise self._damage_error(f"{len(odd)} tensors differ from {source}, among them {odd[0]} ({problem})")
        self._tensors = {name: self._parse(name, entry, shapes[name]) for name, entry in stored.items()}

    def check_whole(self) -> None:
        """Check that the files contain both AdamW moments, or momentum, of every tensor, and each element once.

        Only headers are read, not values.

        Raises:
            ConfigError: a moment or an element is missing, or stored twice.
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
        """Yield every stored rectangle: file, kind, Hugging Face name, and place in the tensor."""
        for name, stored in self._tensors.items():
            for kind in stored.kinds:
                for file, rectangle in self.regions_of(name):
                    yield file, kind, name, rectangle

    def read_region(self, file: str, kind: str, name: str, rectangle: Rectangle) -> Tensor:
        """Map a rectangle that ``regions`` lists from its file.

        Raises:
            ConfigError: the rectangle is not in the file that the index names, or has another shape or dtype.
        """
        return self._map(file, region_key(kind, name, rectangle), rectangle.shape)

    def read_into(self, shards: Sequence[StateShard]) -> None:
        """Fill the tensors of ``shards`` in place. Set padding to zero.

        Raises:
            ConfigError: the files do not contain the state, or contain values that no optimizer can reach: a value
                that is not finite, or a negative second moment.
        """
        for shard in shards:
            parts = regions(pieces(shard.name, self._geometry, shard.shard), shard.start, shard.stop)
            for kind, tensor in shard.tensors.items():
                if sum(region.rectangle.numel for region in parts) < tensor.numel():
                    tensor.zero_()
                for region in parts:
                    self._read_region(kind, region, values := region.of(tensor))
                    called = f"{self.directory}: {kind} of tensor {region.hf_name}"
                    if problem := value_problem(called, values.float(), kind == SECOND_MOMENT):
                        raise ConfigError(problem)

    def _read_region(self, kind: str, region: Region, target: Tensor | SplitMaster) -> None:
        """Assemble a rectangle from the stored rectangles that intersect it."""
        name, target_rectangle = region.hf_name, region.rectangle
        if name not in self.covers:
            raise ConfigError(
                f"{self._path}: tensor {name} has no state, because the saved run did not train it. Train the same "
                "parameters, or start from the weights alone (model.path)."
            )
        if kind not in self._tensors[name].kinds:
            raise ConfigError(
                f"{self._path}: tensor {name} has no {kind}; keep model.dtype and the optimizer unchanged. {_REMEDY}"
            )
        filled: list[Rectangle] = []
        for number, stored in self._tensors[name].regions:
            shared = target_rectangle.intersection(stored)
            if shared is not None:
                part = self._map(self._files[number], region_key(kind, name, stored), stored.shape)
                try:
                    target[shared.slices(target_rectangle.start)].copy_(part[shared.slices(stored.start)])
                except ValueError as error:
                    raise self._damage_error(f"tensor {name}: {error}") from error
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
        """Compare a file's header with the index, and return the open file.

        No tensor is mapped, because that would read its first page, and the system would read megabytes ahead.
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
        """Map a stored rectangle from the file. Its pages are read when they are used."""
        return self._check_header(name, key, shape).get_tensor(key)

    def _parse(self, name: str, entry: Any, shape: tuple[int, ...]) -> _StoredTensor:
        """Parse an entry of the index, and check everything that needs no tensor file."""

        def damage_error(problem: str) -> ConfigError:
            return self._damage_error(f"tensor {name}: {problem}")

        if not isinstance(entry, dict) or entry.keys() != {"shape", "kinds", "regions"}:
            raise damage_error("its entry does not consist of shape, kinds and regions")
        kinds, listed = entry["kinds"], entry["regions"]
        if entry["shape"] != list(shape):
            raise damage_error(f"shape {entry['shape']}, but config.json requires {list(shape)}")
        if not isinstance(kinds, list) or not set(map(str, kinds)) <= set(KINDS):
            raise damage_error(f"kinds {kinds} are not all in {list(KINDS)}")
        if not isinstance(listed, list):
            raise damage_error("regions is not a list")
        full, parsed = whole(shape), []
        for region in listed:
            if (rectangle := _rectangle_of(region)) is None or not full.contains(rectangle):
                raise damage_error(f"{region} is not a valid region")
            if type(region[0]) is not int or not 0 <= region[0] < len(self._files):
                raise damage_error(f"{region} is not a valid region")
            parsed.append((region[0], rectangle))
        return _StoredTensor(kinds, parsed)

    def _damage_error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {problem}. {_REMEDY}")


def _rectangle_of(region: Any) -> Rectangle | None:
    """Return the rectangle of a region ``[file, start, shape]`` of an index, or None if it is invalid or empty."""
    if not isinstance(region, list) or len(region) != 3:
        return None
    _, start, shape = region
    if not isinstance(start, list) or not isinstance(shape, list):
        return None
    if not all(type(value) is int for value in (*start, *shape)) or not all(size > 0 for size in shape):
        return None
    return Rectangle(tuple(start), tuple(shape))


def value_problem(name: str, values: Tensor, is_mean_of_squares: bool = False) -> str | None:
    """Describe a value that no training can produce: not finite, or a negative mean of squares.

    Return None without such values.

    ``name`` is the tensor's name in the message.
    """
    low, high = (float(value) for value in values.aminmax())  # both are NaN if any value is NaN
    if not (math.isfinite(low) and math.isfinite(high)):
        return f"{name} has values that are not finite. {_REMEDY}"
    if is_mean_of_squares and low < 0:
        return f"{name} is a mean of squares and has a value of {low:g}. {_REMEDY}"
    return None


def check_scalars(scalars: Fields) -> None:
    """Check that an optimizer and its role can have these counts and this loss scale.

    Raises:
        ConfigError: a value is impossible or missing.
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
        scaler.integer(tracker, minimum=-(2**31))  # Megatron counts hysteresis down, also below zero
