"""Sync weights to disaggregated engines: both ends of the planned bridge, and changes of the engine set.

Trainer ranks and engine ranks form one group, trainer ranks first. Over this group both ends build the same
:class:`PlannedBridge`: trainer ranks have no engine, and engine ranks have no part of the model. The group, its
descriptions and the plan are kept as long as the same processes take part. Otherwise they are rebuilt, and the
next sync sends all weights to all engines.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from pydantic import TypeAdapter

from rlhf_mcore.bridge.map.engine import keep_loading_layout
from rlhf_mcore.bridge.run.endpoints import KeptSources, Sources
from rlhf_mcore.bridge.run.sync import ChangedOnly, EngineWeights, PlannedBridge, SentWeights, SyncOptions, Weights
from rlhf_mcore.bridge.run.transports import GroupLinks, Links, machine
from rlhf_mcore.geometry import AdapterSizes, LocalParameter, ModelGeometry
from rlhf_mcore.parallel.addresses import listener
from rlhf_mcore.parallel.collectives import all_gather_json, broadcast_json, on_every_rank
from rlhf_mcore.parallel.joint_group import JointGroup, connections
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.protocols import EngineProcess, GroupSpec, LiveWeights, PeersLost, SyncStats

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.fleet import Fleet

ATTEMPTS = 3  # per set of processes
MARGIN_S = 5.0  # additional time for engines to notice a failed transfer
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BridgeJob:
    """Parameters on which both ends must agree; see the arguments of :class:`PlannedBridge`."""

    geometry: ModelGeometry
    bucket_bytes: int
    verify: bool = False
    live_cpu_weights: bool = False  # for vLLM; see keep_loading_layout
    poison: bool = False
    adapter: AdapterSizes | None = None
    full_every: int | None = None
    transport: str = "group"
    quantisation: str | None = None
    changing: tuple[str, ...] | None = None
    weights: Weights = "plain"  # how the engines declare them

    def options(
        self, group: dist.ProcessGroup, timeout_s: float, node: str, previous: KeptSources | None
    ) -> SyncOptions:
        """Return the options of one end.

        ``node`` is the name of this machine. This is a collective call over the group.
        """
        names = all_gather_json(node, group)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return SyncOptions(
            self.bucket_bytes,
            self.verify,
            nodes=[numbers[name] for name in names] if len(numbers) > 1 else None,
            changed_only=None if self.full_every is None else ChangedOnly(self.full_every, previous),
            make_links=self.links(timeout_s),
        )

    def links(self, timeout_s: float) -> Callable[[dist.ProcessGroup], Links]:
        """Return the function that builds the links of a plan over a group."""
        if self.transport == "group":
            return GroupLinks
        connect = load_plugin("transports", self.transport, f"bridge.transport={self.transport}")
        return partial(connect, timeout_s=timeout_s)


_JSON = TypeAdapter(BridgeJob)


@dataclass(frozen=True, slots=True)
class Side:
    """A rank's part of a transfer: part of the model, or an engine.

    ``node`` is the name of its machine ("": detect it). Data is sent to each machine once and forwarded inside.
    ``sources`` is as in :class:`SentWeights`, ``previous`` as in :class:`ChangedOnly`, ``weights`` as in
    :class:`EngineWeights`.
    """

    parameters: Sequence[LocalParameter]
    target: LiveWeights
    node: str = ""
    sources: Sources | None = None
    previous: KeptSources | None = None
    weights: Weights = "plain"


class _End:
    """An end of the bridge in one group. All methods are collective over the group."""

    def __init__(self, side: Side, job: BridgeJob, spec: GroupSpec, listening: socket.socket | None = None) -> None:
        self._joint = JointGroup(spec, listening)
        try:
            group = self._joint.group
            with connections():
                options = job.options(group, spec.timeout_s, side.node or machine(), side.previous)
                sent = SentWeights(
                    side.parameters, job.geometry, side.sources, job.adapter, job.quantisation, job.changing
                )
                engine = EngineWeights(side.target, side.weights, poison=job.poison)
                self.bridge = PlannedBridge(sent, engine, group, options)
        except BaseException:
            self._joint.close()
            raise

    def sync(self, version: int) -> SyncStats:
        with connections():
            return self.bridge.sync(version)

    def close(self) -> None:
        self._joint.close()


class EngineEnd:
    """The engine's end of the bridge: a :class:`WeightReceiver`."""

    def __init__(self, target: LiveWeights, node: str = "") -> None:
        self._side = Side((), target, node)
        self._end: _End | None = None
        self._is_live = False

    def join(self, spec: GroupSpec, bridge: str) -> None:
        """See :class:`WeightReceiver`."""
        self.leave()
        job = _JSON.validate_json(bridge)
        if job.live_cpu_weights and not self._is_live:
            keep_loading_layout(self._side.target.model)
            self._is_live = True
        self._end = _End(replace(self._side, weights=job.weights), job, spec)

    def sync(self, version: int) -> SyncStats:
        """See :class:`WeightReceiver`."""
        assert self._end is not None, "it has not joined a group"
        try:
            return self._end.sync(version)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """See :class:`WeightReceiver`."""
        end, self._end = self._end, None
        if end is not None:
            end.close()


class RemoteBridge:
    """The trainer's end of the bridge: a :class:`WeightBridge` to all healthy remote engines.

    If an engine dies, stops or fails during a transfer, the transfer is repeated with the other engines. Until
    then, their weights are unusable. No rank waits for an engine longer than ``timeout_s`` plus a few seconds.

    Args:
        side: this rank's side; its target is a ``NoTarget``.
        job: the parameters from which the engines build their end.
        trainers: the trainer's ranks.
        engines: control of the engines on the first trainer rank; None on the others.
        address: the first rank's machine, as all other processes reach it. A store listens on this address only.
        timeout_s: timeout of a rank for others to join, and for each message.
        note: called with a text when a transfer is repeated. The engines' control knows which engines have failed.
        kept: copies of the sent weights. Every sync updates them. So ``sync_again`` sends the same weights after a
            model update, and the next sync sends only later changes.
    """

    def __init__(
        self,
        side: Side,
        job: BridgeJob,
        trainers: dist.ProcessGroup,
        engines: Fleet | None,
        *,
        address: str,
        timeout_s: float,
        note: Callable[[str], None] = lambda text: None,
        kept: KeptSources | None = None,
    ) -> None:
        assert (engines is None) == (trainers.rank() > 0), "the first rank controls the engines"
        self._job, self._trainers, self._engines = job, trainers, engines
        self._address, self._timeout_s, self._note = address, timeout_s, note
        side = replace(side, previous=kept)
        self._side, self._kept, self._side_again = side, kept, side if kept is None else replace(side, sources=kept)
        self._end: _End | None = None
        self._end_side = side  # the side of this end
        self._members: list[EngineProcess] = []  # engine processes in the group, after the trainer's ranks
        self._problems: list[str] = []  # reported by the last failed transfer
        self._version = -1

    def sync(self, version: int) -> SyncStats:
        """Send weights to all healthy engines and resume their generation.

        This is a collective call over the trainer's ranks.

        Returns:
            Statistics of this rank's transfer, or zeros if no engine is healthy.

        Raises:
            RuntimeError: the transfer failed ``ATTEMPTS`` times with healthy engines, or the engines' control
                raised.
            SyncMismatch: see :meth:`PlannedBridge.sync`.
        """
        self._version = version
        stats = self._bring(self._side)
        if (kept := self._kept) is not None:
            on_every_rank(kept.take, self._trainers)
        return stats

    def sync_again(self) -> SyncStats:
        """Send the last version again: the kept weights, or without them the trainer's current weights."""
        return self._bring(self._side_again)

    def _bring(self, side: Side) -> SyncStats:
        version, started, tried, tries = self._version, time.perf_counter(), None, 0
        if side is not self._end_side:
            self.leave()
        self._end_side = side
        stats: SyncStats | None = None
        while stats is None:
            processes = self._on_first(lambda engines: [astuple(process) for process in engines.pause()])
            members = [EngineProcess(*fields) for fields in broadcast_json(processes, 0, self._trainers)]
            tries = tries + 1 if members == tried else 1
            tried = members
            if tries > ATTEMPTS:
                problems = "; ".join(self._problems)
                raise RuntimeError(f"sending weights to the engines failed {ATTEMPTS} times in a row: {problems}")
            if members != self._members:
                self.leave()
                if members and not self._join(members):
                    continue
            stats = self._together(partial(self._sync_once, version)) if members else SyncStats(0, 0, 0, 0)
        self._on_first(lambda engines: engines.resume(version))
        return replace(stats, seconds=time.perf_counter() - started)

    def leave(self) -> None:
        """Leave the group, if any. The next sync builds a new group."""
        end, self._end, self._members = self._end, None, []
        if end is not None:
            end.close()

    def _on_first(self, action: Callable[[Fleet], T]) -> T | None:
        """Run an action on the engines from the first rank. Return None on the others. All ranks raise its error."""
        engines = self._engines
        return on_every_rank(lambda: None if engines is None else action(engines), self._trainers)

    def _join(self, members: list[EngineProcess]) -> bool:
        """Build a group and a plan with these processes. Return whether this succeeded."""
        listening = self._on_first(lambda engines: listener(self._address))
        place = None if listening is None else [f"weights-{secrets.token_hex(8)}", listening.getsockname()[1]]
        name, port = broadcast_json(place, 0, self._trainers)
        first, size = self._trainers.size(), self._trainers.size() + len(members)

        def spec(rank: int) -> GroupSpec:
            return GroupSpec(name, self._address, port, rank, size, self._timeout_s)

        def join() -> bool:
            if self._engines is not None:
                self._engines.join([spec(rank) for rank in range(first, size)], _JSON.dump_json(self._job).decode())
            self._end = _End(self._end_side, self._job, spec(self._trainers.rank()), listening)
            self._members = members
            return True

        return self._together(join) is not None

    def _sync_once(self, version: int) -> SyncStats:
        assert self._end is not None
        if self._engines is not None:
            self._engines.begin_sync(version)
        return self._end.sync(version)

    def _together(self, action: Callable[[], T]) -> T | None:
        """Run the trainer's part of a collective action.

        If engines are lost, leave the group and return None on all ranks.
        """
        began, result, lost, caught = time.monotonic(), None, "", None
        try:
            result = action()
        except PeersLost as error:
            lost = str(error)
        except Exception as error:
            caught = error
        if result is None:
            self.leave()  # peers that wait for this rank get an error

        def end(engines: Fleet) -> list[str]:
            remaining_s = max(began + self._timeout_s - time.monotonic(), 0) + MARGIN_S
            return engines.finish(self._timeout_s if result is not None else remaining_s)

        try:
            on_every_rank(lambda: _raise(caught), self._trainers)
            problems: list[str] = broadcast_json(self._on_first(end), 0, self._trainers)
        except BaseException:
            self.leave()
            raise
        problems += [f"rank {rank}: {text}" for rank, text in enumerate(all_gather_json(lost, self._trainers)) if text]
        if not problems:
            return result
        self._problems = problems
        self.leave()
        if self._engines is not None:
            self._note("some engines did not receive the weights; sending them again to all healthy engines")
        return None


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
