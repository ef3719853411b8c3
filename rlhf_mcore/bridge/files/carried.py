"""Copy the tensors of a model's directory that no rank loads into every saved directory of the model."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.tensor_files import CODES, FileShard, ShardFiles, TensorTypes
from rlhf_mcore.bridge.map.rules import hf_shapes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families.mtp import MTP_KEY, REPEATED, mtp_tensors, num_mtp_layers
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.model_files import read_config

_BLOCK_BYTES = 16 * 2**20


class CarriedTensors:
    """The tensors of MTP layers. A model is trained without them, but its directories contain them.

    If ``geometry`` has MTP layers, these are trained. ``copies`` maps the MTP tensors that repeat another tensor
    of the model to that tensor. They are saved with its values.

    Raises:
        ConfigError: a tensor has a dtype that is not supported for weights.
    """

    def __init__(self, directory: str | Path, geometry: ModelGeometry | None = None):
        self.directory = Path(directory)
        self._hf_config = read_config(self.directory, str(directory))
        reader = HFReader(self.directory)
        names, self.copies = mtp_tensors(reader.names, self._hf_config), dict[str, str]()
        self._some = bool(names)
        if geometry is not None and geometry.mtp_layers:
            repeated = {f"model.layers.{i}.{of}": name for i in geometry.mtp_numbers for of, name in REPEATED.items()}
            self.copies = {name: repeated[name] for name in names if name in repeated}
            names = sorted(set(names) - hf_shapes(geometry).keys() - self.copies.keys())
        self.types: TensorTypes = {name: (_dtype(reader, name), reader.shape(name)) for name in names}

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.types.values())

    def text(self, model: str) -> str:
        """Return a note for the user that these layers are not trained. ``model`` is the model's name in checkpoints."""
        count = len(self.types)
        return (
            f"{model}: the MTP layers of {self.directory} ({count} tensors, {self.num_bytes / 1e9:.3g} GB) are not trained; "
            "checkpoints contain unchanged copies"
        )

    @property
    def config_updates(self) -> dict[str, Any]:
        """Keys that differ in a saved config.json.

        If the layers have no tensors, their number becomes 0, as in transformers.
        """
        return {MTP_KEY: 0} if num_mtp_layers(self._hf_config) and not self._some else {}

    def write(self, directory: Path, shard: FileShard) -> Path:
        """Write a file with some of these tensors, make it durable, and return its path.

        The call needs no other rank.

        Raises:
            OSError: writing failed, or the source directory has changed since the run started.
        """
        files = ShardFiles(directory, [shard], self.types)
        try:
            reader = HFReader(self.directory)
            for name in shard.tensors:
                if (_dtype(reader, name), reader.shape(name)) != self.types[name]:
                    raise ConfigError(f"{self.directory}: tensor {name} has changed since the run started")
                for element, part in _blocks(reader, name):
                    files.write(name, part, element)
        except ConfigError as error:  # a failed save is not a configuration error
            raise OSError(str(error)) from error
        finally:
            files.close()
        return directory / shard.name


def _dtype(reader: HFReader, name: str) -> torch.dtype:
    stored = reader.dtype(name)
    for dtype, code in CODES.items():
        if code == stored:
            return dtype
    raise ConfigError(
        f"{reader.directory}: tensor {name} of an MTP layer is {stored}; weights are {', '.join(CODES.values())}. "
        "Use the model before it was quantised."
    )


def _blocks(reader: HFReader, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield the blocks of a tensor, each with the number of its first element."""
    shape = reader.shape(name)
    width = prod(shape[1:])
    step = max(_BLOCK_BYTES // max(4 * width, 1), 1)
    for first in range(0, shape[0], step):
        rest = (slice(None),) * (len(shape) - 1)
        yield first * width, reader.read(name, (slice(first, first + step), *rest)).contiguous()
