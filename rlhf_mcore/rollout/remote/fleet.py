"""Manage the disaggregated engines of a run: jobs, health, and weights."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.protocols import EngineProcess, PeersLost
from rlhf_mcore.rollout.remote.backlog import FreeBacklog, OpenJobs, SharedBacklog
from rlhf_mcore.rollout.remote.fleet_state import REMEDY, STARTING, EnginesLost, EngineStatus, FleetEngine, FleetPlan
from rlhf_mcore.rollout.remote.host import EngineReport, RankRendezvous, without_rows
from rlhf_mcore.rollout.remote.lending import BorrowedTurns
from rlhf_mcore.types import EngineWork, Trajectory

if TYPE_CHECKING:
    from concurrent.futures import Future

    from rlhf_mcore.protocols import GroupSpec
    from rlhf_mcore.rollout.remote.cluster import Cluster, RayCall, RayProcess
    from rlhf_mcore.types import Job

START_TIMEOUT_S = 900.0  # timeout for the start of an engine, including imports, memory and graphs
_TICK_S = 0.25
_CLOSE_S = 30.0
_ROOM_S = 120.0  # wait for nodes that have not joined the cluster yet


class Fleet:
    """Runs jobs on all engines, and controls them for the bridge during a weight transfer.

    A separate thread starts the engines, checks them, reads their reports and resolves the futures of jobs. The caller's thread starts
    jobs and transfers weights. ``clock`` returns seconds.

    Every job has one outcome. If an engine fails, another engine runs its jobs again from the start, with the same seeds. The
    backlog assigns these jobs. An engine that starts or restarts receives weights at the next sync, and jobs only after that.

    A transfer calls ``pause``; ``join`` and ``finish`` if the processes or their group have changed; ``begin_sync`` and ``finish``;
    ``resume``. After a failure, the sequence starts again with ``pause``.
    """

    def __init__(
        self,
        machines: Cluster,
        plan: FleetPlan,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._machines, self._plan, self._note, self._clock = machines, plan, note, clock
        self._changed = threading.Condition(threading.RLock())
        self._numbers = count()
        self._engines: list[FleetEngine] = [self._new() for _ in range(plan.num_engines)]
        self._backlog: FreeBacklog | SharedBacklog = SharedBacklog(plan.num_engines) if plan.in_order else FreeBacklog()
        self._borrowed = BorrowedTurns(0 if plan.in_order else plan.slots)
        self._version = -1  # policy version of the newest weights
        self._open = OpenJobs(lambda text: self._notes.append(text))
        self._job_numbers = count()
        self._answers: list[tuple[Future[Trajectory], Trajectory]] = []  # to be resolved without the lock
        self._cancelled: deque[int] = deque()  # numbers of jobs whose futures were cancelled
        self._work = EngineWork()  # since ``pop_work``
        self._participants: list[tuple[FleetEngine, RayProcess]] | None = None  # while paused
        self._calls: list[tuple[FleetEngine, RayProcess, str, RayCall]] = []
        self._ended: list[tuple[str, Sequence[RayProcess]]] = []  # processes to be killed
        self._notes: list[str] = []
        self._error: Exception | None = None
        self._last_tick = clock()
        self._begun = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------ life
    def start(self) -> None:
        """Start the engines in the background."""
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._thread.start()

    def wait_until_ready(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Wait until all engines are built. ``progress`` receives a message with the number of built engines.

        Raises:
            ConfigError: Ray cannot be joined, the engines do not fit, or they cannot be built.
            EnginesLost: an engine has failed too often.
        """
        with self._check_and_lock():
            while waiting := sum(engine.state in STARTING for engine in self._engines):
                progress(f"{len(self._engines) - waiting} of {len(self._engines)} engines are up")
                self._changed.wait(1.0)
                self._check()

    def close(self) -> None:
        """Stop all engines, and Ray if it was started for them."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)  # may block if Ray's head is lost

    def _run(self) -> None:
        try:
            self._machines.connect()
            if problem := self._machines.capacity_problem(self._plan.num_engines, self._plan.engine_ranks, _ROOM_S):
                raise ConfigError(problem)
            while not self._closing.is_set():
                self.tick()
                with self._changed:
                    calls = [call for engine in self._engines for call in (*engine.starting, *engine.reports)]
                self._machines.wait(calls, _TICK_S)
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()
            self._resolve()
        finally:
            with suppress(Exception):
                self._machines.close()

    def tick(self) -> None:
        """Check every engine once: start it if due, read its reports, and restart it if it has failed."""
        for engine in list(self._engines):
            if engine.state == "due":
                self._spawn(engine)  # without the lock, because Ray may block
        with self._changed:
            now = self._clock()
            self._drop_cancelled()
            if now - self._last_tick > self._plan.timeout_s / 2:  # this process was stopped, not the engines
                for engine in self._engines:
                    engine.answered = [now] * len(engine.answered)
                    engine.progressed = engine.since = now
            self._last_tick = now
            for engine in list(self._engines):
                try:
                    if engine.state in ("ready", "serving"):
                        self._read_reports(engine, now)
                    elif engine.state in ("placing", "starting"):
                        self._advance_start(engine, now)
                except ConfigError:
                    raise
                except Exception as error:
                    self._fail(engine, f"{error}" or type(error).__name__)
            ended, self._ended = self._ended, []
            self._dispatch()
            self._changed.notify_all()
        for name, processes in ended:
            with suppress(Exception):  # their machine may be lost too
                self._machines.end(name, processes)
        self._print_notes()
        self._resolve()

    def _resolve(self) -> None:
        """Resolve the futures of finished jobs. After an error, all open jobs fail with it."""
        with self._changed:
            answers, self._answers, error = self._answers, [], self._error
            failed = self._open.futures() if error is not None else []
        for future, trajectory in answers:
            if future.set_running_or_notify_cancel():
                future.set_result(trajectory)
        for future in failed:
            if not future.done() and future.set_running_or_notify_cancel():
                future.set_exception(error)

    def _spawn(self, engine: FleetEngine) -> None:
        processes = self._machines.spawn(engine.key, self._plan.engine_ranks)
        with self._changed:
            if engine not in self._engines:  # it was removed in the meantime
                self._ended.append((engine.key, processes))
                return
            engine.processes, engine.state, engine.since = processes, "placing", self._clock()
            engine.starting = [process.call("locate", rank == 0) for rank, process in enumerate(processes)]
            engine.reports, engine.last_report = [], None

    def _advance_start(self, engine: FleetEngine, now: float) -> None:
        results = [call.result() for call in engine.starting if call.is_done()]
        if len(results) < len(engine.starting):
            if now - engine.since > START_TIMEOUT_S:
                raise EnginesLost(f"it was not ready after {START_TIMEOUT_S:.0f} s; is there room for it?")
        elif engine.state == "placing":
            plan, nodes = self._plan, list(dict.fromkeys(result.node for result in results))
            # Make ranks on a machine consecutive. The first process listens, so it stays the lead.
            order = sorted(range(len(results)), key=lambda place: nodes.index(results[place].node))
            engine.processes = [engine.processes[place] for place in order]
            locations = tuple(results[place] for place in order)
            engine.address, engine.state = locations[0].address, "starting"
            if len(nodes) > 1:
                engine.address += f" and {len(nodes) - 1} more machine{'s' * (len(nodes) > 2)}"
            engine.starting = [
                process.call("start", plan.order, RankRendezvous(locations, rank, engine.name), plan.threads)
                for rank, process in enumerate(engine.processes)
            ]
        else:
            engine.starting, engine.state = [], "ready"
            engine.reports = [self._ask(process) for process in engine.processes]
            engine.answered, engine.progressed = [now] * len(engine.reports), now
            when = "; it draws after the next publish" if self._begun else ""
            self._notes.append(
                f"engine {engine.name} is ready after {now - engine.since:.0f} s, at {engine.address}{when}"
            )
            told = dict.fromkeys(line for lines in results for line in lines or ())
            self._notes += [f"engine {engine.name}: {line}" for line in told]

    def _ask(self, process: RayProcess) -> RayCall:
        return process.call("report", min(1.0, self._plan.timeout_s / 4))

    def _read_reports(self, engine: FleetEngine, now: float) -> None:
        for rank, call in enumerate(engine.reports):
            if call.is_done():
                report = call.result()
                engine.answered[rank] = now
                engine.reports[rank] = self._ask(engine.processes[rank])
                if rank == 0:
                    self._take(engine, report, now)
            elif now - engine.answered[rank] > self._plan.timeout_s:
                raise EnginesLost(f"{engine.processes[rank].process} has not answered for {self._plan.timeout_s:g} s")
        if engine.state != "serving" or self._participants is not None or not engine.jobs:
            engine.progressed = now
        elif now - engine.progressed > self._plan.timeout_s:
            raise EnginesLost(f"it has drawn no token for {self._plan.timeout_s:g} s, although it has requests")
        if engine.draining and not engine.jobs:
            self._leave(engine)

    def _take(self, engine: FleetEngine, report: EngineReport, now: float) -> None:
        before = engine.last_report
        if before is None or (report.num_sampled_tokens, report.num_waits) != (
            before.num_sampled_tokens,
            before.num_waits,
        ):
            engine.progressed = now
        self._work += report.work - (before.work if before is not None else EngineWork())
        engine.last_report = report
        self._work += EngineWork(lent=self._borrowed.note(engine, report, self._serving()))
        for outcome in self._backlog.take(engine, report.outcomes):
            if isinstance(outcome.result, Exception):
                self._error = self._error or outcome.result
            elif not self._borrowed.answer(outcome, self._engines) and (each := self._open.close(outcome)):
                trajectory = outcome.result
                assert isinstance(trajectory, Trajectory), "only lent turns have completions"
                trajectory.prompt = trajectory.prompt or each.job.prompt
                self._answers.append((each.future, trajectory))
                engine.failures = 0

    def _fail(self, engine: FleetEngine, reason: str) -> None:
        if problem := self._machines.problem():
            raise EnginesLost(f"{problem}. {REMEDY}")
        engine.failures += 1
        if engine.failures > self._plan.restarts:
            raise EnginesLost(
                f"engine {engine.name} has failed {engine.failures} times in a row, and {self._plan.restarts} are allowed; "
                f"the last time: {reason}. {REMEDY}"
            )
        if engine.draining:
            self._leave(engine)
            return
        again = f", its {len(engine.jobs)} requests are drawn again" if engine.jobs else ""
        self._notes.append(f"engine {engine.name} has failed and is started again{again}: {reason}")
        self._release(engine)
        engine.state, engine.attempt = "due", engine.attempt + 1

    def _release(self, engine: FleetEngine) -> None:
        """Kill the processes of an engine, and queue its jobs for other engines."""
        if engine.processes:
            self._ended.append((engine.key, engine.processes))
        engine.processes, engine.starting, engine.reports, engine.answered = (), [], [], []
        self._open.lose(engine.jobs)
        self._backlog.put_back(engine)
        self._cancel(self._borrowed.lose(engine.key))
        engine.version = -1

    def _leave(self, engine: FleetEngine) -> None:
        self._release(engine)
        self._engines.remove(engine)
        self._notes.append(f"engine {engine.name} has left")

    # ------------------------------------------------------------------------------------------ generation
    def begin(self, jobs: Sequence[Job]) -> list[Future[Trajectory]]:
        """Start jobs. Returns a future of each trajectory; cancelling it stops the job. The numbers of jobs are not used.

        If the engines are lost, the futures raise EnginesLost.
        """
        self._check()
        own = [replace(job, number=next(self._job_numbers)) for job in jobs]
        with self._changed:
            self._drop_cancelled()
            futures = self._open.add(own, self._version)
            self._backlog.add(own, self._version)
            self._dispatch()
        for job, future in zip(own, futures, strict=True):
            future.add_done_callback(partial(self._note_end, job.number))
        return futures

    def _note_end(self, number: int, future: Future[Trajectory]) -> None:
        if future.cancelled():
            self._cancelled.append(number)  # without the lock, because any thread may hold locks of its own

    def _drop_cancelled(self) -> None:
        """Stop the jobs whose futures were cancelled since the last call."""
        if cancelled := [self._cancelled.popleft() for _ in range(len(self._cancelled))]:
            self._cancel(cancelled)

    def _cancel(self, numbers: Collection[int]) -> None:
        dropped = set(numbers)
        self._backlog.drop(dropped)
        self._open.drop(dropped)
        for engine in self._engines:
            if engine.share is not None:
                engine.share.drop(dropped)
            if mine := dropped & engine.jobs.keys():
                for number in mine:
                    del engine.jobs[number]
                engine.processes[0].call("cancel", sorted(mine))

    def needs_weights(self) -> bool:
        """Return whether engines wait for weights and no engine is serving.

        Raises:
            EnginesLost: an engine has failed too often, or Ray has ended.
        """
        self._check()
        with self._changed:
            states = [engine.state for engine in self._engines]
            return self._begun and self._participants is None and "serving" not in states and "ready" in states

    def _dispatch(self) -> None:
        """Assign waiting jobs to serving engines."""
        if self._participants is not None:
            return
        for engine, jobs in self._backlog.deal(self._serving()):
            sent = jobs if self._plan.sends_rows else without_rows(jobs)
            engine.processes[0].call("submit", sent, self._plan.in_order)
        self._borrowed.balance(self._serving())

    def _serving(self) -> list[FleetEngine]:
        return [engine for engine in self._engines if engine.state == "serving" and not engine.draining]

    # ------------------------------------------------------------------------------------------ weights
    def pause(self) -> list[EngineProcess]:
        """Stop all engines between two steps. Returns the healthy processes, in the order of their ranks in a group.

        The ranks of an engine are consecutive. Started or restarted engines that are ready are included. The first call waits for all
        engines. After a failed transfer, this is called again while the remaining engines are paused.
        """
        if not self._begun:
            self.wait_until_ready()
        with self._check_and_lock():
            self._cancel([] if self._open else self._borrowed.lose())  # lent turns of episodes that have ended
            self._begun, self._participants = True, []
            serving = [engine for engine in self._engines if engine.state == "serving"]
            self._begin([(engine, engine.processes[0]) for engine in serving], "pause")
        self.finish(self._plan.timeout_s)
        with self._check_and_lock():
            self._participants = [
                (engine, process)
                for engine in self._engines
                if engine.state in ("ready", "serving")
                for process in engine.processes
            ]
            return [EngineProcess(engine.name, process.process) for engine, process in self._participants]

    def join(self, specs: Sequence[GroupSpec], bridge: str) -> None:
        """Make the k-th process that ``pause`` returned call ``WeightReceiver.join`` with ``specs[k]``. Returns at once."""
        with self._check_and_lock():
            assert self._participants is not None and len(specs) == len(self._participants), "of the last pause"
            self._begin(self._participants, "join", [(spec, bridge) for spec in specs])

    def begin_sync(self, version: int) -> None:
        """Make every joined process call ``WeightReceiver.sync``. Returns at once."""
        with self._check_and_lock():
            assert self._participants is not None, "pause comes first"
            self._begin(self._participants, "sync", [(version,)] * len(self._participants))

    def _begin(
        self,
        processes: Sequence[tuple[FleetEngine, RayProcess]],
        name: str,
        arguments: Sequence[tuple[Any, ...]] | None = None,
    ) -> None:
        given = arguments if arguments is not None else [()] * len(processes)
        self._calls = [
            (engine, process, name, process.call(name, *values))
            for (engine, process), values in zip(processes, given, strict=True)
        ]

    def finish(self, timeout_s: float) -> list[str]:
        """Wait for the last call of ``join`` or ``begin_sync``. Returns the errors of all processes with their engines; [] on success.

        An engine has failed if one of its processes has ended, does not answer in time, or has raised an error other than
        :class:`PeersLost`. ``pause`` skips a failed engine until it has restarted. An engine that raised PeersLost is kept.
        """
        end, problems = self._clock() + timeout_s, []
        with self._changed:
            calls, self._calls = self._calls, []
        while (rest := end - self._clock()) > 0 and not all(call.is_done() for *_, call in calls):
            self._machines.wait([call for *_, call in calls], min(rest, 1.0), every=True)
            self._check()
        with self._changed:
            for engine, process, name, call in calls:
                try:
                    if not call.is_done():
                        raise EnginesLost(f"its {name} did not end within {timeout_s:g} s")
                    call.result()
                except PeersLost as error:
                    problems.append(f"engine {engine.name}: {error}")
                except Exception as error:
                    problems.append(f"engine {engine.name}: {error}")
                    if process in engine.processes:  # else the engine has failed already
                        try:
                            self._fail(engine, str(error))
                        except EnginesLost as lost:
                            self._error = lost
        return problems

    def resume(self, version: int) -> None:
        """Continue sampling on the paused engines, with weights of this version."""
        with self._check_and_lock():
            if self._plan.in_order and self._open.versions() - {version}:
                raise RuntimeError(f"weights of version {version} have come while requests of another are being drawn")
            paused, self._participants, self._version = self._participants or [], None, version
            for engine, process in paused:
                if process in engine.processes:
                    process.call("resume")
                    engine.state, engine.version, engine.progressed = "serving", version, self._clock()
            self._dispatch()

    # ------------------------------------------------------------------------------------------ members
    def pop_work(self) -> tuple[EngineWork, int]:
        """Return the reported work of all engines since the last call, and the number of responses with newer weights.

        The engine of such a response was lost, and another engine sampled it with newer weights than at its submission.
        """
        with self._changed:
            work, self._work = self._work, EngineWork()
            return work, self._open.pop_other()

    def num_sampled_tokens(self) -> int:
        """Return the number of tokens that engines have sampled since they started. It grows only while an engine makes progress."""
        return sum(engine.tokens for engine in self.status())

    def status(self) -> list[EngineStatus]:
        """Describe all engines."""
        with self._changed:
            return [EngineStatus.of(engine) for engine in self._engines]

    def add(self, number: int) -> list[str]:
        """Start additional engines and return their names. They sample after the next sync.

        Raises:
            ConfigError: they do not fit on Ray's machines.
        """
        if problem := self._machines.capacity_problem(len(self._engines) + number, self._plan.engine_ranks):
            raise ConfigError(problem)
        with self._changed:
            added = [self._new() for _ in range(number)]
            self._engines += added
            return [engine.name for engine in added]

    def drain(self, name: str) -> None:
        """Let an engine finish its jobs, and then stop it.

        Raises:
            ConfigError: no engine has this name, or it is the last engine.
        """
        with self._changed:
            engine = self._find_leaving(name)
            engine.draining = True
            if engine.state != "serving":
                self._leave(engine)

    def remove(self, name: str) -> None:
        """Stop an engine at once. Other engines run its jobs. Raises the errors of ``drain``."""
        with self._changed:
            self._leave(self._find_leaving(name))
            self._dispatch()

    def _find_leaving(self, name: str) -> FleetEngine:
        engines = [engine for engine in self._engines if engine.name == name]
        names = ", ".join(engine.name for engine in self._engines)
        if not engines:
            raise ConfigError(f"there is no engine {name!r}; there are {names}")
        if not any(engine is not engines[0] and not engine.draining for engine in self._engines):
            raise ConfigError(f"engine {name!r} is the last one; add another first")
        return engines[0]

    def _new(self) -> FleetEngine:
        return FleetEngine(str(next(self._numbers)))

    # ------------------------------------------------------------------------------------------ problems
    def _check_and_lock(self) -> threading.Condition:
        """Raise a pending error, or return the lock."""
        self._check()
        return self._changed

    def _print_notes(self) -> None:
        with self._changed:
            notes, self._notes = self._notes, []
        for text in notes:
            self._note(text)

    def _check(self) -> None:
        self._print_notes()
        error = self._error
        if error is None and (problem := self._machines.problem()) is not None:
            error = EnginesLost(f"{problem}. {REMEDY}")
        if error is not None:
            raise error
