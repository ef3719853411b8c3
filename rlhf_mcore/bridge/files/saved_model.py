"""Check that a run could have saved a checkpoint's model, before it is used."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path

import torch

from rlhf_mcore.bridge.files.file_values import FileValues
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.state_files import MASTER, SECOND_MOMENT, STATE_INDEX, region_key
from rlhf_mcore.bridge.files.state_reader import StateReader, check_scalars, value_problem
from rlhf_mcore.bridge.map.rectangles import Rectangle
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.mtp import num_mtp_layers
from rlhf_mcore.foreign import INDEX, read_json
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.adapter_files import adapted_model, base_model, holds_adapter
from rlhf_mcore.readers.model_files import WEIGHT_DTYPES, read_config, read_geometry

_MAX_THREADS = min(8, os.cpu_count() or 1)


Known = Callable[[Path], FileValues | None]


def check_saved_model(
    weights: Path,
    training: Path | None,
    *,
    values: bool = True,
    base: str | None = None,
    known: Known = lambda path: None,
) -> None:
    """Compare a model's weights and optimizer state with its config.json, and check every value of both.

    Args:
        weights: the Hugging Face directory.
        training: the directory of the optimizer's state; None: the model is not trained.
        values: False compares names, shapes and places only. It reads headers and indexes, but no tensors.
        base: the adapters' model, if the model that they name is not available here.
        known: returns the value check of a file that was read earlier, or None. If it returns None, the tensors
            are read here.

    Raises:
        ConfigError: a tensor is missing, has another shape or is stored twice; a value is not finite; or no
            optimizer could have reached the state. The message names file and tensor.
    """
    if holds_adapter(weights):
        from rlhf_mcore.bridge.files.hf_files import open_adapters

        reader, geometry = open_adapters(weights, adapted_model(weights, base_model(weights, base)))
    else:
        geometry = _trained_geometry(weights, training)
        reader = _open_weights(weights, geometry)
    state = StateReader(training, geometry) if training is not None else None
    if state is not None:
        check_scalars(state.scalars)
        state.check_whole()
    if values:
        _check_values(reader, sorted(hf_shapes(geometry)), state, known)


def _open_weights(weights: Path, geometry: ModelGeometry) -> HFReader:
    reader = HFReader(weights)
    reader.check_index()
    for name, shape in hf_shapes(geometry).items():
        stored = reader.shape(name)
        if stored != shape or reader.dtype(name) not in WEIGHT_DTYPES:
            raise ConfigError(
                f"{weights}: tensor {name} is {reader.dtype(name)} {list(stored)}, but config.json requires {list(shape)} in "
                f"{', '.join(WEIGHT_DTYPES)}; choose another checkpoint"
            )
    return reader


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


def _check_values(reader: HFReader, names: Sequence[str], state: StateReader | None, known: Known) -> None:
    def look_at_weights(name: str) -> str | None:
        called = f"{reader.directory}: tensor {name}"
        if (file := known(reader.directory / reader.shard(name))) is not None:
            return file.problem(called, name)
        whole = (slice(None),) * len(reader.shape(name))
        return value_problem(called, reader.read(name, whole))

    @cache
    def sums_are_equal(name: str) -> bool | None:
        """Compare a whole tensor with all its master weights. Return None if any of them was not read earlier."""
        assert state is not None
        weights = known(reader.directory / reader.shard(name))
        if weights is None or name not in weights.sums:
            return None
        total = -weights.sums[name]
        for file, rectangle in state.regions_of(name):
            part, key = known(state.directory / file), region_key(MASTER, name, rectangle)
            if part is None or key not in part.sums:
                return None
            total += part.sums[key]
        return total % 2**64 == 0

    def is_rounded(file: str, name: str, rectangle: Rectangle) -> bool:
        if (equal := sums_are_equal(name)) is not None:
            return equal
        assert state is not None
        weights = reader.read(name, rectangle.slices((0,) * len(rectangle.shape)))
        return torch.equal(state.read_region(file, MASTER, name, rectangle).to(weights.dtype), weights)

    def look_at_state(file: str, kind: str, name: str, rectangle: Rectangle) -> str | None:
        assert state is not None
        called = f"{reader.directory}: {kind} of tensor {name}"
        if kind == MASTER and not is_rounded(file, name, rectangle):
            return f"{called} does not round to the weights; choose another checkpoint"
        if (part := known(state.directory / file)) is not None:
            return part.problem(called, region_key(kind, name, rectangle))
        return value_problem(called, state.read_region(file, kind, name, rectangle), kind == SECOND_MOMENT)

    with ThreadPoolExecutor(_MAX_THREADS) as pool:
        try:
            of_weights = pool.map(look_at_weights, names)
            stored = pool.map(lambda region: look_at_state(*region), state.regions() if state is not None else ())
            for problem in chain(of_weights, stored):
                if problem is not None:
                    raise ConfigError(problem)
        except BaseException:  # also on Ctrl-C: cancel the reads that have not started
            pool.shutdown(wait=False, cancel_futures=True)
            raise
