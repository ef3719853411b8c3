"""Run a rank of a remote engine in a process that Ray starts. One thread owns the engine."""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.expected_kernels import kernels_text
from rlhf_mcore.own_processes import STARTED_BY, end_with_parent
from rlhf_mcore.parallel.addresses import interface_of, listener
from rlhf_mcore.protocols import PeersLost
from rlhf_mcore.rollout.vllm.environment import engine_cache
from rlhf_mcore.types import EngineWork

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.episode_driver import EpisodeDriver
    from rlhf_mcore.protocols import GroupSpec, LiveWeights, WeightReceiver
    from rlhf_mcore.rollout.engine import EngineModel, LiveEngine
    from rlhf_mcore.sampling.followers import EnginePass
    from rlhf_mcore.types import Completion, Request

# "submit" and requests, "cancel" and request ids, "forget" cached prefixes, "pause". Of a lead with episodes: "lend" and a number of
# turns, "take_back" and the completion of one.
Order = tuple[str, Any]

_WAIT_S = 0.05  # for environments, between two looks at what the trainer wants

_FOREVER = timedelta(
    days=3650
)  # ranks of an engine wait for each other while it has nothing to do; the trainer ends them


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Hold what a rank of an engine is built from. ``receiver`` makes the other end of the bridge; it is found by its name.

    ``episodes`` makes, in the engine's first rank, what plays episodes in an environment.
    """

    cfg: RolloutConfig
    model: EngineModel
    receiver: Callable[[LiveWeights], WeightReceiver]
    episodes: Callable[[], EpisodeDriver] | None = None
    directory: str = ""  # where relative paths begin, if it is there: a cluster's processes may be elsewhere
    deterministic: bool = False
    binds_numa: bool = False


@dataclass(frozen=True, slots=True)
class Location:
    """Hold where Ray has placed a rank of an engine. ``devices`` are those that Ray gave it, as CUDA_VISIBLE_DEVICES names them."""

    address: str
    port: int  # on which a lead listens; 0 of other ranks
    devices: tuple[str, ...] = ()
    node: str = ""  # Ray's name of the machine


@dataclass(frozen=True, slots=True)
class RankRendezvous:
    """Hold where the ranks of an engine are, in their order. The lead (rank 0) listens. Ranks of a machine are neighbours."""

    locations: tuple[Location, ...]
    rank: int
    engine: str = "0"  # its name among the engines of the run

    @property
    def lead(self) -> Location:
        return self.locations[0]

    @property
    def own(self) -> Location:
        return self.locations[self.rank]

    @property
    def machine(self) -> list[int]:
        """Return the ranks on the machine of this rank."""
        return [rank for rank, location in enumerate(self.locations) if location.node == self.own.node]

    @property
    def local_rank(self) -> int:
        return self.machine.index(self.rank)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """EngineReport what a rank has to tell: completions since the last report, and how far it is. Only the lead has completions.

    ``work`` counts since its start, cancelled requests too. ``num_held``: turns of episodes that wait for room in the engine.
    ``lent``: turns that another engine is to draw.
    """

    completions: list[Completion]
    tokens_drawn: int
    num_in_flight: int
    version: int
    num_waits: int = 0  # how often it has waited for environments
    work: EngineWork = field(default_factory=EngineWork)
    num_held: int = 0
    lent: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class _Call:
    """A task of the engine's thread between two steps, and its result."""

    action: Callable[[], None]
    done: threading.Event
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    error: BaseException | None = None


class EngineHost:
    """A Ray actor's body. Methods may be called from several threads; all but ``report`` act through the engine's thread.

    A lead serves: it takes requests, steps, and tells the other ranks of its engine what to do in each step. They follow. ``pause``
    stops all of them between two steps; ``join``, ``sync`` and ``leave`` are carried out then, until ``resume``.
    """

    def __init__(self) -> None:
        os.environ.pop(STARTED_BY, None)  # the trainer's parent, not this process's
        end_with_parent(signal.SIGKILL)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()  # of a lead that serves
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()  # while paused
        self._paused, self._failed = threading.Event(), threading.Event()
        self._news = threading.Condition()
        self._completions: list[Completion] = []
        self._progress, self._num_waits = (0, 0, -1, 0, EngineWork(), 0), 0
        self._lent: list[Request] = []
        self._error: BaseException | None = None
        self._listening: socket.socket | None = None
        self._is_lead = True
        self._joining: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._engine: LiveEngine
        self._episodes: EpisodeDriver | None = None
        self._receiver: WeightReceiver

    # ------------------------------------------------------------------------------------------ start
    def locate(self, is_lead: bool) -> Location:
        """Tell where this rank is. A lead begins to listen for the others of its engine."""
        import ray

        address = str(ray.util.get_node_ip_address())
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if is_lead:
            self._listening = listener(address)
        port = 0 if self._listening is None else int(self._listening.getsockname()[1])
        return Location(address, port, tuple(map(str, devices)), str(ray.get_runtime_context().get_node_id()))

    def start(self, order: EngineSpec, meeting: RankRendezvous, threads: int) -> list[str]:
        """Build the engine, with the other ranks of it. It is paused, and has no weights. Returns lines for the run's record.

        Raises:
            ConfigError: as the engine's constructor.
        """
        self._is_lead = meeting.rank == 0
        built = _Call(lambda: self._build(order, meeting, threads), threading.Event())
        self._calls.put(built)
        threading.Thread(target=self._run, name="engine", daemon=True).start()
        _finish(built)
        kernels = self._engine.kernels()
        return [*([kernels_text(kernels)] if kernels else []), *self._engine.warnings]

    def _build(self, order: EngineSpec, meeting: RankRendezvous, threads: int) -> None:
        os.environ.update(_rank_environment(meeting, threads, os.environ))
        with suppress(OSError):
            os.chdir(order.directory)
        import torch
        import torch.distributed as dist

        from rlhf_mcore.platform import current_platform
        from rlhf_mcore.rollout.engine import LiveEngine

        platform = current_platform()
        platform.setup_process(meeting.local_rank, threads, order.deterministic)
        if order.binds_numa:
            platform.bind_to_node()
        kind = engine_kind(order.cfg.engine)
        self._joining = kind.joining
        kind.prepare_process(deterministic=order.deterministic)
        store = dist.TCPStore(
            meeting.lead.address,
            meeting.lead.port,
            len(meeting.locations),
            is_master=self._is_lead,
            timeout=timedelta(seconds=300),
            master_listen_fd=self._listening.detach() if self._listening is not None else None,
        )
        dist.init_process_group(
            platform.collective_backend,
            store=store,
            rank=meeting.rank,
            world_size=len(meeting.locations),
            timeout=_FOREVER,
        )
        torch.manual_seed(order.model.seed)
        engine = kind.build(order.cfg, order.model)
        assert isinstance(engine, LiveEngine), "config.validate keeps others from Ray"
        self._engine = engine
        self._receiver = order.receiver(self._engine)
        if self._is_lead and order.episodes is not None:
            self._episodes = order.episodes()
            self._episodes.watch(engine.drawn, None if order.deterministic else order.cfg.slots)

    # ------------------------------------------------------------------------------------------ generation
    def submit(self, requests: Sequence[Request], afresh: bool = False) -> None:
        """Begin to draw. Of a lead; returns at once.

        ``afresh``: the engine is idle, and draws as if these were its first requests with its weights.
        """
        if afresh:
            self._orders.put(("forget", []))
        self._orders.put(("submit", requests))

    def cancel(self, request_ids: Collection[int]) -> None:
        """Stop to draw. Of a lead; returns at once."""
        self._orders.put(("cancel", list(request_ids)))

    def lend(self, number: int) -> None:
        """Let another engine draw up to so many turns that wait for room; a report has them. Of a lead; returns at once."""
        self._orders.put(("lend", number))

    def take_back(self, turn: Completion) -> None:
        """Take a turn that another engine has drawn. Of a lead; returns at once."""
        self._orders.put(("take_back", turn))

    def report(self, wait_s: float) -> EngineReport:
        """Return news; waits for a completion, at most ``wait_s``. One call at a time.

        Raises:
            whatever has ended the engine's thread.
        """
        with self._news:
            self._news.wait_for(lambda: self._completions or self._lent or self._error is not None, wait_s)
            if self._error is not None:
                raise self._error
            completions, self._completions = self._completions, []
            lent, self._lent = self._lent, []
            return EngineReport(completions, *self._progress, lent)

    # ------------------------------------------------------------------------------------------ weights
    def pause(self) -> None:
        """Stop between two steps. Of a lead; the others of its engine stop with it. An engine that has stopped already stays so."""
        if not self._paused.is_set():  # the order would stop it again when it has been resumed
            self._orders.put(("pause", []))
        while not self._paused.wait(0.2):
            if self._failed.is_set():
                raise RuntimeError("the engine has failed")

    def resume(self) -> None:
        """Serve, or follow, again. Every rank."""
        self._do(self._paused.clear)

    def join(self, spec: GroupSpec, bridge: str) -> None:
        """See :class:`rlhf_mcore.protocols.WeightReceiver`, as the two that follow. Every rank, while the engine is paused."""
        self._do(lambda: self._receiver.join(spec, bridge), self._joining)

    def sync(self, version: int, only: Sequence[str] | None = None) -> None:
        """Receive the weights of a version."""
        self._do(lambda: self._receiver.sync(version, only), self._joining)

    def leave(self) -> None:
        """Leave the group."""
        self._do(self._receiver.leave)

    def _do(self, action: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        call = _Call(action, threading.Event(), around)
        self._calls.put(call)
        _finish(call)

    # ------------------------------------------------------------------------------------------ the engine's thread
    def _run(self) -> None:
        self._paused.set()
        try:
            while True:
                if self._paused.is_set():
                    self._take_call()
                else:
                    self._serve_with_peers()
        except BaseException as error:  # the trainer is told, and ends this process
            with self._news:
                self._error = error
                self._news.notify_all()
            self._failed.set()

    def _take_call(self) -> None:
        call = self._calls.get()
        try:
            with call.around():
                call.action()
        except Exception as error:
            call.error = error  # the caller's: what is left of the engine's weights is the receiver's to decide
        finally:
            call.done.set()

    def _serve_with_peers(self) -> None:
        """Make one step, and say in a few words where another rank of the engine is lost: gloo's are about its source."""
        from rlhf_mcore.parallel.joint_group import connections

        try:
            with connections():
                self._serve_once()
        except PeersLost as error:
            cause = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
            raise PeersLost(f"one of its ranks is lost to the others ({cause})") from error

    def _serve_once(self) -> None:
        """Make one step. A lead first sends the other ranks what to do before it."""
        from rlhf_mcore.parallel.collectives import broadcast_bytes
        from rlhf_mcore.sampling.followers import EnginePass

        engine, episodes = self._engine, self._episodes
        is_idle = not engine.num_in_flight and (episodes is None or not episodes.num_open)
        orders = self._waiting_orders(block=is_idle) if self._is_lead else []
        began = time.perf_counter()
        ended: list[Completion] = []
        if episodes is not None:
            ended = episodes.take([what for kind, what in orders if kind == "take_back"])
        made = self._next_pass(orders) if self._is_lead else None
        if engine.num_ranks > 1:
            message = broadcast_bytes(None if made is None else made.encode(), 0)
            made = made or EnginePass.decode(message or b"")
        assert made is not None, "an engine of one rank is its lead"
        if made.forgets:
            engine.forget_prefixes()
        made.apply(engine)
        if made.pauses:
            engine.compare_ranks()
            self._paused.set()
        stands = made.pauses or made.waits or not engine.num_in_flight
        before = engine.tokens_drawn if made.cancelled else self._progress[0]
        finished = [] if stands else engine.step()
        work = EngineWork()
        if not stands:
            busy_s = time.perf_counter() - began
            work = EngineWork(1, engine.tokens_drawn - before, busy_s, preemptions=engine.pop_preemptions())
        if episodes is not None:
            finished = ended + episodes.take(finished)
        self._tell(finished if self._is_lead else [], work)

    def _next_pass(self, orders: Sequence[Order]) -> EnginePass:
        """Decide on the lead what all ranks do before the next step. Requests for episodes become turns that are due."""
        from rlhf_mcore.sampling.followers import EnginePass

        episodes, cancelled, requests = self._episodes, list[int](), list["Request"]()
        kinds = {kind for kind, _ in orders}
        for kind, what in orders:
            if kind == "submit":
                requests += what if episodes is None else episodes.begin(what)
            elif kind == "cancel":
                cancelled += what
                requests = [request for request in requests if request.request_id not in what]
                if episodes is not None:
                    episodes.cancel(what)
            elif kind == "lend" and episodes is not None:
                with self._news:
                    self._lent += episodes.lend(what)
                    self._news.notify_all()
        pauses, waits = "pause" in kinds, False
        if episodes is not None:
            cancelled += episodes.abandoned_turns()
            if not pauses:
                turns = episodes.due(self._engine.num_in_flight > 0, _WAIT_S)
                waits = turns is None
                self._num_waits += waits
                requests += turns or []
        return EnginePass(cancelled, requests, "forget" in kinds, pauses, waits)

    def _waiting_orders(self, *, block: bool) -> list[Order]:
        orders = [self._orders.get()] if block else []
        while not self._orders.empty():
            orders.append(self._orders.get())
        return orders

    def _tell(self, completions: list[Completion], work: EngineWork) -> None:
        engine, done = self._engine, self._progress[4] + work
        held = self._episodes.num_held if self._episodes is not None else 0
        with self._news:
            self._completions += completions
            self._progress = (
                engine.tokens_drawn,
                engine.num_in_flight,
                engine.policy_version,
                self._num_waits,
                done,
                held,
            )
            if completions:
                self._news.notify_all()


def _rank_environment(meeting: RankRendezvous, threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that differ from its parent's: Ray on the trainer's machine hands on those of the first rank."""
    interface = interface_of(meeting.own.address)
    own = {
        "OMP_NUM_THREADS": str(threads),
        "RANK": str(meeting.rank),
        "LOCAL_RANK": str(meeting.local_rank),
        "WORLD_SIZE": str(len(meeting.locations)),
        "LOCAL_WORLD_SIZE": str(len(meeting.machine)),
        "MASTER_ADDR": meeting.lead.address,
        "MASTER_PORT": str(meeting.lead.port),
        "GLOO_SOCKET_IFNAME": interface,
    }
    if inherited.get("NCCL_SOCKET_IFNAME", "lo") == "lo":
        own["NCCL_SOCKET_IFNAME"] = interface  # the trainer may be on another machine
    if meeting.own.devices:
        # Ray shows a process its own device only. Ranks reach each other's memory, and vLLM takes device number LOCAL_RANK.
        of_machine = [device for rank in meeting.machine for device in meeting.locations[rank].devices]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(of_machine)
        own["VLLM_CACHE_ROOT"] = engine_cache(inherited, meeting.engine)
    return own


def _finish(call: _Call) -> None:
    call.done.wait()
    if call.error is not None:
        raise call.error
