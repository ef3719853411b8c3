"""Read full Hugging Face tensors for a conversion, a few rows at a time, from any format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.files.tensor_files import CODES, TensorTypes
from rlhf_mcore.config.errors import ConfigError


class ModelSource(Protocol):
    """A model in some format. Reading is lazy, and ``release`` frees the memory of earlier reads."""

    @property
    def directory(self) -> Path:
        """Return the path of the weights."""

    @property
    def companions(self) -> Path:
        """Return the directory of config.json and the tokenizer."""

    @property
    def types(self) -> TensorTypes:
        """Dtype and shape of every Hugging Face tensor."""

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Read rows ``first`` to ``first + count`` of a tensor [rows, ...]: contiguous, in the format's dtype."""

    def origin(self, name: str) -> str:
        """Return the tensor's place in files, for messages."""

    def release(self) -> None:
        """Free the memory of earlier reads: open files and mapped pages."""


class HFSource:
    """A Hugging Face directory of safetensors.

    Raises:
        ConfigError: a tensor is in two shards, or in a shard but not in the index.
    """

    def __init__(self, directory: Path, companions: Path):
        self.directory, self.companions = directory, companions
        _refuse_pickles(directory)
        self._reader = HFReader(directory)
        self._reader.check_index()
        self.types = {name: (self._dtype(name), self._reader.shape(name)) for name in self._reader.names}

    def _dtype(self, name: str) -> torch.dtype:
        code = self._reader.dtype(name)
        dtype = next((dtype for dtype, name in CODES.items() if name == code), None)
        if dtype is None:
            raise ConfigError(
                f"{self.directory / self._reader.shard(name)}: tensor {name} is {code}; weights are {', '.join(CODES.values())}. "
                "Use the model before it was quantised."
            )
        return dtype

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Read rows of a tensor."""
        rest = (slice(None),) * (len(self.types[name][1]) - 1)
        return self._reader.read(name, (slice(first, first + count), *rest)).contiguous()

    def origin(self, name: str) -> str:
        """Return the name of the tensor's file."""
        return self._reader.shard(name)

    def release(self) -> None:
        """Close the files and unmap their memory."""
        self._reader.close()


def _refuse_pickles(directory: Path) -> None:
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in directory.glob(kind))
    if pickles:
        raise ConfigError(
            f"{directory} holds only {', '.join(pickles[:3])}, which is pickle and is not read; "
            "save the model with safe_serialization=True"
        )


class AverageSource:
    """The mean of several models with the same tensors, accumulated in fp32 and returned in the first model's dtype.

    Raises:
        ConfigError: the models have different tensors.
    """

    def __init__(self, sources: Sequence[ModelSource]):
        self._sources = sources
        self.directory, self.companions = sources[0].directory, sources[0].companions
        self.types = sources[0].types
        for other in sources[1:]:
            shapes = {name: shape for name, (_, shape) in other.types.items()}
            wrong = [name for name, (_, shape) in self.types.items() if shapes.get(name) != shape]
            wrong += [name for name in shapes if name not in self.types]
            if wrong:
                raise ConfigError(
                    f"--average {other.directory}: tensor {wrong[0]} differs from {self.directory}; "
                    "average checkpoints of one model"
                )

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Read rows of the mean. If all models have equal rows, return these rows bit for bit."""
        own = self._sources[0].read(name, first, count)
        total, differ = own.to(torch.float32, copy=True), False
        for other in self._sources[1:]:
            part = other.read(name, first, count)
            total += part.float()
            differ |= part.dtype != own.dtype or not torch.equal(part, own)
        return (total / len(self._sources)).to(self.types[name][0]) if differ else own

    def origin(self, name: str) -> str:
        """Return the tensor's place in every model."""
        return " + ".join(source.origin(name) for source in self._sources)

    def release(self) -> None:
        """Release all models."""
        for source in self._sources:
            source.release()
