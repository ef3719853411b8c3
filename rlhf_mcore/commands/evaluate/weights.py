"""Weights of a model that is evaluated, handed to the engine tensor by tensor, from whatever format they are in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rlhf_mcore.bridge.files.formats import fsdp, torch_dist
from rlhf_mcore.bridge.files.formats.adapted import AdaptedSource
from rlhf_mcore.bridge.files.formats.checks import checked_types
from rlhf_mcore.bridge.files.formats.source import ModelSource
from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.config.adapter_files import ADAPTER_CONFIG
from rlhf_mcore.config.evaluation import ShardedModel
from rlhf_mcore.config.model_files import read_config, read_geometry
from rlhf_mcore.families.mtp import mtp_tensors
from rlhf_mcore.observability.files import sketch_of_file

RELEASE_BYTES = 2**30  # read, after which mapped pages are given back
_FILES = {"hf": "*.safetensors", "adapter": "adapter_model.safetensors", "fsdp": "model_world_size_*.pt", "megatron": "*.distcp"}


class DirectoryWeights:
    """Those of a Hugging Face directory, but for MTP layers: an engine that samples a token at a time has no place for them."""

    def __init__(self, directory: str):
        self._reader = HFReader(directory)
        self._mtp = set(mtp_tensors(self._reader.names, read_config(directory, directory)))

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return self._reader.names - self._mtp

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._reader.shape(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor whole, in the dtype of the files."""
        return self._reader.tensors(without=self._mtp)


class ShardedWeights:
    """Shards of another trainer, or a model with adapters, as whole tensors: made one at a time, nothing is written.

    Raises:
        ConfigError: shards or adapters are absent or unsafe, or do not make the tensors that config.json asks for.
    """

    def __init__(self, model: ShardedModel):
        directory, files = Path(model.weights), Path(model.files)
        geometry = read_geometry(files)
        if model.format == "adapter":
            self._source: ModelSource = AdaptedSource(directory, files, geometry)
        elif model.format == "fsdp":
            self._source = fsdp.open_fsdp(directory, files, geometry)
        else:
            self._source = torch_dist.open_torch_dist(torch_dist.find_checkpoint(directory), files, geometry)
        types = checked_types(self._source, geometry)
        mtp = set(mtp_tensors(types, read_config(files, str(files)))) if model.format == "adapter" else set()
        self._types = {name: found for name, found in types.items() if name not in mtp}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._types)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._types[name][1]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor whole, in the dtype of the shards."""
        since_release = 0
        for name, (_, shape) in self._types.items():
            tensor = self._source.read(name, 0, shape[0])
            yield name, tensor
            since_release += tensor.nbytes
            if since_release >= RELEASE_BYTES:
                self._source.release()
                since_release = 0


def open_weights(directory: str, sharded: ShardedModel | None) -> DirectoryWeights | ShardedWeights:
    """Open the weights of a Hugging Face directory, or of shards that take their place."""
    return DirectoryWeights(directory) if sharded is None else ShardedWeights(sharded)


def weight_sketches(directory: str | None, sharded: ShardedModel | None = None) -> list[str]:
    """Sketch each weight file, to tell one set of weights from another."""
    if sharded is not None:
        place = Path(sharded.weights)
        directory = str(torch_dist.find_checkpoint(place) if sharded.format == "megatron" else place)
    if directory is None:
        return []
    files = sorted(Path(directory).glob(_FILES[sharded.format if sharded is not None else "hf"]))
    if sharded is not None and sharded.format == "adapter":
        files += [*sorted(Path(sharded.files).glob(_FILES["hf"])), Path(directory) / ADAPTER_CONFIG]
    return [sketch_of_file(file) for file in files]
