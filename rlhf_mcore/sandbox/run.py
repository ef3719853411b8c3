"""Run untrusted programs. The caller judges their output outside the sandbox.

    result = run_python("print(input()[::-1])", stdin="abc")     # one program
    with Sandbox() as sandbox: sandbox.run(Program(code))          # many programs: a fork each, instead of an interpreter

Machines support different levels of isolation. ``machine_level`` returns the strongest, and callers state their minimum.
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

LEVELS = ("rlimits", "filters", "namespaces")  # in order of increasing isolation
NONE = "none"  # not even a separate interpreter can be started
REMEDIES = {  # how to reach a level
    "rlimits": "find out why Python does not start with an empty environment",
    "filters": "use a kernel with Landlock (Linux 5.13, landlock in /sys/kernel/security/lsm) and install libseccomp2",
    "namespaces": "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0); "
    "start a container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined",
}
RUN, STOP = b"run", b"stop"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0  # to kill the processes of a program
_LOOK_S = 0.1  # interval between memory checks
TRIES = 3  # per program whose sandbox ends; after that the program is the cause
_READ_BYTES = 2**16
_MAX_MESSAGE_BYTES = 2**16
# The environment of a program, together with HOME and TMPDIR, its scratch directory.
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # makes the order of sets reproducible
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",  # otherwise libraries start a thread per core
    "OPENBLAS_NUM_THREADS": "1",
}
_OF_THE_INTERPRETER = ("LD_LIBRARY_PATH", "TMPDIR")  # not visible to programs
_BOOTSTRAP = (
    "import sys, json; sys.path[0] = sys.argv[2]; from rlhf_mcore.sandbox import inside; del sys.path[0]; "
    "inside.main(int(sys.argv[1]), json.loads(sys.argv[3]))"
)


class Reason(Enum):
    """How a program ended."""

    OK = "ok"  # exit code 0
    WRONG = "wrong"  # another exit code; for a test: another result
    TIMEOUT = "timeout"
    MEMORY = "memory"
    KILLED = "killed"  # by a signal
    OUTPUT_LIMIT = "output limit"
    REFUSED = "refused"  # not run, because this machine lacks the requested isolation


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program."""

    cpu_s: float = 10.0  # CPU time of each process; rounded up to seconds
    wall_s: float = 0.0  # wall time; 0: 3 * cpu_s + 5, so that the load of the machine does not decide
    memory_bytes: int = 2 * 2**30  # sum over all its processes
    scratch_bytes: int = 64 * 2**20  # sum over its files
    output_bytes: int = 2**20  # for standard output and standard error each
    processes: int = 32  # including threads
    files: int = 128  # open files of each process

    @property
    def deadline_s(self) -> float:
        return self.wall_s or 3 * self.cpu_s + 5


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a program, and its output."""

    reason: Reason
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None  # None: killed by a signal, or not run
    cpu_s: float = 0.0
    detail: str = ""  # why it was not run

    @property
    def ok(self) -> bool:
        return self.reason is Reason.OK


@dataclass(frozen=True, slots=True)
class Program:
    """Python code (a script, a function to call or code to test, see ``programs``) or a command."""

    text: str = ""
    kind: str = "script"  # script | call | serve | test | command
    name: str = ""  # call: name of the function
    argv: tuple[str, ...] = ()  # command
    prelude: bool = False  # whether the names that contest judges import are available


@dataclass(frozen=True, slots=True)
class Level:
    """The isolation of a machine: one of ``LEVELS`` or ``NONE``, the walls as texts, and problems with higher levels."""

    name: str
    walls: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def reaches(self, minimum: str) -> bool:
        return self.name in LEVELS[LEVELS.index(minimum) :]


def site_packages() -> list[str]:
    """List the package directories of this interpreter."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


@lru_cache(maxsize=1)
def machine_level() -> Level:
    """Find the strongest isolation for this user on this machine, by building it."""
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
    """Run a Python program in a new sandbox, which takes about 0.1 s. It can import the packages of this interpreter.

    Args:
        minimum: one of ``LEVELS``; if the machine does not support it, the result is ``Reason.REFUSED``.
    """
    level = machine_level()
    if not level.reaches(minimum):
        return Result(Reason.REFUSED, detail=f"isolation is {level.name}, but {minimum} is required")
    with Sandbox(level.name, site_packages()) as sandbox:
        return sandbox.run(Program(code), limits, stdin=stdin.encode(errors="replace"))


class Sandbox:
    """A confined interpreter, which forks a process for each program. It runs one program at a time, and ends with its starter.

    Args:
        level: one of ``LEVELS``; None: the strongest on this machine.
        packages: directories that programs may read and import from.
        places: directories that programs may write to, in addition to the scratch directory, at level "namespaces".
        keeps: files of a program stay for the next program, at level "namespaces". After its end, such a sandbox is not
            restarted and rejects every later program.

    Raises:
        OSError: this machine does not support the level.
    """

    def __init__(
        self, level: str | None = None, packages: Sequence[str] = (), places: Sequence[str] = (), *, keeps: bool = False
    ) -> None:
        self._wanted, self._packages = level or machine_level().name, list(packages)
        self._places, self._keeps = list(places), keeps
        self._lock = Lock()
        self._has_ended = False  # set before the process is reaped
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        root = str(Path(rlhf_mcore.__file__).parents[1])
        libraries = os.environ.get("LD_LIBRARY_PATH", "")  # the interpreter itself may need them
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
        """Return the memory of the programs in the sandbox in bytes."""
        return memory_of([pid for pid in descendants(self._process.pid) if pid not in self._own])

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def has_ended(self) -> bool:
        """Return whether its interpreter has ended, together with all its programs."""
        return self._has_ended or self._process.poll() is not None

    def close(self) -> None:
        """Kill all processes in the sandbox."""
        self._control.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)  # it ends and removes its files when the socket is closed
        except subprocess.TimeoutExpired:
            kill_below(self._process.pid)
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()
        remove_scratch_of(self._name)  # in case the sandbox could not remove them itself

    def run(
        self, program: Program, limits: Limits = Limits(), *, stdin: bytes = b"", cancelled: Event | None = None
    ) -> Result:
        """Run a program until it ends or reaches a limit. ``cancelled``: kill it when this event is set."""
        with self._lock, _close_if_interrupted(self):
            return _run_to_end(lambda: [_Running(self, program, limits, stdin, cancelled=cancelled)], self)

    def test(self, code: Program, test: Program, tester: Sandbox, limits: Limits = Limits()) -> Result:
        """Run ``test`` (kind "test") in ``tester`` against ``code`` (kind "serve") in this sandbox, and return its result.

        If the code was stopped because of a limit, the result has this reason instead.
        """

        def begin() -> list[_Running]:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                return [_Running(tester, test, limits, b"", ours), _Running(self, code, limits, b"", theirs)]

        with self._lock, tester._lock, _close_if_interrupted(self, tester):
            return _run_to_end(begin, self, tester)


@contextmanager
def _close_if_interrupted(*sandboxes: Sandbox) -> Iterator[None]:
    """Close sandboxes after Ctrl-C, because the next program must not receive the pending answers."""
    try:
        yield
    except BaseException:
        for sandbox in sandboxes:
            sandbox.close()
        raise


@dataclass(slots=True)
class _Output:
    """An output stream of a program: standard output or standard error."""

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
        """Read available data. Return False if the stream exceeds its limit."""
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
    """A program that was sent to a sandbox."""

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
                raise OSError("its files are lost")
            sandbox._start()
        self.sandbox, self.limits, self.cancelled = sandbox, limits, cancelled
        self.deadline = time.monotonic() + limits.deadline_s
        self.next_look = time.monotonic() + _LOOK_S
        self.stopped: Reason | None = None  # reason if it was stopped
        self.answer: dict[str, Any] | None = None
        self.is_lost = False  # there is no real answer, because the sandbox has ended
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
        given.append(_file(json.dumps(order).encode()))  # as a file, because it may exceed the size of a message
        self.streams = [_Output(reading, limits.output_bytes) for reading, _ in pipes]
        for stream in self.streams:
            os.set_blocking(stream.descriptor, False)
        try:
            with suppress(OSError):  # the sandbox has ended; ``look`` detects this
                socket.send_fds(sandbox._control, [RUN], given)
        finally:
            for descriptor in given:
                os.close(descriptor)

    def interests(self) -> list[int]:
        """Return the descriptors to poll."""
        return [self.sandbox._control.fileno(), *(stream.descriptor for stream in self.streams if stream.is_open)]

    def look(self) -> None:
        """Read available data, and stop the program if it exceeds a limit."""
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
            if self.stopped is not None:  # the program was stopped and has not ended
                self.sandbox.close()
                self.answer = {"status": signal.SIGKILL, "cpu_s": 0.0}
            self.stop(Reason.TIMEOUT)
        elif time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + _LOOK_S
            if self.sandbox._memory() > self.limits.memory_bytes:
                self.stop(Reason.MEMORY)

    def _lose(self) -> None:
        """Record that the sandbox has ended, for any reason."""
        self.is_lost = self.sandbox._has_ended = True
        self.answer = {"status": signal.SIGKILL, "cpu_s": 0.0}

    def stop(self, reason: Reason) -> None:
        """Request that it is killed. Its answer arrives when all its processes are gone."""
        if self.stopped is None and self.answer is None:
            self.stopped, self.deadline = reason, time.monotonic() + STOP_TIMEOUT_S
            with suppress(OSError):
                self.sandbox._control.send(STOP)

    def finish(self) -> Result:
        """Return the result after the answer has arrived."""
        assert self.answer is not None
        for stream in self.streams:
            stream.read()
        out, err = (stream.text for stream in self.streams)
        if "failed" in self.answer:
            return Result(Reason.REFUSED, detail=self.answer["failed"])
        code, cpu_s = os.waitstatus_to_exitcode(self.answer["status"]), self.answer["cpu_s"]
        # A program stopped for its time may have ended before it was killed.
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
    """Run programs. If a sandbox ends during the run, restart it and run them again, at most ``TRIES`` times."""
    result = Result(Reason.KILLED)
    for _ in range(TRIES):
        try:
            running = begin()
        except OSError as error:  # the sandbox cannot be restarted
            result = Result(Reason.REFUSED, detail=f"the sandbox has ended, and cannot be started again: {error}")
            for sandbox in sandboxes:  # another sandbox may have received its program; drop its answer
                sandbox.close()
            continue
        result = _supervise(running)
        if not any(each.is_lost for each in running):
            break
    return result


def _supervise(running: Sequence[_Running]) -> Result:
    """Wait until the first program has ended, then stop the others."""
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
    """Create an immutable in-memory file with ``data``, positioned at its start. Return its descriptor."""
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return descriptor
