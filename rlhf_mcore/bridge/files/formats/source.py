"""Read full Hugging Face tensors for a conversion, a few rows at a time: from a directory, merged with adapters, or averaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import HFReader, open_adapters
from rlhf_mcore.bridge.files.tensor_files import CODES, TensorTypes
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.families import embedding_name, hf_shapes
from rlhf_mcore.families.adapters import EMBEDDING, M, hf_name, hf_names, whole_tensors
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.adapter_files import adapted_modules

BUFFERS = ".rotary_emb.inv_freq"  # computed from the config; old checkpoints also store them


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


class AdaptedSource:
    """A Hugging Face directory with the adapters of a PEFT directory merged into its weights.

    The values equal PEFT's ``merge_and_unload`` on a CPU, bit for bit. B A is computed in fp32, multiplied by the
    scale, added to the weight in fp32, and rounded to the weight's dtype. One whole product is in memory at a
    time, because a product of only some rows may differ in the last bits.

    Args:
        directory: the PEFT directory.
        base: the Hugging Face directory of the base.
        model: geometry of the base, with the head that was used for training the adapters.
        companions: directory with the config.json of that model; None: the base.

    Raises:
        ConfigError: the adapters are damaged, or belong to another model.
    """

    def __init__(self, directory: Path, base: Path, model: ModelGeometry, companions: Path | None = None):
        self.directory, self.companions = directory, companions or base
        self._base = HFSource(base, base)
        self._adapters, geometry = open_adapters(directory, model)
        assert geometry.adapter is not None
        self.types = self._base.types
        self._whole = {name: saved for saved, name in whole_tensors(model).items()}
        if self._whole:  # the base may have another head
            self.types = {name: kind for name, kind in self.types.items() if name in hf_shapes(model)}
            dtype = self.types[embedding_name(model)][0]
            self.types |= {name: (dtype, self._adapters.shape(saved)) for name, saved in self._whole.items()}
        self._scale, self._has_magnitudes = geometry.adapter.scale, geometry.adapter.use_dora
        self._modules = {f"{module}.weight": module for module in adapted_modules(geometry)}
        self._product: tuple[str, Tensor] = ("", torch.empty(0))  # the tensor of the last read, and its product

    def read(self, name: str, first: int, count: int) -> Tensor:
        """Read rows of a tensor, with the adapters added."""
        if name in self._whole:
            rest = (slice(None),) * (len(self.types[name][1]) - 1)
            return self._adapters.read(self._whole[name], (slice(first, first + count), *rest)).to(self.types[name][0])
        rows = self._base.read(name, first, count)
        if name not in self._modules:
            return rows
        if self._product[0] != name:
            a, b = (self._adapters.read(n, (slice(None),) * 2).float() for n in hf_names(self._modules[name]))
            product = (a @ b).t() if self._modules[name] == EMBEDDING else b @ a  # PEFT's order of the factors
            self._product = name, product * self._scale
        if not self._has_magnitudes:
            return rows.clone().add_(self._product[1][first : first + count])
        m = self._adapters.read(hf_name(self._modules[name], M), (slice(first, first + count),))
        return _with_magnitudes(rows, self._product[1][first : first + count], m)

    def origin(self, name: str) -> str:
        """Name the files that contribute to a tensor."""
        if name in self._whole:
            return self._adapters.shard(self._whole[name])
        origin = self._base.origin(name)
        return (
            f"{origin} + {self._adapters.shard(hf_names(self._modules[name])[0])}" if name in self._modules else origin
        )

    def release(self) -> None:
        """Close the files and free the product."""
        self._base.release()
        self._adapters.close()
        self._product = "", torch.empty(0)


def _with_magnitudes(rows: Tensor, product: Tensor, m: Tensor) -> Tensor:
    """Return rows of W + scale * B A with the norms m, as PEFT merges DoRA.

    A 16-bit m is interpreted as in training: see ``contrib/dora``.
    """
    merged = rows + product
    gain = m.float() / torch.linalg.norm(merged, dim=1)
    if m.dtype != torch.float32:
        before = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32)
        gain = gain * (before / before.to(m.dtype))
    return (gain[:, None] * merged).to(rows.dtype)
