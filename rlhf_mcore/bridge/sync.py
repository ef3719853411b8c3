"""The weights' way from a trained model to the rollout engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_mcore.bridge.coverage import check_coverage
from rlhf_mcore.bridge.describe import describe_destinations, describe_sources, wire_dtypes
from rlhf_mcore.bridge.execute import Executor
from rlhf_mcore.bridge.landing import EngineLanding
from rlhf_mcore.bridge.places import Place
from rlhf_mcore.bridge.plan import Plan, build_plan
from rlhf_mcore.bridge.regions import Piece
from rlhf_mcore.bridge.rules import hf_shapes, pieces
from rlhf_mcore.bridge.sources import spread_order
from rlhf_mcore.bridge.trace import EngineMap, EngineParameter, trace
from rlhf_mcore.bridge.transfer import Gatherer
from rlhf_mcore.bridge.verify import SyncMismatch, compare, piece_digest, tensor_digests
from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.protocols import RolloutEngine, SyncStats
from rlhf_mcore.types import LocalParameter, ModelGeometry


@dataclass(slots=True)
class GatherBridge:
    """The plain bridge: every rank gathers every full tensor, one at a time, and the engine cuts its part out again."""

    gatherer: Gatherer
    engine: RolloutEngine

    def sync(self, version: int) -> SyncStats:
        """Replace all weights of the engine and say which version they are. Collective over the model's ranks."""
        started, sizes = time.perf_counter(), [0]

        def counted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.gatherer:
                sizes.append(tensor.numel() * tensor.element_size())
                yield name, tensor

        self.engine.load_weights(counted(), version=version)
        return SyncStats(time.perf_counter() - started, sum(sizes), 0, max(sizes))


@dataclass(slots=True)
class _Sides:
    """Descriptions of both sides, the same on every rank."""

    sources: list[Place]
    destinations: list[Place]
    shapes: Mapping[str, tuple[int, ...]]
    engine_dtypes: Mapping[str, torch.dtype]


class PlannedBridge:
    """The planned bridge: every byte goes straight from where it lies to its place in the fused parameters of an engine.

    Nothing is gathered and no Hugging Face tensor is built. The plan is made once and its digest agreed on by all ranks.

    Args:
        parameters: the trained tensors of this rank.
        geometry: of the model.
        engine: this rank's part of a rollout engine.
        bucket_bytes: limit of what a rank sends, and of what it receives, at a time; two buckets are in flight.
        verify: "off", or "digest": hash every tensor on both sides after every sync.
        poison: fill the engine with NaN before each sync (a test mode: what is not written shows).
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        engine: RolloutEngine,
        *,
        bucket_bytes: int,
        verify: str = "off",
        poison: bool = False,
    ):
        def pieces_of(parameter: LocalParameter) -> Sequence[Piece]:
            return pieces(parameter.name, geometry, parameter.shard)

        shapes = hf_shapes(geometry)
        self._engine, self._verify, self._poison = engine, verify, poison
        self._map = engine_map(engine.model, shapes)
        dtypes = wire_dtypes(parameters, pieces_of)
        self._sides = _Sides(
            describe_sources(parameters, pieces_of), describe_destinations(self._map), shapes, self._engine_dtypes()
        )
        check_coverage(self._sides.sources, self._sides.destinations, shapes)
        self.plan = build_plan(
            self._sides.sources,
            self._sides.destinations,
            element_sizes={name: dtype.itemsize for name, dtype in dtypes.items()},
            bucket_bytes=bucket_bytes,
            # With live parameters all stages may send at once; a repacked layer has to come whole before the next ones.
            order=spread_order(list(shapes), self._sides.sources, keep_layers=bool(self._map.repacked)),
        )
        _agree(self.plan)
        self.rank_plan = self.plan.rank_view(dist.get_rank())
        self._flats = {parameter.name: parameter.tensor.view(-1) for parameter in parameters}
        self._executor = Executor(self.rank_plan, self._flats, dtypes)

    def _engine_dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which the engines hold each Hugging Face tensor. Collective."""
        mine = {
            piece.hf_name: str(parameter.dtype).removeprefix("torch.")
            for parameter in self._map.parameters
            for piece in parameter.pieces
        }
        return {name: getattr(torch, dtype) for part in all_gather_json(mine) for name, dtype in part.items()}

    def sync(self, version: int) -> SyncStats:
        """Write all weights into the engine and say which version they are. Collective over the world.

        Raises:
            SyncMismatch: with ``verify``, a tensor is not the trainer's. The engine stays unusable.
        """
        started = time.perf_counter()
        digests: dict[str, list[int]] = {}
        with self._engine.updating(version=version) as model:
            landing = EngineLanding(
                model, self._map, self.rank_plan, poison=self._poison, written=self._hasher(digests)
            )
            try:
                self._executor.run(landing)
                landing.finish()
            except BaseException:
                landing.abandon()
                raise
            if self._verify == "digest":
                self._compare(digests)
        plan = self.rank_plan
        return SyncStats(
            time.perf_counter() - started, plan.received_bytes, plan.local_bytes, self._executor.peak_bytes
        )

    def _hasher(self, digests: dict[str, list[int]]):  # type: ignore[no-untyped-def]
        if self._verify != "digest":
            return None

        def written(parameter: EngineParameter, flat: Tensor) -> None:
            digests[parameter.name] = [self._digest(flat, piece) for piece in parameter.pieces]

        return written

    def _digest(self, flat: Tensor, piece: Piece) -> int:
        sides = self._sides
        return piece_digest(flat, piece, sides.shapes[piece.hf_name], sides.engine_dtypes[piece.hf_name])

    def source_digests(self) -> dict[str, int]:
        """Hash of every Hugging Face tensor as the trainer holds it, in the engine's dtype. Collective over the world."""
        sides, rank = self._sides, dist.get_rank()
        mine = [
            self._digest(self._flats[place.buffer], piece)
            for place in sides.sources
            if rank in place.ranks
            for piece in place.pieces
        ]
        return tensor_digests(mine, sides.sources, sides.shapes)

    def _compare(self, digests: Mapping[str, list[int]]) -> None:
        sides, rank = self._sides, dist.get_rank()
        theirs = [value for place in sides.destinations if rank in place.ranks for value in digests[place.buffer]]
        compare(self.source_digests(), tensor_digests(theirs, sides.destinations, sides.shapes))


def engine_map(model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> EngineMap:
    """What the live model of an engine holds: traced from vLLM's loaders, or, for a transformers model, every tensor as it is."""
    if not hasattr(model, "load_weights"):
        return EngineMap(
            tuple(
                EngineParameter(name, tuple(p.shape), p.dtype, (_whole(name, tuple(p.shape)),))
                for name, p in model.named_parameters()
            )
        )
    return trace(model, shapes)


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    strides = torch.empty(shape, device="meta").stride()
    return Piece(name, (0,) * len(shape), shape, 0, tuple(strides))


def _agree(plan: Plan) -> None:
    digests = all_gather_json(plan.digest)
    if len(set(digests)) > 1:
        raise SyncMismatch(f"the ranks have made different plans: {sorted(set(digests))}")
