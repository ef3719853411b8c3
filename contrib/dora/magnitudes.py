"""The magnitudes of DoRA (Liu et al. 2024, arXiv 2402.09353): y = g * (W x + scale * B A x) + bias, with g = m / |W + scale * B A|.

The norms are row norms and have no gradient (section 4.3 of the paper, and PEFT). m is the parameter ``lora_m`` of a layer, in the row
order of ``lora_b``. If ranks split W's inputs, each rank holds a part of every row, and the ranks sum the squares.

A 16-bit m starts as the rounded |W|, so m / |W| would differ from 1 by up to 0.4 %. This rounding is compensated, so that a run starts
with the unchanged model. In fp32 nothing is rounded, and g equals PEFT's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf_mcore.bridge.files.hf_files import HFReader
from rlhf_mcore.bridge.map.pieces import view
from rlhf_mcore.bridge.map.rules import pieces
from rlhf_mcore.families.adapters import M, base_name, hf_module, is_trained_whole
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.mcore.lora import MatrixRows
from rlhf_mcore.mcore.weights import global_names, unwrap


class Magnitudes:
    """The magnitudes of a layer with A and B."""

    def __init__(
        self,
        layer: Any,
        matrices: Sequence[MatrixRows],
        sizes: AdapterSizes,
        group: dist.ProcessGroup | None,
    ):
        """Add the parameter m to the layer, with undefined values. ``group``: the ranks that split the layer's inputs, or None."""
        self._layer, self._sizes, self._group = layer, sizes, group
        self._spans = [(matrix.a_row, len(matrix.rows)) for matrix in matrices]
        self._covers = [row for matrix in matrices for row in matrix.rows] == list(range(layer.weight.size(0)))
        b = layer.lora_b
        m = torch.nn.Parameter(b.new_empty(b.size(0)))
        for mark in ("sequence_parallel", "allreduce", "tensor_model_parallel", "partition_dim", "partition_stride"):
            if hasattr(b, mark):
                setattr(m, mark, getattr(b, mark))
        layer.register_parameter("lora_m", m)
        object.__setattr__(layer, "lora_magnitudes", self)

    def scale(self, y: Tensor, bias: Tensor | None, added: Tensor) -> Tensor:
        """Return the layer's output with its magnitudes.

        Args:
            y: output of the layer without adapters [..., out]. It includes the layer's bias, unless ``bias`` is given.
            bias: the bias if it is added later, or None.
            added: output of A and B for the rows with adapters.
        """
        rows, own = self._layer.lora_rows, getattr(self._layer, "bias", None)
        product = y if self._covers else y.index_select(-1, rows)
        inside = None if own is None or own.numel() == 0 or bias is not None else own.index_select(0, rows)
        if inside is not None:
            product = product - inside
        scaled = ((product + added) * self.gain()).to(y.dtype)
        if inside is not None:
            scaled = scaled + inside
        return scaled if self._covers else y.index_copy(-1, rows, scaled)

    def gain(self) -> Tensor:
        """Compute g [rows] in fp32 for the rows ``lora_rows`` of the weight. Collective if ranks split the inputs."""
        return self._layer.lora_m.index_select(0, self._layer.lora_b_order) * self._per_magnitude()

    @torch.no_grad()
    def _per_magnitude(self) -> Tensor:
        """Return the factor for m: 1 / |W + scale * B A|, times |W| over the rounded |W|.

        |W + scale * B A|^2 is the sum of |W|^2, |scale * B A|^2 and twice the inner product of both. No matrix of W's size is built.
        """
        layer, scale, rank = self._layer, self._sizes.scale, self._sizes.rank
        a = layer.lora_a.float()
        b = layer.lora_b.index_select(0, layer.lora_b_order).float()
        before = (
            torch.linalg.vector_norm(layer.weight, dim=1, dtype=torch.float32).square().index_select(0, layer.lora_rows)
        )
        products = (layer.weight @ layer.lora_a.t()).float().index_select(0, layer.lora_rows)
        counts, sums = [count for _, count in self._spans], []
        for (first, _), part, of_weight in zip(self._spans, b.split(counts), products.split(counts), strict=True):
            own = a[first : first + rank]
            crossed = of_weight[:, first : first + rank] * (2 * scale) + part @ (own @ own.t()) * scale**2
            sums.append((part * crossed).sum(1))
        squares = torch.stack([before, before + torch.cat(sums)])
        if self._group is not None and self._group.size() > 1:
            dist.all_reduce(squares, group=self._group)
        norms = squares.sqrt()
        return norms[0] / norms[0].to(layer.lora_m.dtype).float() / norms[1]


def gains(chunks: Iterable[torch.nn.Module]) -> dict[str, Tensor]:
    """Compute g [out of this rank] in fp32 for every weight with magnitudes, by global name. Rows without magnitudes get 1.

    Collective over the ranks of the model.
    """
    result = {}
    for chunk in map(unwrap, chunks):
        for name, full_name, _ in list(global_names(chunk)):
            if name.endswith(".lora_m"):
                layer: Any = chunk.get_submodule(name.removesuffix(".lora_m"))
                whole = torch.ones(layer.weight.size(0), device=layer.weight.device)
                whole[layer.lora_rows] = layer.lora_magnitudes.gain().detach()
                result[f"{full_name.removesuffix('.lora_m')}.weight"] = whole
    return result


def begin_with_norms(parameters: Iterable[LocalParameter], geometry: ModelGeometry, base: str | Path) -> None:
    """Fill this rank's magnitudes from the weights of ``base``, using whole rows. The values do not depend on the layout."""
    reader = HFReader(base)
    for parameter in parameters:
        if is_trained_whole(parameter.name, geometry) or base_name(parameter.name)[1] != M:
            continue
        for piece in pieces(parameter.name, geometry, parameter.shard):
            # Use the weights in the dtype of the model. A file may be more precise, and its norms would round differently.
            rows = reader.read(f"{hf_module(piece.hf_name)}.weight", (*piece.slices, slice(None))).to(
                parameter.tensor.dtype
            )
            view(parameter.tensor, piece).copy_(torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    reader.close()
