"""The weights' way from a trained model to the rollout engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_mcore.bridge.map.coverage import check_coverage
from rlhf_mcore.bridge.map.describe import describe_destinations, describe_sources, wire_dtypes
from rlhf_mcore.bridge.map.pieces import Piece, Place
from rlhf_mcore.bridge.map.rules import Shapes, hf_shapes, pieces
from rlhf_mcore.bridge.map.trace import EngineMap, EngineParameter, trace
from rlhf_mcore.bridge.plan.build import Plan, build_plan, spread_order
from rlhf_mcore.bridge.plan.rank_plan import RankPlan
from rlhf_mcore.bridge.run.endpoints import EngineDestinations, LiveSources, Sources
from rlhf_mcore.bridge.run.execute import Executor
from rlhf_mcore.bridge.run.samples import Drawn, Held, Samples, differing
from rlhf_mcore.bridge.run.transports import GroupLinks, Links
from rlhf_mcore.bridge.run.verify import compare, piece_digest, tensor_digests
from rlhf_mcore.families import embedding_name
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.parallel.collectives import all_gather_json, all_gather_unique_json
from rlhf_mcore.protocols import ADAPTER_SLOTS, LiveWeights, SyncMismatch, SyncStats

if TYPE_CHECKING:
    from rlhf_mcore.bridge.files.gather import Gatherer
    from rlhf_mcore.bridge.map.quantised import Names
    from rlhf_mcore.bridge.run.changes import Changes
    from rlhf_mcore.bridge.run.endpoints import KeptSources


@dataclass(frozen=True, slots=True)
class _Names:
    """Name what is sent: tensors of the model, and, with ``adapter``, those of its adapters."""

    geometry: ModelGeometry
    adapter: AdapterSizes | None

    @property
    def _geometries(self) -> list[ModelGeometry]:
        return (
            [self.geometry] if self.adapter is None else [self.geometry, replace(self.geometry, adapter=self.adapter)]
        )

    def shapes(self) -> Shapes:
        return {name: shape for geometry in self._geometries for name, shape in hf_shapes(geometry).items()}

    def pieces(self, parameter: LocalParameter) -> Sequence[Piece]:
        geometry = self._geometries[-1 if ".lora_" in parameter.name else 0]
        return pieces(parameter.name, geometry, parameter.shard)


@dataclass(slots=True)
class _Descriptions:
    """Hold what all ranks have and need, the same on every rank."""

    sources: list[Place]
    destinations: list[Place]
    shapes: Mapping[str, tuple[int, ...]]
    engine_dtypes: Mapping[str, torch.dtype]

    def digest(self, flat: Tensor, piece: Piece) -> Tensor:
        """Hash of a piece of a local tensor, in the engines' dtype; it is where the tensor is."""
        return piece_digest(flat, piece, self.shapes[piece.hf_name], self.engine_dtypes[piece.hf_name])


@dataclass(slots=True)
class _Transfer:
    """A plan that this rank can carry out. ``names`` are the tensors that it brings; None: all."""

    plan: Plan
    rank_plan: RankPlan
    executor: Executor
    names: frozenset[str] | None
    changes: Changes | None
    sampled: tuple[Held, Held] | None = None  # see ``PlannedBridge._pieces_of_samples``

    def brings(self, piece: Piece) -> bool:
        return self.names is None or piece.hf_name in self.names

    def stats(self, seconds: float) -> SyncStats:
        """Return what the last run has moved on this rank."""
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


class PlannedBridge:
    """The planned bridge: every byte goes straight from where it is stored to its place in the fused parameters of an engine.

    Nothing is gathered and no Hugging Face tensor is built. The plan is made once and its digest agreed on by all ranks.

    Args:
        parameters: this rank's, in the dtypes of the wire; none where it holds no part of the model. Their own tensors are sent
            unless ``sources`` are given; then they may be on the meta device.
        geometry: of what is sent: the model, with its MTP layers where the engine drafts with those that learn.
        target: this rank's part of a rollout engine; a ``NoTarget`` where it has none.
        group: the ranks that hold the model or an engine.
        sources: what is sent instead of the parameters' own tensors, under the same names and in the same shapes: merged with
            adapters, averaged or cast.
        bucket_bytes: limit of the bytes that a rank sends at a time, and the same for those received; two buckets are in flight.
        verify: "off"; "sample": compare some elements of every tensor after every sync, and hash as "digest" does after the first
            one and after every ``digest_every``; "digest": hash every tensor on both sides after every sync; "full", for debugging:
            load all weights again the plain way, through ``gatherer``, and compare every engine parameter bit for bit.
        gatherer: of the same tensors; needed for "full" only.
        traced: the map of the target's model (:func:`engine_map`), where it was made before. An engine that has slept cannot be
            traced: it has lost its weights.
        nodes: the number of the machine of every rank of the group, where there are several: what crosses machines is then brought to
            each once and forwarded inside.
        poison: fill the engine with NaN before each sync (a test mode: an unwritten element shows).
        adapter: of an engine that adds adapters itself. Their A and B are among ``parameters``, and travel under the names of PEFT.
        full_every: of so many syncs one sends everything, and the others what has changed; None: all send everything.
        previous: with ``full_every``, what was sent last, on ranks that send.
        quantisation: of weights on their way, by its name in ``QUANTISATIONS``.
        make_links: makes the links of a plan over ``group``. Collective over it.
    """

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        geometry: ModelGeometry,
        target: LiveWeights,
        group: dist.ProcessGroup,
        *,
        bucket_bytes: int,
        sources: Sources | None = None,
        verify: str = "off",
        digest_every: int = 100,
        gatherer: Gatherer | None = None,
        traced: EngineMap | None = None,
        nodes: Sequence[int] | None = None,
        poison: bool = False,
        adapter: AdapterSizes | None = None,
        full_every: int | None = None,
        previous: KeptSources | None = None,
        quantisation: str | None = None,
        make_links: Callable[[dist.ProcessGroup], Links] = GroupLinks,
    ):
        names: Names = _Names(geometry, adapter)
        self._map = engine_map(target.model, names.shapes(), quantisation) if traced is None else traced
        if quantisation is not None:
            from rlhf_mcore.bridge.run import quantised

            names = of_8_bits = quantised.QuantisedNames(names, quantisation)
        pieces_of = names.pieces
        assert verify != "full" or gatherer is not None, "verify='full' compares with what a gatherer yields"
        shapes = names.shapes()
        self._target, self._verify, self._gatherer, self._poison = target, verify, gatherer, poison
        self._bucket_bytes, self._nodes = bucket_bytes, nodes
        self._aliases = {"lm_head.weight": embedding_name(geometry)} if geometry.tied_embeddings else {}
        self._group = group
        self._full_every, self._previous, self._make_links = full_every, previous, make_links
        self._landing: type[EngineDestinations] = EngineDestinations
        self._last: _Transfer | None = None  # the receivers' copies are of what it has brought
        self._digest_every, self._num_syncs = digest_every, 0
        sent = parameters if quantisation is None else of_8_bits.sent(parameters)
        self._dtypes = wire_dtypes(sent, pieces_of, group)
        self._described = _Descriptions(
            describe_sources(sent, pieces_of, group),
            describe_destinations(self._map, group),
            shapes,
            self._engine_dtypes(),
        )
        check_coverage(self._described.sources, self._described.destinations, shapes)
        # Tensors of one repacked layer have to come together. These may differ between ranks.
        together = all_gather_unique_json(self._map.together, group)
        self._together = [frozenset(layer) for layers, _ in together for layer in layers]
        self._sources = sources or LiveSources({p.name: p.tensor.view(-1) for p in parameters})
        if quantisation is not None:
            places = self._described.sources
            eight = quantised.QuantisedSources(self._sources, parameters, of_8_bits, places, group, previous)
            self._sources, self._previous, self._landing = eight, eight.kept, quantised.landing(self._map)
        self._whole = self._make_transfer(None)
        self._parts: dict[frozenset[str], _Transfer] = {}

    @property
    def plan(self) -> Plan:
        """The plan of a whole sync."""
        return self._whole.plan

    @property
    def rank_plan(self) -> RankPlan:
        """This rank's part of it."""
        return self._whole.rank_plan

    def _make_transfer(self, names: frozenset[str] | None) -> _Transfer:
        """Plan a transfer of some tensors. Collective."""
        described = self._described
        plan = build_plan(
            described.sources,
            described.destinations,
            element_sizes={name: dtype.itemsize for name, dtype in self._dtypes.items()},
            bucket_bytes=self._bucket_bytes,
            # With live parameters all stages may send at once; a repacked layer has to come whole before the next ones.
            order=spread_order(list(described.shapes), described.sources, keep_layers=bool(self._together)),
            nodes=self._nodes,
            only=names,
        )
        digests = all_gather_json(plan.digest, self._group)
        if len(set(digests)) > 1:
            raise SyncMismatch(f"the ranks have made different plans: {sorted(set(digests))}")
        rank_plan, links = plan.rank_view(self._group.rank()), self._make_links(self._group)
        changes = None
        if self._full_every is not None:
            from rlhf_mcore.bridge.run.changes import Changes

            changes = Changes(links, self._previous, self._full_every, self._sources.device)
        executor = Executor(rank_plan, self._sources, self._dtypes, links, changes=changes)
        return _Transfer(plan, rank_plan, executor, names, changes)

    def _engine_dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype in which the engines hold each Hugging Face tensor. Collective."""
        mine = {
            piece.hf_name: str(parameter.dtype).removeprefix("torch.")
            for parameter in self._map.parameters
            for piece in parameter.pieces
        }
        every = all_gather_unique_json(mine, self._group)
        return {name: getattr(torch, dtype) for part, _ in every for name, dtype in part.items()}

    def sync(self, version: int, only: Sequence[str] | None = None) -> SyncStats:
        """Write weights into the engine and set their version. Collective over the group.

        Args:
            version: of the weights.
            only: Hugging Face names, or patterns of them (``model.layers.3.*``), of the tensors that have changed; None: all. A layer
                that the engine keeps repacked is brought whole if one of its tensors is. The plan of a subset is made once.

        Raises:
            SyncMismatch: with ``verify``, a tensor is not the trainer's. The engine stays unusable.
            RuntimeError: ``only``, and the engine has no whole weights to which some could be added.
            ValueError: ``only`` names no tensor, or ``verify`` is "full", which compares all.
        """
        started = time.perf_counter()
        transfer, verify = self._whole if only is None else self._part(only), self._verify
        if verify == "sample" and self._num_syncs % self._digest_every == 0:
            verify = "digest"
        self._sources.prepare()
        is_full, self._last = self._last is not transfer, None
        with self._target.begin(version) as model:
            written = self._write(model, transfer, verify, version, is_full=is_full)
            if written is None:
                # What did not travel is not what was sent before: an engine has lost it. Everything travels, and is compared.
                written = self._write(model, transfer, "digest", version, is_full=True)
            assert written is not None
        self._last = transfer
        if verify == "full":
            from rlhf_mcore.bridge.run.plain_load import compare_with_plain_load

            assert self._gatherer is not None
            compare_with_plain_load(self._target, self._map, self._gatherer, written.copies, version, self._group)
        self._num_syncs += 1
        return transfer.stats(time.perf_counter() - started)

    def _write(
        self, model: nn.Module, transfer: _Transfer, verify: str, version: int, *, is_full: bool
    ) -> _Written | None:
        """Write what a transfer brings into the model, and compare it. Collective over the group.

        None: what only changes have travelled of is not the trainer's, at any rank.
        """
        drawn = None
        if verify == "sample":
            drawn = Drawn(self._pieces_of_samples(transfer)[1].reads(version, self._sources.device))
        written = _Written(self._described, transfer, verify, self._group, drawn)
        destinations = self._landing(
            model,
            self._map,
            transfer.rank_plan,
            poison=self._poison,
            written=None if verify == "off" else written.add,
            names=transfer.names,
        )
        try:
            transfer.executor.run(destinations, is_full=is_full)
            destinations.finish()
        except BaseException:
            destinations.abandon()
            raise
        if transfer.changes is not None and transfer.changes.are_other(self._group):
            return None
        if verify == "digest":
            compare(self._source_digests(transfer), written.digests())
        elif drawn is not None:
            self._compare_samples(transfer, drawn, version)
        return written

    def _part(self, only: Sequence[str]) -> _Transfer:
        if min(all_gather_json(self._target.policy_version, self._group)) < 0:
            raise RuntimeError(
                "the engine has no whole weights that a sync of some tensors could add to: sync all first"
            )
        from rlhf_mcore.bridge.run.stand_ins import matching  # most runs bring all

        names = matching(only, self._described.shapes, self._aliases, self._together, self._verify)
        if names not in self._parts:
            self._parts[names] = self._make_transfer(names)
        return self._parts[names]

    def _source_digests(self, transfer: _Transfer) -> dict[str, int]:
        """Hash every Hugging Face tensor of the trainer in the engine's dtype. Collective over the group."""
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
        """Read this rank's flat tensors, each with the pieces that a transfer brings."""
        sources, read = self._sources, set[str]()
        places = [p for p in _reduce_to(self._described.sources, transfer) if self._group.rank() in p.ranks]
        for bucket in transfer.rank_plan.buckets:
            # Sources that are made bucket by bucket exist on a rank only while it sends them.
            names = None if sources.is_static else bucket.source_buffers
            unread = [p for p in places if p.buffer not in read and (names is None or p.buffer in names)]
            if unread:
                flats = sources.open(bucket)
                for place in unread:
                    yield place, flats[place.buffer]
                read.update(place.buffer for place in unread)
                if not sources.is_static:
                    sources.close(bucket)

    def _pieces_of_samples(self, transfer: _Transfer) -> tuple[Held, Held]:
        """Describe this rank's pieces of the samples of a transfer: of its sources, and of its engine."""
        if transfer.sampled is None:
            described, rank = self._described, self._group.rank()
            samples = Samples(described.shapes, described.engine_dtypes)
            sent, received = (
                samples.describe((p.buffer, p.pieces) for p in _reduce_to(side, transfer) if rank in p.ranks)
                for side in (described.sources, described.destinations)
            )
            transfer.sampled = sent, received
        return transfer.sampled

    def _compare_samples(self, transfer: _Transfer, received: Drawn, version: int) -> None:
        sources, device = self._pieces_of_samples(transfer)[0], self._sources.device
        sent = Drawn(sources.reads(version, device))
        for place, flat in self._read_sent(transfer):
            sent.add(place.buffer, flat)
        mine = differing(sources.samples, sent, received, device, self._group)
        wrong = sorted({name for names in all_gather_json(mine, self._group) for name in names})
        if wrong:
            raise SyncMismatch(
                f"{len(wrong)} tensors differ after the sync in some of their elements, among them {wrong[0]}"
            )


class _Written:
    """A record of the parameters that a sync has written into the engine: hashes, samples, or copies."""

    def __init__(
        self, described: _Descriptions, transfer: _Transfer, verify: str, group: dist.ProcessGroup, drawn: Drawn | None
    ):
        self._described, self._transfer, self._verify, self._group = described, transfer, verify, group
        self._drawn = drawn
        self._digests: dict[str, list[Tensor]] = {}
        self.copies: dict[str, Tensor] = {}

    def add(self, parameter: EngineParameter, flat: Tensor) -> None:
        if self._verify == "full":
            self.copies[parameter.name] = flat.clone()
        elif self._drawn is not None:
            self._drawn.add(parameter.name, flat)
        else:
            brought = [piece for piece in parameter.pieces if self._transfer.brings(piece)]
            self._digests[parameter.name] = [self._described.digest(flat, piece) for piece in brought]

    def digests(self) -> dict[str, int]:
        """Hash every tensor as engines hold it. Collective."""
        places, rank = _reduce_to(self._described.destinations, self._transfer), self._group.rank()
        mine = [value for place in places if rank in place.ranks for value in self._digests[place.buffer]]
        return tensor_digests(mine, places, self._described.shapes, self._group)


def _reduce_to(places: Sequence[Place], transfer: _Transfer) -> list[Place]:
    """Reduce places to the pieces that a transfer brings."""
    if transfer.names is None:
        return list(places)
    reduced = [replace(place, pieces=tuple(filter(transfer.brings, place.pieces))) for place in places]
    return [place for place in reduced if place.pieces]


def engine_map(model: nn.Module, shapes: Shapes, quantisation: str | None = None) -> EngineMap:
    """Map the live model of an engine: traced from vLLM's loaders, or read from a transformers model."""
    if quantisation is not None:
        from rlhf_mcore.bridge.run.quantised import map_engine

        return map_engine(model, shapes, quantisation, engine_map)
    if hasattr(model, ADAPTER_SLOTS):
        from rlhf_mcore.bridge.map.adapter_slots import trace_with_adapters

        return trace_with_adapters(model, shapes)
    if hasattr(model, "load_weights"):
        return trace(model, shapes)
    from rlhf_mcore.bridge.map.plain_model import map_plain_model  # vLLM's models have loaders to trace

    return map_plain_model(model)
