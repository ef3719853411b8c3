"""Run programs that nobody trusts. What they print and return is judged by the caller, outside.

    result = run_python("print(input()[::-1])", stdin="abc")     # one program
    with Sandbox() as sandbox: sandbox.run(Program(code))          # many: a fork each, instead of an interpreter

What a machine gives differs; ``machine_level`` tells, and a caller names the least that it accepts.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from threading import Event, Lock
from typing import Any

import rlhf_mcore
from rlhf_mcore.own_processes import start
from rlhf_mcore.sandbox.usage import descendants, kill_below, memory_of, remove_scratch_of

LEVELS = ("rlimits", "filters", "namespaces")  # by rising isolation
NONE = "none"  # not even an interpreter of its own can be started
REMEDIES = {  # how a machine comes to give a level
    "rlimits": "find out why Python does not start with an empty environment",
    "filters": "use a kernel with Landlock (Linux 5.13, landlock in /sys/kernel/security/lsm) and install libseccomp2",
    "namespaces": "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0); "
    "start a container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined",
}
RUN, STOP = b"run", b"stop"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0  # for killing what a program has started
_LOOK_S = 0.1  # between looks at memory
TRIES = 3  # of a program whose sandbox ends; one that has ended so many is to blame
_READ_BYTES = 2**16
_MAX_MESSAGE_BYTES = 2**16
# What a program sees of the environment, with HOME and TMPDIR, its scratch directory.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set does not differ from run to run
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",  # libraries do not start a thread per core
    "OPENBLAS_NUM_THREADS": "1",
}
_OF_THE_INTERPRETER = ("LD_LIBRARY_PATH", "TMPDIR")  # which programs do not see
_BOOTSTRAP = (
    "import sys, json; sys.path[0] = sys.argv[2]; from rlhf_mcore.sandbox import inside; del sys.path[0]; "
    "inside.main(int(sys.argv[1]), json.loads(sys.argv[3]))"
)


class Reason(Enum):
    """Name the ways in which a program ends."""

    OK = "ok"  # with exit code 0
    WRONG = "wrong"  # with another one; of a test: with another result
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"  # by a signal
    OUTPUT_LIMIT = "output limit"
    REFUSED = "refused"  # it was not run: this machine does not give the isolation that was asked for


@dataclass(frozen=True, slots=True)
class Limits:
    """Bound what a program uses."""

    cpu_s: float = 10.0  # of the processor, each of its processes; rounded up to seconds
    wall_s: float = 0.0  # of the clock; 0: three times cpu_s and five more, so that a busy machine does not decide
    memory_bytes: int = 2 * 2**30  # all of its processes together
    scratch_bytes: int = 64 * 2**20  # its files, together
    output_bytes: int = 2**20  # of standard output, and of standard error
    processes: int = 32  # and threads
    files: int = 128  # open at a time, of each process

    @property
    def deadline_s(self) -> float:
        return self.wall_s or 3 * self.cpu_s + 5


@dataclass(frozen=True, slots=True)
class Result:
    """Hold the end of a program, and its output."""

    reason: Reason
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # None: ended by a signal, or not run
    cpu_s: float = 0.0
    detail: str = ""  # why it was refused

    @property
    def ok(self) -> bool:
        return self.reason is Reason.OK


@dataclass(frozen=True, slots=True)
class Program:
    """Python code (as a script, or as what is called or tested, see ``programs``) or a command."""

    text: str = ""
    kind: str = "script"  # script | call | serve | test | command
    name: str = ""  # call: of the function
    argv: tuple[str, ...] = ()  # command
    prelude: bool = False  # whether names that judges of contests import are there


@dataclass(frozen=True, slots=True)
class Level:
    """Hold what a machine gives: one of ``LEVELS`` or ``NONE``, the walls in words, and what is missing for more."""

    name: str
    walls: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def reaches(self, minimum: str) -> bool:
        return self.name in LEVELS[LEVELS.index(minimum) :]


def site_packages() -> list[str]:
    """List the directories of the packages that are installed beside this one."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


@lru_cache(maxsize=1)
def machine_level() -> Level:
    """Find the strongest isolation that this machine gives this user, by building it."""
    missing: list[str] = []
    for name in reversed(LEVELS):
        try:
            with Sandbox(name) as sandbox:
                level = sandbox.level
        except OSError as error:
            missing.append(f"{name}: {error}")
            continue
        return Level(level.name, level.walls, (*missing, *level.missing))
    return Level(NONE, (), tuple(missing))


def run_python(code: str, limits: Limits = Limits(), *, stdin: str = "", minimum: str = "filters") -> Result:
    """Run a Python program in a sandbox of its own: some 0.1 s. Packages that are installed beside this one can be imported.

    Args:
        minimum: of ``LEVELS``; if the machine gives less, the result is ``Reason.REFUSED``.
    """
    level = machine_level()
    if not level.reaches(minimum):
        return Result(Reason.REFUSED, detail=f"isolation is {level.name}, {minimum} was asked for")
    with Sandbox(level.name, site_packages()) as sandbox:
        return sandbox.run(Program(code), limits, stdin=stdin.encode(errors="replace"))


class Sandbox:
    """An interpreter behind walls, which forks a confined process for each program. One program at a time; closed with its starter.

    Args:
        level: of ``LEVELS``; None: the strongest that this machine gives.
        packages: directories that programs may read, and import from.
        places: directories that programs may write to beside the scratch directory, at level "namespaces".
        keeps: what a program has written is there for the next one, at level "namespaces". Such a sandbox is not started again
            when it has ended: every later program is refused.

    Raises:
        OSError: this machine does not give the level.
    """

    def __init__(
        self, level: str | None = None, packages: Sequence[str] = (), places: Sequence[str] = (), *, keeps: bool = False
    ) -> None:
        self._wanted, self._packages = level or machine_level().name, list(packages)
        self._places, self._keeps = list(places), keeps
        self._lock = Lock()
        self._has_ended = False  # and nobody has waited for it
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(rlhf_mcore.__file__).parents[1])
        libraries = os.environ.get("LD_LIBRARY_PATH", "")  # that the interpreter itself may need
        readable = [*self._packages, *filter(os.path.isdir, libraries.split(":"))]
        self._name = secrets.token_hex(8)
        options: dict[str, Any] = {"level": self._wanted, "readable": readable, "name": self._name}
        options |= {"places": self._places, "keeps": self._keeps}
        with theirs:
            self._process: subprocess.Popen[bytes] = start(
                [sys.executable, "-s", "-S", "-c", _BOOTSTRAP, str(theirs.fileno()), root, json.dumps(options)],
                env={name: os.environ[name] for name in _OF_THE_INTERPRETER if name in os.environ} | _ENVIRONMENT,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(theirs.fileno(),),
            )
        self._control.settimeout(START_TIMEOUT_S)
        try:
            hello = json.loads(self._control.recv(_MAX_MESSAGE_BYTES) or b'{"failed": ""}')
        except (OSError, ValueError) as error:
            hello = {"failed": str(error)}
        if "failed" in hello or LEVELS.index(hello["level"]) < LEVELS.index(self._wanted):
            self._process.kill()
            assert self._process.stderr is not None
            printed = self._process.stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
            self.close()
            raise OSError(hello.get("failed") or "; ".join(hello.get("missing", ())) or printed or "it did not start")
        self.level = Level(hello["level"], tuple(hello["walls"]), tuple(hello["missing"]))
        self._control.setblocking(False)
        self._own = set(descendants(self._process.pid))
        self._has_ended = False

    def _memory(self) -> int:
        """Count the bytes that the programs in it hold."""
        return memory_of([pid for pid in descendants(self._process.pid) if pid not in self._own])

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Return whether its interpreter is gone, with everything that was in it."""
        return self._has_ended or self._process.poll() is not None

    def close(self) -> None:
        """Kill everything that is in it."""
        self._control.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)  # it ends, and removes its files, when the socket is closed
        except subprocess.TimeoutExpired:
            kill_below(self._process.pid)
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        remove_scratch_of(self._name)  # where it could not

    def run(
        self, program: Program, limits: Limits = Limits(), *, stdin: bytes = b"", cancelled: Event | None = None
    ) -> Result:
        """Run a program to its end, or to that of its limits. ``cancelled``: kill it once this is set."""
        with self._lock, _close_if_interrupted(self):
            return _run_to_end(lambda: [_Running(self, program, limits, stdin, cancelled=cancelled)], self)

    def test(self, code: Program, test: Program, tester: Sandbox, limits: Limits = Limits()) -> Result:
        """Run ``test`` (kind "test") in the sandbox ``tester`` against ``code`` (kind "serve") in this one. The result is the test's.

        If the code was stopped for its usage, that is the reason instead.
        """

        def begin() -> list[_Running]:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                return [_Running(tester, test, limits, b"", ours), _Running(self, code, limits, b"", theirs)]

        with self._lock, tester._lock, _close_if_interrupted(self, tester):
            return _run_to_end(begin, self, tester)


@contextmanager
def _close_if_interrupted(*sandboxes: Sandbox) -> Iterator[None]:
    """Close sandboxes after Ctrl-C: nobody waits for the answers, which the next program must not be given."""
    try:
        yield
    except BaseException:
        for sandbox in sandboxes:
            sandbox.close()
        raise


@dataclass(slots=True)
class _Output:
    """One of a program's two streams."""

    descriptor: int
    limit: int
    data: bytearray = field(default_factory=bytearray)
    is_open: bool = True

    def __del__(self) -> None:
        os.close(self.descriptor)

    @property
    def is_full(self) -> bool:
        return len(self.data) > self.limit

    def read(self) -> bool:
        """Take what is there. False: it is more than the limit, of which nothing is kept but the fact."""
        with suppress(BlockingIOError):
            while self.is_open and not self.is_full:
                part = os.read(self.descriptor, min(_READ_BYTES, self.limit + 1 - len(self.data)))
                self.is_open = bool(part)
                self.data += part
        self.is_open &= not self.is_full
        return not self.is_full

    @property
    def text(self) -> str:
        return self.data[: self.limit].decode(errors="replace")


class _Running:
    """A program that has been given to a sandbox."""

    def __init__(
        self,
        sandbox: Sandbox,
        program: Program,
        limits: Limits,
        stdin: bytes,
        channel: socket.socket | None = None,
        cancelled: Event | None = None,
    ) -> None:
        if sandbox.has_ended:
            sandbox.close()
            if sandbox._keeps:
                raise OSError("what was in it is lost")
            sandbox._start()
        self.sandbox, self.limits, self.cancelled = sandbox, limits, cancelled
        self.deadline = time.monotonic() + limits.deadline_s
        self.next_look = time.monotonic() + _LOOK_S
        self.stopped: Reason | None = None  # why it was stopped
        self.answer: dict[str, Any] | None = None
        self.is_lost = False  # the answer is none: its sandbox has ended
        order = {
            "kind": program.kind,
            "name": program.name,
            "argv": program.argv,
            "prelude": program.prelude,
            "packages": sandbox._packages,
            "limits": {**asdict(limits), "cpu_s": max(1, math.ceil(limits.cpu_s))},
        }
        pipes = [os.pipe(), os.pipe()]
        given = [_file(stdin), *(writing for _, writing in pipes), _file(program.text.encode(errors="replace"))]
        given.append(os.open(os.devnull, os.O_RDONLY) if channel is None else os.dup(channel.fileno()))
        given.append(_file(json.dumps(order).encode()))  # it may be longer than a message
        self.streams = [_Output(reading, limits.output_bytes) for reading, _ in pipes]
        for stream in self.streams:
            os.set_blocking(stream.descriptor, False)
        try:
            with suppress(OSError):  # the sandbox has ended, which ``look`` finds
                socket.send_fds(sandbox._control, [RUN], given)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def interests(self) -> list[int]:
        """Return the descriptors to wait for."""
        return [self.sandbox._control.fileno(), *(stream.descriptor for stream in self.streams if stream.is_open)]

    def look(self) -> None:
        """Take what has come, and stop the program if it has had enough."""
        for stream in self.streams:
            if stream.is_open and not stream.read():
                self.stop(Reason.OUTPUT_LIMIT)
        try:
            data = self.sandbox._control.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            pass
        except ConnectionError:
            self._lose()
        else:
            self.answer = json.loads(data) if data else None
            if not data:
                self._lose()
        if self.answer is not None:
            return
        if self.cancelled is not None and self.cancelled.is_set():
            self.stop(Reason.KILLED)
        if time.monotonic() >= self.deadline:
            if self.stopped is not None:  # and it does not end
                self.sandbox.close()
                self.answer = {"status": signal.SIGKILL, "cpu_s": 0.0}
            self.stop(Reason.TIMEOUT)
        elif time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + _LOOK_S
            if self.sandbox._memory() > self.limits.memory_bytes:
                self.stop(Reason.MEMORY)

    def _lose(self) -> None:
        """Note that the sandbox has ended, whatever the reason."""
        self.is_lost = self.sandbox._has_ended = True
        self.answer = {"status": signal.SIGKILL, "cpu_s": 0.0}

    def stop(self, reason: Reason) -> None:
        """Have it killed; its answer comes when all is gone."""
        if self.stopped is None and self.answer is None:
            self.stopped, self.deadline = reason, time.monotonic() + STOP_TIMEOUT_S
            with suppress(OSError):
                self.sandbox._control.send(STOP)

    def finish(self) -> Result:
        """Return the result, when the answer has come."""
        assert self.answer is not None
        for stream in self.streams:
            stream.read()
        out, err = (stream.text for stream in self.streams)
        if "failed" in self.answer:
            return Result(Reason.REFUSED, detail=self.answer["failed"])
        code, cpu_s = os.waitstatus_to_exitcode(self.answer["status"]), self.answer["cpu_s"]
        # Stopped for its time, it may have ended before it was killed.
        stopped = None if code >= 0 and self.stopped is Reason.TIMEOUT else self.stopped
        is_full = self.answer.get("is_full") or any(stream.is_full for stream in self.streams)
        reason = stopped or (Reason.OUTPUT_LIMIT if is_full else None)
        if reason is None and code < 0:
            spent = -code in (signal.SIGKILL, signal.SIGXCPU) and cpu_s >= 0.9 * self.limits.cpu_s
            reason = Reason.TIMEOUT if spent else Reason.KILLED
        if reason is None and code > 0:
            last = err.rstrip().rpartition("\n")[2]
            reason = Reason.MEMORY if last.startswith("MemoryError") else Reason.WRONG
        return Result(reason or Reason.OK, out, err, code if code >= 0 else None, cpu_s)


def _run_to_end(begin: Callable[[], list[_Running]], *sandboxes: Sandbox) -> Result:
    """Run programs. If a sandbox ends meanwhile, it is started again and they run again, ``TRIES`` times at most."""
    result = Result(Reason.KILLED)
    for _ in range(TRIES):
        try:
            running = begin()
        except OSError as error:  # it cannot be started again
            result = Result(Reason.REFUSED, detail=f"the sandbox has ended, and cannot be started again: {error}")
            for sandbox in sandboxes:  # one may have been given its program, whose answer is nobody's
                sandbox.close()
            continue
        result = _supervise(running)
        if not any(each.is_lost for each in running):
            break
    return result


def _supervise(running: Sequence[_Running]) -> Result:
    """Wait until the first program has ended; the others are stopped then."""
    first, *others = running
    while any(each.answer is None for each in running):
        poll = select.poll()
        for each in running:
            if each.answer is None:
                for descriptor in each.interests():
                    poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * _LOOK_S)
        for each in running:
            if each.answer is None:
                each.look()
        for other in others:
            if first.answer is not None:
                other.stop(Reason.OK)
    results = [each.finish() for each in running]
    cpu_s = sum(result.cpu_s for result in results)
    used_up = (Reason.TIMEOUT, Reason.MEMORY, Reason.KILLED, Reason.OUTPUT_LIMIT, Reason.REFUSED)
    if not results[0].ok:
        results[0] = next((result for result in results[1:] if result.reason in used_up), results[0])
    return replace(results[0], cpu_s=cpu_s)


def _file(data: bytes) -> int:
    """Make a file in memory that holds ``data``, to be read from its start, and that cannot be changed."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor
