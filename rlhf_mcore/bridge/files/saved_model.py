"""Check that a run could have saved a checkpoint's model, before it is used."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_mcore.bridge.files.hf_files import HFReader, open_adapters
from rlhf_mcore.bridge.files.state_files import MASTER, SECOND_MOMENT, STATE_INDEX
from rlhf_mcore.bridge.files.state_reader import StateReader, check_scalars, value_problem
from rlhf_mcore.bridge.map.pieces import Rectangle, whole
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.mtp import num_mtp_layers
from rlhf_mcore.foreign import INDEX, read_json
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.masters import rounds_to
from rlhf_mcore.readers.adapter_files import adapted_model, base_model, holds_adapter
from rlhf_mcore.readers.model_files import WEIGHT_DTYPES, read_config, read_geometry

_MAX_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A tensor of a file: a weight, or a rectangle of the optimizer's state. ``kind`` is "" for a weight."""

    file: Path
    name: str
    rectangle: Rectangle
    kind: str = ""


class SavedModel:
    """A model's weights and optimizer state in a checkpoint.

    Names, shapes and places are compared with config.json when the model is opened. :meth:`find_problem` checks
    the values.

    Args:
        weights: the Hugging Face directory.
        training: the directory of the optimizer's state; None: the model is not trained.
        base: the adapters' model, if the model that they name is not available here.
        check: False skips the comparison, because another process has made it.

    Raises:
        ConfigError: a tensor is missing, has another shape or is stored twice, or no optimizer could have the state's
            counts. The message names file and tensor.
    """

    def __init__(self, weights: Path, training: Path | None, base: str | None = None, *, check: bool = True) -> None:
        if holds_adapter(weights):
            self._reader, geometry = open_adapters(weights, adapted_model(weights, base_model(weights, base)))
        else:
            geometry = _trained_geometry(weights, training)
            self._reader = HFReader(weights)
            if check:
                _check_weights(self._reader, hf_shapes(geometry))
        self._state = StateReader(training, geometry) if training is not None else None
        if self._state is not None and check:
            check_scalars(self._state.scalars)
            self._state.check_whole()
        self.tensors = [
            StoredPiece(self._reader.directory / self._reader.shard(name), name, whole(shape))
            for name, shape in sorted(hf_shapes(geometry).items())
        ]
        if self._state is not None:
            directory = self._state.directory
            self.tensors += [
                StoredPiece(directory / f, name, part, kind) for f, kind, name, part in self._state.regions()
            ]

    def find_problem(self, numbers: Sequence[int]) -> tuple[int, str] | None:
        """Return the first of some ``tensors`` with a value that no run saves: its number, and the problem.

        Such a value is not finite, no optimizer could have reached it, or a master weight does not round to the weight.
        """
        with ThreadPoolExecutor(_MAX_THREADS) as pool:
            try:
                problems = pool.map(lambda number: self._problem(self.tensors[number]), numbers)
                return next(((n, text) for n, text in zip(numbers, problems, strict=True) if text is not None), None)
            finally:  # after the first problem, and on Ctrl-C: cancel the reads that have not started
                pool.shutdown(wait=False, cancel_futures=True)

    def _problem(self, stored: StoredPiece) -> str | None:
        name, kind = stored.name, stored.kind
        if not kind:
            values = self._reader.read(name, stored.rectangle.slices())
            return value_problem(f"{self._reader.directory}: tensor {name}", values)
        assert self._state is not None
        called = f"{self._reader.directory}: {kind} of tensor {name}"
        values = self._state.read_region(stored.file.name, kind, name, stored.rectangle)
        if kind == MASTER:
            weights = self._reader.read(name, stored.rectangle.slices())
            if not rounds_to(values, weights):
                return f"{called} does not round to the weights; choose another checkpoint"
        return value_problem(called, values, kind == SECOND_MOMENT)


def _check_weights(reader: HFReader, shapes: dict[str, tuple[int, ...]]) -> None:
    reader.check_index()
    for name, shape in shapes.items():
        stored = reader.shape(name)
        if stored != shape or reader.dtype(name) not in WEIGHT_DTYPES:
            raise ConfigError(
                f"{reader.directory}: tensor {name} is {reader.dtype(name)} {list(stored)}, but config.json requires {list(shape)} in "
                f"{', '.join(WEIGHT_DTYPES)}; choose another checkpoint"
            )


def _trained_geometry(weights: Path, training: Path | None) -> ModelGeometry:
    """Read the geometry. Include the MTP layers of config.json if the optimizer's index contains one of their tensors."""
    geometry = read_geometry(weights)
    count = num_mtp_layers(read_config(weights, str(weights)))
    if training is None or not count:
        return geometry
    index = read_json(training / STATE_INDEX, limits=INDEX, remedy="choose another checkpoint")
    names = index.object("tensors").content
    first = f"model.layers.{geometry.num_layers}."
    return replace(geometry, mtp_layers=count) if any(name.startswith(first) for name in names) else geometry
