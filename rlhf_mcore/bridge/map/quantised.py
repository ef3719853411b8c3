"""Map sent tensors and engine tensors when a sync quantises weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rules import Shapes
from rlhf_mcore.bridge.map.scales import SCALES, are_quantised, num_scales, scale_pieces
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.families.quantised import QUANTISATIONS, Quantisation
from rlhf_mcore.families.quantised import quantisation as quantisation_of
from rlhf_mcore.geometry import LocalParameter


class Names(Protocol):
    """Names and pieces of the sent tensors before quantisation."""

    def shapes(self) -> Shapes: ...
    def pieces(self, parameter: LocalParameter) -> Sequence[Piece]: ...


class QuantisedNames:
    """Names and pieces of the sent tensors after quantisation: 8-bit weights and their scales."""

    def __init__(self, names: Names, quantisation: str) -> None:
        self.kind = quantisation_of(quantisation)
        self._names, self._shapes = names, names.shapes()

    def shapes(self) -> Shapes:
        return self.kind.with_scales(self._shapes)

    def pieces(self, parameter: LocalParameter) -> Sequence[Piece]:
        if parameter.name.endswith(SCALES):
            weight = replace(parameter, name=parameter.name.removesuffix(SCALES))
            return scale_pieces(self._names.pieces(weight), self.kind)
        return self._names.pieces(parameter)

    def sent(self, parameters: Sequence[LocalParameter]) -> list[LocalParameter]:
        """Describe the sent tensors of a rank. Quantised weights and their scales are meta tensors."""
        sent = []
        for parameter in parameters:
            pieces = self.pieces(parameter)
            if not are_quantised(pieces, self.kind):
                sent.append(parameter)
                continue
            weight = torch.empty(parameter.tensor.shape, dtype=getattr(torch, self.kind.dtype), device="meta")
            scales = torch.empty(num_scales(pieces, self.kind), dtype=torch.float32, device="meta")
            sent.append(replace(parameter, tensor=weight))
            sent.append(replace(parameter, name=parameter.name + SCALES, tensor=scales))
        return sent

    def cut(self, sources: Sequence[Place]) -> list[str]:
        """Name the tensors with blocks that no single rank holds whole, in network order."""
        # Pieces cover each tensor: if one piece ends within a block, another piece begins within it.
        starts = {(piece.hf_name, piece.start) for place in sources for piece in place.pieces}
        begun = {name for name, start in starts if self.kind.applies(name) and self._is_within(start)}
        return [name for name in self._shapes if name in begun]

    def _is_within(self, start: tuple[int, ...]) -> bool:
        """Return whether a rectangle of a tensor begins within a block."""
        return any(begin % size for begin, size in zip(start, self.kind.block, strict=True))


@dataclass(frozen=True)
class DequantisedMap(EngineMap):
    """The map of an engine that cannot multiply in 8 bits.

    A sync writes 8-bit weights and their scales into temporary tensors, in addition to ``live``, the engine's own
    map. The other parameters of a layer that is reloaded whole also get temporary tensors.
    """

    live: EngineMap = field(default_factory=lambda: EngineMap(()))
    kind: Quantisation = QUANTISATIONS["fp8"]

    @cached_property
    def extra_names(self) -> frozenset[str]:
        """Names of the temporary tensors."""
        as_before = {*self.live.direct}
        return frozenset(parameter.name for parameter in self.direct if parameter not in as_before)

    @property
    def together(self) -> list[list[str]]:
        """Extend the base: a tensor and its scales are also sent together."""
        names = {piece.hf_name for p in self.parameters for piece in p.pieces if self.kind.applies(piece.hf_name)}
        return [*self.live.together, *([name, name + self.kind.suffix] for name in sorted(names))]

    def views(self, model: nn.Module) -> dict[str, Tensor]:
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        made = {
            p.name: torch.empty(prod(p.shape), dtype=p.dtype, device=device)
            for p in self.direct
            if p.name in self.extra_names
        }
        live = self.live.views(model)
        return {p.name: live[p.name] for p in self.direct if p.name not in self.extra_names} | made


def dequantised_map(live: EngineMap, kind: Quantisation) -> DequantisedMap:
    """Describe the sync's destinations for an engine that converts 8-bit values to a larger dtype."""
    quantised = {p.name for p in live.parameters if are_quantised(p.pieces, kind)}
    layers = {p.module for p in live.parameters if p.repacked and p.name in quantised}
    brought = []
    for parameter in live.parameters:
        if parameter.name in quantised:
            pieces, count = scale_pieces(parameter.pieces, kind), num_scales(parameter.pieces, kind)
            dtype = getattr(torch, kind.dtype)
            brought.append(replace(parameter, dtype=dtype, repacked="", aliases=()))
            brought.append(EngineParameter(parameter.name + SCALES, (count,), torch.float32, pieces))
        else:
            is_beside = parameter.repacked and parameter.module in layers
            brought.append(replace(parameter, repacked="") if is_beside else parameter)
    return DequantisedMap(tuple(brought), live.unused, live.derived, live, kind)
