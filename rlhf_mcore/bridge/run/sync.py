"""Send weights from a trained model to the rollout engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_mcore.bridge.map.coverage import check_coverage, describe_destinations, describe_sources, wire_dtypes
from rlhf_mcore.bridge.map.engine import Weights, map_engine
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.quantised import QuantisedNames, SentNames
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from rlhf_mcore.bridge.plan.rank_plan import RankPlan
from rlhf_mcore.bridge.run.endpoints import EngineDestinations, KeptSources, LiveSources, Sources
from rlhf_mcore.bridge.run.execute import Executor
from rlhf_mcore.bridge.run.quantised import QuantisedSources
from rlhf_mcore.bridge.run.transports import ChangedMessages, GroupLinks, Links
from rlhf_mcore.bridge.run.verify import compare, piece_digest, tensor_digests
from rlhf_mcore.families import embedding_name
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_unique_json
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.protocols import LiveWeights, SyncMismatch, SyncStats


@dataclass(frozen=True, slots=True)
class SentWeights:
    """The weights that a sync sends, and this rank's part of them.

    Args:
        parameters: this rank's parameters in the dtypes of the wire; empty on a rank without a part of the model.
            Their own tensors are sent unless ``sources`` is given. With ``sources`` they may be on the meta
            device.
        geometry: the model's geometry, including its MTP layers if the engine drafts with trained layers.
        sources: tensors to send instead of the parameters' own, with the same names and shapes: merged with
            adapters, averaged or cast.
        adapter: sizes of adapters, for an engine that applies adapters itself. ``parameters`` contains their A and
            B, which are sent under PEFT's names.
        quantisation: the name in ``QUANTISATIONS`` of the format to which the sync quantises weights.
        changing: Hugging Face names of the tensors that training changes; None: all. Only these are sent to engines
            that hold the others.
    """

    parameters: Sequence[LocalParameter]
    geometry: ModelGeometry
    sources: Sources | None = None
    adapter: AdapterSizes | None = None
    quantisation: str | None = None
    changing: Sequence[str] | None = None

    def names(self) -> SentNames:
        """Return names and pieces of the sent tensors before quantisation."""
        return SentNames(self.geometry, self.adapter)


class NoTarget:
    """Placeholder for the engine on a rank without one. The rank only sends weights to others."""

    policy_version = 0

    def __init__(self) -> None:
        self.model = nn.Module()

    @contextmanager
    def begin(self, version: int) -> Iterator[nn.Module]:
        yield self.model

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None: ...

    def abandon(self, problem: str) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """The destination of a sync: this rank's part of a rollout engine.

    Args:
        target: the engine, or a ``NoTarget`` on a rank without an engine.
        weights: how the engine's kind declares its weights.
        traced: the map of its model (:func:`map_engine`), if it was built earlier. An engine that has slept cannot
            be traced, because it has lost its weights.
        poison: fill the weights with NaN before each sync, to expose elements that are not written (a test mode).
    """

    target: LiveWeights
    weights: Weights = "plain"
    traced: EngineMap | None = None
    poison: bool = False

    def map(self, sent: SentWeights) -> EngineMap:
        """Return the map of the model."""
        if self.traced is not None:
            return self.traced
        has_adapters = sent.adapter is not None and self.weights == "loaders"
        return map_engine(
            self.target.model,
            sent.names().shapes(),
            self.weights,
            has_adapters=has_adapters,
            quantisation=sent.quantisation,
        )


@dataclass(frozen=True, slots=True)
class ChangedOnly:
    """Send only changed elements, with the plug-in ``delta_sync``.

    ``full_every`` is the interval in syncs at which everything is sent. ``previous`` contains the values that were
    sent last; it is None on a rank that sends nothing.
    """

    full_every: int
    previous: KeptSources | None = None

    def build(self, links: Links, device: torch.device) -> ChangedMessages:
        """Build the messages of one plan."""
        make = load_plugin("transports", "delta_sync", f"bridge.full_every={self.full_every}")
        changes: ChangedMessages = make(links, self.previous, self.full_every, device)
        return changes


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """Options for sending weights.

    Args:
        bucket_bytes: limit of the bytes that a rank sends per bucket. The same limit applies to received bytes.
            Two buckets are in flight.
        verify: hash every tensor on both sides after every sync.
        nodes: the machine number of every rank in the group, if there are several machines. Data is then sent to
            each machine once and forwarded inside the machine.
        changed_only: send only changed elements; None: every sync sends everything.
        make_links: build the links of a plan over a group. This is a collective call over the group.
    """

    bucket_bytes: int
    verify: bool = False
    nodes: Sequence[int] | None = None
    changed_only: ChangedOnly | None = None
    make_links: Callable[[dist.ProcessGroup], Links] = GroupLinks


@dataclass(slots=True)
class _Descriptions:
    """The tensors that all ranks hold and need, equal on every rank."""

    sources: list[Place]
    destinations: list[Place]
    shapes: Mapping[str, tuple[int, ...]]
    engine_dtypes: Mapping[str, torch.dtype]

    def digest(self, flat: Tensor, piece: Piece) -> Tensor:
        """Hash a piece of a local tensor in the engines' dtype. The digest is on the tensor's device."""
        return piece_digest(flat, piece, self.shapes[piece.hf_name], self.engine_dtypes[piece.hf_name])


@dataclass(slots=True)
class _Transfer:
    """A plan that this rank can run. ``names`` contains the tensors that it transfers; None: all."""

    plan: Plan
    rank_plan: RankPlan
    executor: Executor
    names: frozenset[str] | None
    changes: ChangedMessages | None

    def brings(self, piece: Piece) -> bool:
        return self.names is None or piece.hf_name in self.names

    def stats(self, seconds: float) -> SyncStats:
        """Return the bytes that the last run transferred on this rank."""
        plan = self.rank_plan
        whole = SyncStats(seconds, plan.received_bytes, plan.local_bytes, self.executor.peak_bytes, plan.sent_bytes)
        if self.changes is None:
            return whole
        moved = self.changes.moved
        return replace(
            whole,
            received_bytes=plan.received_bytes - moved.planned_received + moved.received,
            sent_bytes=plan.sent_bytes - moved.planned_sent + moved.sent,
            whole_bytes=plan.sent_bytes,
        )


class _ElementsLost(Exception):
    """An engine lost elements of earlier syncs, so sending only changes does not restore the trainer's weights."""


class PlannedBridge:
    """Copy every byte directly from its source tensor to its place in an engine's fused parameters.

    No tensor is gathered, and no Hugging Face tensor is built. The plan is built once, and all ranks compare its
    digest. ``group`` contains the ranks that hold the model or an engine. All methods are collective over it.
    """

    def __init__(
        self, sent: SentWeights, engine: EngineWeights, group: dist.ProcessGroup, options: SyncOptions
    ) -> None:
        self._engine, self._group, self._options = engine, group, options
        self._map = engine.map(sent)
        self._changed_only = options.changed_only
        names: SentNames | QuantisedNames = sent.names()
        parameters, engine_dtypes = sent.parameters, self._engine_dtypes()
        of_8_bits = None if sent.quantisation is None else QuantisedNames(sent.names(), sent.quantisation)
        stores_8_bits = of_8_bits is not None and getattr(torch, of_8_bits.kind.dtype) in engine_dtypes.values()
        if of_8_bits is not None and stores_8_bits:
            names, parameters = of_8_bits, of_8_bits.describe_sent(parameters)
        pieces_of, shapes = names.pieces, names.shapes()
        self._aliases = {"lm_head.weight": embedding_name(sent.geometry)} if sent.geometry.tied_embeddings else {}
        self._last: _Transfer | None = None  # the transfer whose values the receivers hold
        self._dtypes = wire_dtypes(parameters, pieces_of, group)
        self._described = _Descriptions(
            describe_sources(parameters, pieces_of, group),
            describe_destinations(self._map, group),
            shapes,
            engine_dtypes,
        )
        check_coverage(self._described.sources, self._described.destinations, shapes)
        # Tensors of one repacked layer must be sent together. Repacked layers may differ between ranks.
        together = all_gather_unique_json(self._map.together, group)
        self._together = [frozenset(layer) for layers, _ in together for layer in layers]
        self._sources = sent.sources or LiveSources({p.name: p.tensor.view(-1) for p in sent.parameters})
        if of_8_bits is not None:
            previous = None if self._changed_only is None else self._changed_only.previous
            places = self._described.sources
            eight = QuantisedSources(
                self._sources, sent.parameters, of_8_bits, places, group, previous, dequantises=not stores_8_bits
            )
            self._sources = eight
            if self._changed_only is not None:
                self._changed_only = replace(self._changed_only, previous=eight.kept)
        self._whole = self._make_transfer(None)
        self._changing = sent.changing
        self._part: _Transfer | None = None

    @property
    def plan(self) -> Plan:
        """The plan of a whole sync."""
        return self._whole.plan

    @property
    def rank_plan(self) -> RankPlan:
        """This rank's part of the plan of a whole sync."""
        return self._whole.rank_plan

    def _make_transfer(self, names: frozenset[str] | None) -> _Transfer:
        """Plan a transfer of some tensors. This is a collective call."""
        described = self._described
        plan = build_plan(
            described.sources,
            described.destinations,
            element_sizes={name: dtype.itemsize for name, dtype in self._dtypes.items()},
            bucket_bytes=self._options.bucket_bytes,
            # With live parameters all stages may send at once. A repacked layer must be complete before the next
            # layers arrive.
            order=spread_order(list(described.shapes), described.sources, keep_layers=bool(self._together)),
            nodes=self._options.nodes,
            only=names,
        )
        digests = all_gather_json(plan.digest, self._group)
        if len(set(digests)) > 1:
            raise SyncMismatch(f"ranks built different plans, with digests {sorted(set(digests))}")
        rank_plan, links = plan.rank_view(self._group.rank()), self._options.make_links(self._group)
        changes = None if self._changed_only is None else self._changed_only.build(links, self._sources.device)
        executor = Executor(rank_plan, self._sources, self._dtypes, links, changes=changes)
        return _Transfer(plan, rank_plan, executor, names, changes)

    def _engine_dtypes(self) -> dict[str, torch.dtype]:
        """Return the engines' dtype of each Hugging Face tensor. This is a collective call."""
        mine = {
            piece.hf_name: str(parameter.dtype).removeprefix("torch.")
            for parameter in self._map.parameters
            for piece in parameter.pieces
        }
        every = all_gather_unique_json(mine, self._group)
        return {name: getattr(torch, dtype) for part, _ in every for name, dtype in part.items()}

    def sync(self, version: int) -> SyncStats:
        """Write weights into the engine and set their version. This is a collective call over the group.

        If ``changing`` names tensors and all engines hold complete weights, only these tensors are sent. If the
        engine keeps a layer repacked, the whole layer is sent if one of its tensors changes.

        Raises:
            SyncMismatch: with ``verify``, a tensor differs from the trainer's. The engine stays unusable.
        """
        started, transfer, verify = time.perf_counter(), self._choose_transfer(), self._options.verify
        self._sources.prepare()
        is_full, self._last = self._last is not transfer, None
        with self._engine.target.begin(version) as model:
            try:
                self._write(model, transfer, verify=verify, is_full=is_full)
            except _ElementsLost:
                self._write(model, transfer, verify=True, is_full=True)
        self._last = transfer
        return transfer.stats(time.perf_counter() - started)

    def _write(self, model: nn.Module, transfer: _Transfer, *, verify: bool, is_full: bool) -> None:
        """Write a transfer's tensors into the model and compare them. This is a collective call over the group.

        Raises:
            _ElementsLost: only changes were sent, and a completed message differs from its sender's on some rank.
        """
        written = _Written(self._described, transfer, self._group)
        destinations = EngineDestinations(
            model,
            self._map,
            transfer.rank_plan,
            poison=self._engine.poison,
            written=written.add if verify else None,
            names=transfer.names,
        )
        try:
            transfer.executor.run(destinations, is_full=is_full)
            destinations.finish()
        except BaseException:
            destinations.abandon()
            raise
        if transfer.changes is not None and transfer.changes.are_other(self._group):
            raise _ElementsLost
        if verify:
            compare(self._source_digests(transfer), written.digests())

    def _choose_transfer(self) -> _Transfer:
        """Return the transfer of all tensors, or of the changing tensors. This is a collective call over the group."""
        if self._changing is None or min(all_gather_json(self._engine.target.policy_version, self._group)) < 0:
            return self._whole
        if self._part is None:
            names = {self._aliases.get(name, name) for name in self._changing}
            while more := {name for layer in self._together if layer & names for name in layer} - names:
                names |= more
            self._part = self._make_transfer(frozenset(names))
        return self._part

    def _source_digests(self, transfer: _Transfer) -> dict[str, int]:
        """Hash every Hugging Face tensor of the trainer in the engine's dtype.

        This is a collective call over the group.
        """
        described = self._described
        digests = {
            place.buffer: [described.digest(flat, piece) for piece in place.pieces]
            for place, flat in self._read_sent(transfer)
        }
        places = _reduce_to(described.sources, transfer)
        own = [place for place in places if self._group.rank() in place.ranks]
        mine = [value for place in own for value in digests.get(place.buffer, [None] * len(place.pieces))]
        return tensor_digests(mine, places, described.shapes, self._group)

    def _read_sent(self, transfer: _Transfer) -> Iterator[tuple[Place, Tensor]]:
        """Yield this rank's flat tensors, each with the pieces of a transfer."""
        sources, read = self._sources, set[str]()
        places = [p for p in _reduce_to(self._described.sources, transfer) if self._group.rank() in p.ranks]
        for bucket in transfer.rank_plan.buckets:
            # Sources built per bucket exist on a rank only while it sends them.
            names = None if sources.is_static else bucket.source_buffers
            unread = [p for p in places if p.buffer not in read and (names is None or p.buffer in names)]
            if unread:
                flats = sources.open(bucket)
                for place in unread:
                    yield place, flats[place.buffer]
                read.update(place.buffer for place in unread)
                if not sources.is_static:
                    sources.close(bucket)


class _Written:
    """Hashes of the engine parameters that a sync has written."""

    def __init__(self, described: _Descriptions, transfer: _Transfer, group: dist.ProcessGroup) -> None:
        self._described, self._transfer, self._group = described, transfer, group
        self._digests: dict[str, list[Tensor]] = {}

    def add(self, parameter: EngineParameter, flat: Tensor) -> None:
        brought = [piece for piece in parameter.pieces if self._transfer.brings(piece)]
        self._digests[parameter.name] = [self._described.digest(flat, piece) for piece in brought]

    def digests(self) -> dict[str, int]:
        """Hash every tensor of the engines. This is a collective call."""
        places, rank = _reduce_to(self._described.destinations, self._transfer), self._group.rank()
        mine = [value for place in places if rank in place.ranks for value in self._digests[place.buffer]]
        return tensor_digests(mine, places, self._described.shapes, self._group)


def _reduce_to(places: Sequence[Place], transfer: _Transfer) -> list[Place]:
    """Reduce places to the pieces of a transfer."""
    if transfer.names is None:
        return list(places)
    reduced = [replace(place, pieces=tuple(filter(transfer.brings, place.pieces))) for place in places]
    return [place for place in reduced if place.pieces]
