"""Worker processes beside the trainer, for code that may raise, hang, exit, fork or fill the memory.

A worker is a fresh interpreter in a session of its own. It sees a short list of environment variables and no credentials,
talks JSON over a socket, and ends with the trainer. One that exits, or holds an item for longer than allowed, is killed with
its whole process group and replaced.
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import rlhf_mcore
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.rewards.frames import DISCONNECTED, FrameError, decode, encode, pack

# What a program needs to find its files and to print; a user adds names by reward.env.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
# The order of sets does not differ from worker to worker, and libraries do not start a thread per core in each of them.
SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
START_TIMEOUT_S = 300.0  # for the imports of a user's file
MAX_LOST_IN_A_ROW = 10  # after so many items without an answer, the others would be waited for in vain
MAX_WORKERS = 8  # by default; a function that waits for a server wants more
MAX_CHUNK = 32  # items that a worker is given at a time
_RECEIVE_BYTES = 2**16
_TAIL_CHARS = 1000  # of what a worker has printed, kept for the message about its end
# The working directory is not searched for modules of the standard library, as it is by -c and -m.
_BOOTSTRAP = (
    "import sys; del sys.path[0]; sys.path.append(sys.argv[2]); "
    "from rlhf_mcore.rewards.worker import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What a pool may use."""

    workers: int
    timeout_s: float = 60.0  # for one item
    memory_gib: float = 8.0  # of each worker
    env: tuple[str, ...] = ()  # names of variables that workers get beside ``ENVIRONMENT``
    retries: int = 1  # of an item whose worker has ended or was killed, each on a fresh one


def default_workers() -> int:
    """This rank's share of the cores of its machine, at most ``MAX_WORKERS``."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    share = len(os.sched_getaffinity(0)) // max(int(ranks) if ranks.isdecimal() else 1, 1)
    return max(1, min(MAX_WORKERS, share))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What has come of an item: the worker's answer, or why there is none."""

    answer: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    timed_out: bool = False


class _Worker:
    """One process, with what it was given and has not answered yet."""

    def __init__(self, order: bytes, env: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(rlhf_mcore.__file__).parents[1])
        names = (*ENVIRONMENT, *env)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), root],
                env={name: os.environ[name] for name in names if name in os.environ} | SETTINGS,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self.process.stdout is not None
        ours.setblocking(False)
        os.set_blocking(self.process.stdout.fileno(), False)
        self.connection, self.printed = ours, self.process.stdout.fileno()
        self.exit = os.pidfd_open(self.process.pid)  # readable when the process has ended
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.ready = False
        self.held: deque[int] = deque()  # in the order in which they will be answered
        self.outgoing, self.incoming = bytearray(order), bytearray()
        self.tail = ""

    def interests(self) -> list[tuple[int, int]]:
        """Descriptors to wait for, and for what."""
        wanted = select.POLLIN | (select.POLLOUT if self.outgoing else 0)
        return [(self.connection.fileno(), wanted), (self.exit, select.POLLIN), (self.printed, select.POLLIN)]

    def exchange(self) -> list[dict[str, Any]]:
        """Send and receive what can be without waiting. Returns the messages that have come.

        Raises:
            FrameError: something else has come.
        """
        with suppress(BlockingIOError, ConnectionError):
            while self.outgoing:
                del self.outgoing[: self.connection.send(self.outgoing[:_RECEIVE_BYTES])]
        with suppress(BlockingIOError, ConnectionError):
            while data := self.connection.recv(_RECEIVE_BYTES):
                self.incoming += data
        with suppress(BlockingIOError):
            while data := os.read(self.printed, _RECEIVE_BYTES):
                text = data.decode(errors="replace")
                self.tail = (self.tail + text)[-_TAIL_CHARS:]
                sys.stderr.write(text)
        return list(decode(self.incoming))

    def ending(self) -> str | None:
        """How the process has ended, or None. It is not reaped: until ``stop``, its number is not given to another one."""
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED and status.si_status == DISCONNECTED:
            return "closed the descriptors of its process"
        if status.si_code == os.CLD_EXITED:
            return f"ended its process with exit code {status.si_status}"
        return f"was ended by {signal.Signals(status.si_status).name}"

    def stop(self) -> None:
        """Kill the process and its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.connection.close()
        os.close(self.exit)
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(slots=True)
class _Job:
    """The items of one call."""

    items: Sequence[bytes]
    waiting: deque[int]
    outcomes: list[Outcome | None]
    tries: Counter[int] = field(default_factory=Counter)
    unfinished: int = 0
    failed: bool = False

    @classmethod
    def of(cls, items: Sequence[bytes]) -> _Job:
        return cls(items, deque(range(len(items))), [None] * len(items), unfinished=len(items))

    def finish(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.unfinished -= 1
        self.failed |= bool(outcome.lost) or "error" in outcome.answer


class WorkerPool:
    """Runs items on workers that have all loaded the same thing. Workers are started when there is something to do.

    Args:
        name: what is loaded, for messages.
        load, options: its name among ``worker.LOADERS``, and arguments.
        limits: how many workers, and what each of them may use.
    """

    def __init__(self, name: str, load: str, options: Mapping[str, Any], limits: WorkerLimits) -> None:
        memory_bytes = int(min(limits.memory_gib * 2**30, 2.0**62))  # what a limit of the kernel can be
        self._name, self._limits = name, limits
        self._order = encode({"load": load, "options": dict(options), "memory_bytes": memory_bytes})
        self._workers: list[_Worker] = []
        self._lost_in_a_row = 0
        self._lock = Lock()
        self.close = weakref.finalize(self, _stop_all, self._workers, os.getpid())

    def check(self) -> None:
        """Start a worker, so that what cannot be loaded is found now.

        Raises:
            ConfigError: it cannot be loaded.
        """
        with self._lock:
            self._replace_ended()
            worker = self._workers[0] if self._workers else self._start()
            job = _Job.of([])
            while not worker.ready:
                self._round(job)

    def run(self, items: Sequence[bytes], *, stop_at_failure: bool = False) -> list[Outcome | None]:
        """One outcome per item (a JSON text), in order.

        With ``stop_at_failure`` the rest is left, as None, once an item is lost or its answer has an entry "error".

        Raises:
            ConfigError: nothing can be loaded, or ``MAX_LOST_IN_A_ROW`` items in a row were lost.
        """
        with self._lock:
            self._replace_ended()
            job = _Job.of(items)
            try:
                while job.unfinished and not (stop_at_failure and job.failed):
                    self._give_out(job)
                    self._round(job)
            finally:
                for worker in [worker for worker in self._workers if worker.held]:
                    self._discard(worker)
            return job.outcomes

    def _replace_ended(self) -> None:
        """Forget workers that have ended while there was nothing to do, such as with the thread that had started them."""
        for worker in [worker for worker in self._workers if worker.ending() is not None]:
            self._discard(worker)

    def _start(self) -> _Worker:
        worker = _Worker(self._order, self._limits.env)
        self._workers.append(worker)
        return worker

    def _discard(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.stop()

    def _give_out(self, job: _Job) -> None:
        chunk = max(1, min(MAX_CHUNK, len(job.items) // (4 * self._limits.workers)))
        while job.waiting:
            idle = next((worker for worker in self._workers if not worker.held), None)
            if idle is None and len(self._workers) >= self._limits.workers:
                return
            indices = [job.waiting.popleft() for _ in range(min(chunk, len(job.waiting)))]
            self._give(idle or self._start(), job, indices)

    def _give(self, worker: _Worker, job: _Job, indices: Sequence[int]) -> None:
        worker.outgoing += pack(b"[" + b",".join(job.items[index] for index in indices) + b"]")
        worker.held.extend(indices)
        if worker.ready:
            worker.deadline = time.monotonic() + self._limits.timeout_s

    def _round(self, job: _Job) -> None:
        """Wait until something has happened, and take note of it."""
        poll = select.poll()
        for worker in self._workers:
            for descriptor, wanted in worker.interests():
                poll.register(descriptor, wanted)
        due = min((w.deadline for w in self._workers if w.held or not w.ready), default=math.inf) - time.monotonic()
        poll.poll(max(0, math.ceil(1000 * min(due, 60.0))))
        for worker in list(self._workers):
            ending = worker.ending()  # asked before the last messages are read, so that none is lost
            try:
                messages = worker.exchange()
            except FrameError as error:
                self._lose(worker, job, f"broke its connection ({error})")
                continue
            for message in messages:
                self._take(worker, job, message)
            if worker not in self._workers:
                continue
            if ending is not None:
                self._lose(worker, job, ending)
            elif (worker.held or not worker.ready) and time.monotonic() >= worker.deadline:
                self._lose(worker, job, "", timed_out=True)

    def _take(self, worker: _Worker, job: _Job, message: dict[str, Any]) -> None:
        worker.deadline = time.monotonic() + self._limits.timeout_s
        if "problem" in message:
            self._discard(worker)
            raise ConfigError(message["problem"])
        if "ready" in message:
            worker.ready = True
        elif "lost" in message:
            self._lose(worker, job, f"{message['lost']} (reward.memory_gib={self._limits.memory_gib:g})")
        else:
            self._lost_in_a_row = 0
            job.finish(worker.held.popleft(), Outcome(message))

    def _lose(self, worker: _Worker, job: _Job, cause: str, timed_out: bool = False) -> None:
        """Kill a worker. The item that it was at is tried again alone on a fresh one, or is lost; the others wait."""
        self._discard(worker)
        tail = f"; it last printed: {worker.tail.strip()!r}" if worker.tail.strip() else ""
        if not worker.ready:
            cause = f"took longer than {START_TIMEOUT_S:g} s" if timed_out else cause
            raise ConfigError(f"{self._name} {cause} while it was loaded{tail}: correct the file")
        if timed_out:
            cause = f"gave no result within reward.timeout_s={self._limits.timeout_s:g} s"
        if not worker.held:
            return
        index = worker.held.popleft()
        job.waiting.extendleft(reversed(worker.held))
        job.tries[index] += 1
        if job.tries[index] <= self._limits.retries:
            self._give(self._start(), job, [index])
            return
        job.finish(index, Outcome(lost=cause + tail, timed_out=timed_out))
        self._lost_in_a_row += 1
        if self._limits.retries and self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise ConfigError(
                f"{self._name} gave no result for {self._lost_in_a_row} responses in a row; for the last of them it {cause}{tail}: "
                "correct it, or give it more with reward.timeout_s and reward.memory_gib"
            )


def _stop_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # and not in a process that was forked from it
        while workers:
            workers.pop().stop()
