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
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Union

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
    from rlhf_mcore.types import Completion, Job, Prompt, Request, Trajectory

# ("submit", work), ("cancel", numbers), ("forget", []) for cached prefixes, or ("pause", []). A lead with episodes also
# receives ("lend", number of turns) and ("take_back", completion of a turn).
Order = tuple[str, Any]

_WAIT_S = 0.05  # maximum wait for environments before checking for new orders

_FOREVER = timedelta(days=3650)  # ranks wait for each other while the engine is idle; the trainer stops them


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification of a rank of an engine.

    ``receiver`` builds the engine's end of the bridge; pickle stores only its name.
    ``episodes`` builds the driver of episodes, on the engine's first rank.
    """

    cfg: RolloutConfig
    model: EngineModel
    receiver: Callable[[LiveWeights], WeightReceiver]
    episodes: Callable[[], EpisodeDriver] | None = None
    directory: str = ""  # working directory for relative paths, if it exists; Ray may use a different one
    deterministic: bool = False
    binds_numa: bool = False


@dataclass(frozen=True, slots=True)
class Location:
    """The place of an engine's rank. ``devices`` are the devices from Ray, as in CUDA_VISIBLE_DEVICES."""

    address: str
    port: int  # port on which the lead listens; 0 for other ranks
    devices: tuple[str, ...] = ()
    node: str = ""  # Ray's id of the machine


@dataclass(frozen=True, slots=True)
class RankRendezvous:
    """The locations of an engine's ranks, in rank order. The lead (rank 0) listens. Ranks on a machine are consecutive."""

    locations: tuple[Location, ...]
    rank: int
    engine: str = "0"  # name of the engine in the run

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
class BorrowedTurn:
    """A turn of a rollout of another engine. ``number``: as in ``Job``."""

    number: int
    request: Request

    @property
    def prompt_ids(self) -> Sequence[int]:
        """Return the tokens before the turn."""
        return self.request.prompt_ids


Work = Union["Job", BorrowedTurn]


def without_rows(work: Sequence[Work]) -> list[Work]:
    """Return the work without the parts of prompts that only environments need. Samples still share their prompt."""
    prompts: dict[int, Prompt] = {}
    sent: list[Work] = []
    for each in work:
        if isinstance(each, BorrowedTurn):
            sent.append(each)
            continue
        key = id(each.prompt)
        if key not in prompts:
            more: dict[str, Any] = {"ground_truth": None, "extra_info": {}, "messages": None, "question": None}
            prompts[key] = replace(each.prompt, text="", **more)
        sent.append(replace(each, prompt=prompts[key]))
    return sent


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The trajectory of the job ``number``, the completion of a borrowed turn, or the error that ended it."""

    number: int
    result: Trajectory | Completion | Exception

    @property
    def version(self) -> int:
        """Return the version of the policy that sampled the first token."""
        assert not isinstance(self.result, Exception), "it has tokens"
        return self.result.versions[0][1]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The report of a rank: outcomes since its last report, and its progress. Only the lead reports outcomes.

    ``work`` is the total since the start, including cancelled requests. ``num_held``: turns of episodes that wait for a free slot.
    ``lent``: turns that another engine shall sample.
    """

    outcomes: list[Outcome]
    tokens_drawn: int
    num_in_flight: int
    version: int
    num_waits: int = 0  # number of waits for environments
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
    """A Ray actor that runs a rank of an engine.

    Several threads may call its methods. The engine's thread performs the calls of all methods except ``report``.

    The lead receives requests and broadcasts to the other ranks how to perform each step. ``pause`` stops all ranks between two
    steps. ``join``, ``sync`` and ``leave`` run between ``pause`` and ``resume``.
    """

    def __init__(self) -> None:
        os.environ.pop(STARTED_BY, None)  # it names the trainer's parent, not the parent of this process
        end_with_parent(signal.SIGKILL)
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()  # for a lead that is not paused
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()  # while paused
        self._paused, self._failed = threading.Event(), threading.Event()
        self._news = threading.Condition()
        self._outcomes: list[Outcome] = []
        self._work: dict[int, Work] = {}  # jobs and turns in progress, by number
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
        """Return the location of this rank. A lead starts listening for the other ranks."""
        import ray

        address = str(ray.util.get_node_ip_address())
        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        if is_lead:
            self._listening = listener(address)
        port = 0 if self._listening is None else int(self._listening.getsockname()[1])
        return Location(address, port, tuple(map(str, devices)), str(ray.get_runtime_context().get_node_id()))

    def start(self, order: EngineSpec, meeting: RankRendezvous, threads: int) -> list[str]:
        """Build the engine together with its other ranks. It is paused and has no weights yet. Return lines for the run's log.

        Raises:
            ConfigError: the engine's constructor rejects the settings.
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
    def submit(self, work: Sequence[Work], afresh: bool = False) -> None:
        """Start jobs and turns. For leads; returns at once.

        ``afresh``: forget cached prefixes first. The idle engine then samples as if these were the first jobs with its weights.
        """
        if afresh:
            self._orders.put(("forget", []))
        self._orders.put(("submit", work))

    def cancel(self, numbers: Collection[int]) -> None:
        """Stop these jobs and turns. For leads; returns at once."""
        self._orders.put(("cancel", list(numbers)))

    def lend(self, number: int) -> None:
        """Lend at most ``number`` held turns. A later report contains them. For leads; returns at once."""
        self._orders.put(("lend", number))

    def take_back(self, request_id: int, turn: Completion) -> None:
        """Receive a turn that another engine has sampled. For leads; returns at once."""
        self._orders.put(("take_back", replace(turn, request_id=request_id)))

    def report(self, wait_s: float) -> EngineReport:
        """Wait for an outcome or a lent turn, at most ``wait_s`` seconds, and return a report. Do not call it concurrently.

        Raises:
            BaseException: the error that has ended the engine's thread.
        """
        with self._news:
            self._news.wait_for(lambda: self._outcomes or self._lent or self._error is not None, wait_s)
            if self._error is not None:
                raise self._error
            outcomes, self._outcomes = self._outcomes, []
            lent, self._lent = self._lent, []
            return EngineReport(outcomes, *self._progress, lent)

    # ------------------------------------------------------------------------------------------ weights
    def pause(self) -> None:
        """Stop all ranks of the engine between two steps. For leads. Does nothing if the engine is already paused."""
        if not self._paused.is_set():  # else the order would stop it again after ``resume``
            self._orders.put(("pause", []))
        while not self._paused.wait(0.2):
            if self._failed.is_set():
                raise RuntimeError("the engine has failed")

    def resume(self) -> None:
        """Continue after a pause. Call this on every rank."""
        self._do(self._paused.clear)

    def join(self, spec: GroupSpec, bridge: str) -> None:
        """See :class:`rlhf_mcore.protocols.WeightReceiver`, also for ``sync`` and ``leave``. For every rank of a paused engine."""
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
        except BaseException as error:  # ``report`` raises it in the trainer, which ends this process
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
            call.error = error  # raised in the caller; the receiver decides whether the weights are still usable
        finally:
            call.done.set()

    def _serve_with_peers(self) -> None:
        """Perform one step. Shorten the error if a rank of the engine is lost, because gloo's message shows its source code."""
        from rlhf_mcore.parallel.joint_group import connections

        try:
            with connections():
                self._serve_once()
        except PeersLost as error:
            cause = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
            raise PeersLost(f"one of its ranks is lost to the others ({cause})") from error

    def _serve_once(self) -> None:
        """Perform one step. The lead first broadcasts the changes before the step to the other ranks."""
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
        """Return the changes that all ranks make before the next step. Requests for episodes become their due turns. For leads."""
        from rlhf_mcore.sampling.followers import EnginePass

        episodes, cancelled, requests = self._episodes, list[int](), list["Request"]()
        kinds = {kind for kind, _ in orders}
        for kind, what in orders:
            if kind == "submit":
                self._work |= {work.number: work for work in what}
                asked = [self._request_of(work) for work in what]
                requests += asked if episodes is None else episodes.begin(asked)
            elif kind == "cancel":
                cancelled += what
                for number in what:
                    self._work.pop(number, None)
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

    def _request_of(self, work: Work) -> Request:
        from rlhf_mcore.sampling.requests import episode_request, request_of
        from rlhf_mcore.types import Job

        if not isinstance(work, Job):
            return replace(work.request, request_id=work.number)
        return request_of(work) if self._episodes is None or work.is_single_turn else episode_request(work)

    def _outcome(self, completion: Completion) -> Outcome:
        from rlhf_mcore.sampling.checks import check_completion
        from rlhf_mcore.sampling.requests import request_of
        from rlhf_mcore.sampling.rollouts import single_turn_trajectory
        from rlhf_mcore.types import Job

        work = self._work.pop(completion.request_id)
        if not isinstance(work, Job):
            return Outcome(work.number, completion)
        trajectory = completion.trajectory
        if trajectory is None:
            try:
                check_completion(request_of(work), completion)
            except RuntimeError as error:
                return Outcome(work.number, error)
            trajectory = single_turn_trajectory(work, completion, self._engine.decode)
        if trajectory.prompt is work.prompt:
            trajectory = replace(trajectory, prompt=None)  # the fleet has it
        return Outcome(work.number, trajectory)

    def _waiting_orders(self, *, block: bool) -> list[Order]:
        orders = [self._orders.get()] if block else []
        while not self._orders.empty():
            orders.append(self._orders.get())
        return orders

    def _tell(self, completions: list[Completion], work: EngineWork) -> None:
        engine, done = self._engine, self._progress[4] + work
        held = self._episodes.num_held if self._episodes is not None else 0
        with self._news:
            self._outcomes += map(self._outcome, completions)
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
    """Return the environment variables to set in a rank. Ray on the trainer's machine passes on the first rank's variables."""
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
        # Ray shows each process only its own device. But ranks access each other's memory, and vLLM uses device LOCAL_RANK.
        of_machine = [device for rank in meeting.machine for device in meeting.locations[rank].devices]
        own["CUDA_VISIBLE_DEVICES"] = ",".join(of_machine)
        own["VLLM_CACHE_ROOT"] = engine_cache(inherited, meeting.engine)
    return own


def _finish(call: _Call) -> None:
    call.done.wait()
    if call.error is not None:
        raise call.error
