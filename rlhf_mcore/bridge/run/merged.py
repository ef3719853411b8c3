"""Send a model with adapters: as weights with merged adapters, or as weights and separate adapters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from rlhf_mcore.bridge.map.rules import Block, adapter_names, blocks, hf_shapes
from rlhf_mcore.bridge.run.endpoints import BuiltSources, HostCopies
from rlhf_mcore.families.adapters import B, base_name, hf_module
from rlhf_mcore.geometry import LocalParameter, ModelGeometry
from rlhf_mcore.platform import current_platform

# Rows per product. A vocabulary has many more rows, and its whole fp32 product would be twice as large as the weight.
ROWS = 32768


def adapted_weights(geometry: ModelGeometry) -> list[str]:
    """List the Hugging Face weights that have adapters. Only these change when merged weights are sent."""
    return list(dict.fromkeys(f"{hf_module(name)}.weight" for name in hf_shapes(geometry)))


class _AdapterSources(BuiltSources):
    """Tensors computed from adapters.

    All other tensors are live tensors. With ``keep``, adapters are read as of the last ``take``. Other tensors do
    not change.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        adapters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        *,
        keep: bool = False,
    ):
        """Store this rank's ``parameters`` and ``adapters``. ``geometry`` is the adapters' geometry."""
        super().__init__()
        assert geometry.adapter is not None
        self._sizes = geometry.adapter
        self._tensors = {parameter.name: parameter.tensor for parameter in parameters}
        self._adapters = {parameter.name: parameter.tensor for parameter in adapters}
        self._copies = HostCopies({name: t.view(-1) for name, t in self._adapters.items()}) if keep else None
        tensors = (*self._tensors.values(), *self._adapters.values())
        self.device = next((tensor.device for tensor in tensors), current_platform().device())

    def take(self) -> None:
        """Copy the adapters to the host."""
        if self._copies is not None:
            self._copies.take()

    def _build(self, name: str) -> Tensor:
        return self._make(name).view(-1)

    def _adapter(self, name: str) -> Tensor:
        tensor = self._adapters[name]
        return tensor if self._copies is None else self._copies.read([name])[name].view(tensor.shape)

    @abstractmethod
    def _make(self, name: str) -> Tensor:
        """Compute a tensor to send, or return the live tensor."""


class MergedSources(_AdapterSources):
    """Replace each weight W with adapters by W + scale * B A, or with DoRA by g * (W + scale * B A)."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        adapters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        *,
        keep: bool = False,
        gains: Callable[[], Mapping[str, Tensor]] | None = None,
    ):
        """Extend the base.

        ``gains`` is given with DoRA; it returns g [rows] of this rank's weights by name (collective call).
        """
        super().__init__(parameters, adapters, geometry, keep=keep)
        assert (gains is not None) == self._sizes.use_dora
        self._compute_gains, self._keeps = gains, keep
        self._gains: Mapping[str, Tensor] = {}
        self._blocks = {parameter.name: blocks(parameter.name, geometry, parameter.shard) for parameter in parameters}

    def take(self) -> None:
        super().take()
        if self._keeps and self._compute_gains is not None:
            self._gains = self._compute_gains()

    def prepare(self) -> None:
        if not self._keeps and self._compute_gains is not None:
            self._gains = self._compute_gains()

    def _make(self, name: str) -> Tensor:
        weight = self._tensors[name]
        if not self._blocks[name]:
            return weight
        a, b = (self._adapter(adapter) for adapter in adapter_names(name))
        return merge(weight, a, b, self._blocks[name], self._sizes.scale, self._gains.get(name))


class SeparateAdapterSources(_AdapterSources):
    """Send the unchanged weights, A, and scale * B instead of B, because engines add B A without a scale."""

    def _make(self, name: str) -> Tensor:
        if name in self._tensors:
            return self._tensors[name]
        tensor = self._adapter(name)
        if base_name(name)[1] != B:
            return tensor
        return scale_b(tensor, self._sizes.scale)


@torch.no_grad()
def merge(
    weight: Tensor, a: Tensor, b: Tensor, where: Sequence[Block], scale: float, gain: Tensor | None = None
) -> Tensor:
    """Return a copy of a rank's weight with scale * B A added to its blocks.

    Multiply the rows by ``gain`` [rows], if given.

    The product is computed in fp32, rounded to the weight's dtype and then added, as PEFT's ``merge_and_unload``
    does. So an engine has the same weights as an exported merged model, bit for bit. Rounding the sum once would
    change the last bit. With a gain PEFT rounds once, at the end.
    """
    merged, dtype, rank = weight.clone(), _product_dtype(a), b.shape[1]
    for block in where:
        columns = a[block.a_row : block.a_row + rank].to(dtype)
        for first in range(0, block.count, ROWS):
            count = min(ROWS, block.count - first)
            product = b[block.b_row + first : block.b_row + first + count].to(dtype) @ columns
            rows = slice(block.row + first, block.row + first + count)
            if gain is None:
                merged[rows] += (product * scale).to(weight.dtype)
            else:
                merged[rows] = (gain[rows, None] * (merged[rows] + product * scale)).to(weight.dtype)
    return merged


def scale_b(b: Tensor, scale: float) -> Tensor:
    """Multiply an adapter's scale into its B, for layers that add B A without a scale."""
    return (b.to(_product_dtype(b)) * scale).to(b.dtype)


def _product_dtype(adapter: Tensor) -> torch.dtype:
    return torch.promote_types(adapter.dtype, torch.float32)
