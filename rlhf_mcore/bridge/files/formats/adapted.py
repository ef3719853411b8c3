"""Read a model with adapters as whole tensors: the base weights with adapters merged as PEFT merges them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rlhf_mcore.bridge.files.formats.source import HFSource
from rlhf_mcore.bridge.files.hf_files import open_adapters
from rlhf_mcore.families import embedding_name, hf_shapes
from rlhf_mcore.families.adapters import EMBEDDING, M, hf_name, hf_names, whole_tensors
from rlhf_mcore.geometry import ModelGeometry
from rlhf_mcore.readers.adapter_files import adapted_modules


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

    @property
    def adapted(self) -> list[str]:
        """Names of the tensors that have an adapter."""
        return list(self._modules)

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
