"""Run a rank of a remote engine in a process that Ray starts. One thread runs the engine and its rollouts."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.engine_kinds import engine_kind
from rlhf_mcore.coroutines import Background
from rlhf_mcore.expected_kernels import kernels_text
from rlhf_mcore.own_processes import STARTED_BY, end_with_parent
from rlhf_mcore.parallel.addresses import interface_of, listener
from rlhf_mcore.protocols import PeersLost
from rlhf_mcore.rollout.vllm.environment import engine_cache
from rlhf_mcore.types import EngineWork, Job, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.config.schema import RolloutConfig
    from rlhf_mcore.protocols import GroupSpec, LiveWeights, WeightReceiver
    from rlhf_mcore.rollout.engine import EngineModel, LiveEngine
    from rlhf_mcore.sampling.engine_loop import EngineLoop
    from rlhf_mcore.sampling.followers import EnginePass
    from rlhf_mcore.sampling.rollouts import LocalPlayer, RolloutSetup
    from rlhf_mcore.types import Completion, Prompt, Request

_WAIT_S = 0.25  # interval between two counted waits for environments
_FOREVER = timedelta(days=3650)  # ranks wait for each other while the engine is idle; the trainer stops them


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The specification of a rank of an engine.

    ``receiver`` builds the engine's end of the bridge; pickle stores only its name.
    ``episodes`` builds the rollouts of a run with an environment, on the engine's first rank.
    """

    cfg: RolloutConfig
    model: EngineModel
    receiver: Callable[[LiveWeights], WeightReceiver]
    episodes: Callable[[], RolloutSetup] | None = None
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


Work = Job | BorrowedTurn


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
class JobOutcome:
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

    outcomes: list[JobOutcome]
    num_sampled_tokens: int
    num_in_flight: int
    version: int
    num_waits: int = 0  # number of waits for environments
    work: EngineWork = field(default_factory=EngineWork)
    num_held: int = 0
    lent: list[Request] = field(default_factory=list)


class EngineHost:
    """A Ray actor that runs a rank of an engine.

    Several threads may call its methods. The engine's thread performs the calls of all methods except ``report``.

    The lead receives jobs, and sends the passes of its :class:`rlhf_mcore.sampling.engine_loop.EngineLoop` to the other ranks.
    ``pause`` stops all ranks between two passes. ``join``, ``sync`` and ``leave`` run between ``pause`` and ``resume``.
    """

    def __init__(self) -> None:
        os.environ.pop(STARTED_BY, None)  # it names the trainer's parent, not the parent of this process
        end_with_parent(signal.SIGKILL)
        self._thread = Background("engine")
        self._passes: asyncio.Task[None] | None = None  # the passes since the last ``resume``
        self._tasks: dict[int, asyncio.Task[Any]] = {}  # jobs and turns in progress, by number
        self._news = threading.Condition()  # its lock protects the following fields
        self._outcomes: list[JobOutcome] = []
        self._lent: list[Request] = []
        self._error: BaseException | None = None
        self._progress = EngineReport([], 0, 0, -1)
        self._listening: socket.socket | None = None
        self._is_lead = True
        self._joining: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._engine: LiveEngine
        self._receiver: WeightReceiver
        self._setup: RolloutSetup | None = None
        self._slots: int | None = None
        self._loop: EngineLoop
        self._player: LocalPlayer

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
        self._call(lambda: self._start(order, meeting, threads))
        kernels = self._engine.kernels()
        return [*([kernels_text(kernels)] if kernels else []), *self._engine.warnings]

    def _start(self, order: EngineSpec, meeting: RankRendezvous, threads: int) -> None:
        from rlhf_mcore.sampling.engine_loop import EngineLoop
        from rlhf_mcore.sampling.rollouts import LocalPlayer, RolloutSetup

        self._build(order, meeting, threads)
        setup = self._setup or RolloutSetup()
        slots = self._slots if setup.moves_turns else None
        self._loop = EngineLoop(self._engine, self._run_pass, in_order=setup.in_order, slots=slots, places=setup.places)
        self._player = LocalPlayer(self._loop, self._engine.decode, setup)

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
            self._setup = order.episodes()
            self._slots = None if order.deterministic else order.cfg.slots

    # ------------------------------------------------------------------------------------------ generation
    def submit(self, work: Sequence[Work], afresh: bool = False) -> None:
        """Start jobs and turns. For leads; returns at once.

        ``afresh``: forget cached prefixes first. The idle engine then samples as if these were the first jobs with its weights.
        """
        self._post(self._submit(work, afresh))

    async def _submit(self, work: Sequence[Work], afresh: bool) -> None:
        if afresh:
            self._loop.forget_prefixes()
        task: asyncio.Task[Any]
        for each in work:
            if isinstance(each, Job):
                [task] = self._player.begin([each])
            else:
                task = self._loop.begin(self._loop.sample(each.request))
            self._tasks[each.number] = task
            task.add_done_callback(partial(self._finish, each))

    def _finish(self, work: Work, task: asyncio.Task[Any]) -> None:
        """Report the outcome of a task, unless it was cancelled. The fleet knows the prompt of a trajectory if it is unchanged."""
        if self._tasks.pop(work.number, None) is not task or task.cancelled():
            return
        result: Any = task.exception() or task.result()
        if isinstance(result, Trajectory) and isinstance(work, Job) and result.prompt is work.prompt:
            without_prompt: Any = {"prompt": None}
            result = replace(result, **without_prompt)
        with self._news:
            self._outcomes.append(JobOutcome(work.number, result))
            self._news.notify_all()

    def cancel(self, numbers: Collection[int]) -> None:
        """Stop these jobs and turns. For leads; returns at once."""

        async def cancel() -> None:
            for number in numbers:
                if (task := self._tasks.pop(number, None)) is not None:
                    task.cancel()

        self._post(cancel())

    def lend_turns(self, number: int) -> None:
        """Lend at most ``number`` held turns. A later report contains them. For leads; returns at once."""

        async def lend() -> None:
            with self._news:
                self._lent += self._loop.move_held(number)
                self._news.notify_all()

        self._post(lend())

    def take_back(self, request_id: int, turn: Completion) -> None:
        """Receive a turn that another engine has sampled. For leads; returns at once."""

        async def take_back() -> None:
            self._loop.resolve(request_id, turn)

        self._post(take_back())

    def report(self, wait_s: float) -> EngineReport:
        """Wait for an outcome or a lent turn, at most ``wait_s`` seconds, and return a report. Do not call it concurrently.

        Raises:
            BaseException: the error that has ended the engine's passes.
        """
        with self._news:
            self._news.wait_for(lambda: self._outcomes or self._lent or self._error is not None, wait_s)
            if self._error is not None:
                raise self._error
            report = replace(self._progress, outcomes=self._outcomes, lent=self._lent)
            self._outcomes, self._lent = [], []
            return report

    # ------------------------------------------------------------------------------------------ weights
    def pause(self) -> None:
        """Stop all ranks of the engine between two passes. For leads. Does nothing if the engine is already paused."""
        self._thread.start(self._pause()).result()

    async def _pause(self) -> None:
        if self._passes is None:
            return
        if not self._passes.done():
            self._loop.pause()
            await asyncio.wait([self._passes])
        if self._error is not None:
            raise RuntimeError("the engine has failed")

    def resume(self) -> None:
        """Continue after a pause. Call this on every rank."""
        self._thread.start(self._resume()).result()

    async def _resume(self) -> None:
        self._passes = asyncio.create_task(self._serve())

    def join(self, spec: GroupSpec, bridge: str) -> None:
        """See :class:`rlhf_mcore.protocols.WeightReceiver`, also for ``sync`` and ``leave``. For every rank of a paused engine."""
        self._call(lambda: self._receiver.join(spec, bridge), self._joining)

    def sync(self, version: int) -> None:
        """Receive the weights of a version."""
        self._call(lambda: self._receiver.sync(version), self._joining)

    def leave(self) -> None:
        """Leave the group."""
        self._call(self._receiver.leave)

    def _call(self, action: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Run a function on the engine's thread, and wait until it returns."""

        async def call() -> None:
            with around():
                action()

        self._thread.start(call()).result()

    # ------------------------------------------------------------------------------------------ the engine's thread
    def _post(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine on the engine's thread, without waiting. Its error is an error of the engine."""

        def check(done: Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self._fail(error)

        self._thread.start(coroutine).add_done_callback(check)

    async def _serve(self) -> None:
        """Run passes until a pause. If a rank of the engine is lost, gloo's message shows its source code and is shortened."""
        from rlhf_mcore.parallel.collectives import world_group
        from rlhf_mcore.parallel.joint_group import connections
        from rlhf_mcore.sampling.followers import follow

        waits = asyncio.ensure_future(self._count_waits())
        try:
            with connections():
                if self._is_lead:
                    await self._loop.serve()
                else:
                    follow(self._engine, world_group())
        except PeersLost as error:
            cause = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]
            self._fail(PeersLost(f"one of its ranks is lost to the others ({cause})"))
        except BaseException as error:
            self._fail(error)
        finally:
            waits.cancel()

    def _fail(self, error: BaseException) -> None:
        """Let ``report`` raise an error in the trainer, which then ends this process."""
        with self._news:
            self._error = error
            self._news.notify_all()

    async def _count_waits(self) -> None:
        """Count waits for environments. They are progress, although no token is sampled."""
        while True:
            await asyncio.sleep(_WAIT_S)
            if self._is_lead and self._loop.is_waiting:
                with self._news:
                    self._progress = replace(self._progress, num_waits=self._progress.num_waits + 1)

    def _run_pass(self, made: EnginePass) -> Sequence[Completion]:
        """Run a pass on all ranks of the engine. For leads."""
        from rlhf_mcore.parallel.collectives import world_group

        engine, began = self._engine, time.perf_counter()
        if engine.num_ranks > 1:
            made.send(world_group())
        made.begin(engine)
        num_steps = int(not made.pauses and engine.num_in_flight > 0)
        before = engine.num_sampled_tokens if made.cancelled else self._progress.num_sampled_tokens
        completions = made.step(engine)
        work = EngineWork(num_steps, engine.num_sampled_tokens - before, time.perf_counter() - began)
        work = replace(work, preemptions=engine.pop_preemptions()) if num_steps else EngineWork()
        with self._news:
            self._progress = replace(
                self._progress,
                num_sampled_tokens=engine.num_sampled_tokens,
                num_in_flight=engine.num_in_flight,
                version=engine.policy_version,
                work=self._progress.work + work,
                num_held=self._loop.num_held,
            )
        return completions


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
