"""Owns the processes that the package starts: each in a session of its own, killed with its whole group, ended with its parent.

``start`` and ``kill_group`` are for programs. :class:`WorkerProcess` is for code of the user that may raise, hang, exit, fork or fill
the memory: a fresh interpreter that sees a short list of environment variables and no credentials, and talks JSON over a socket.
Nothing is pickled. ``map_in_fork`` is for short calls with objects of this process. The functions at the end are for a worker's own
side. For Linux.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import rlhf_mcore

STARTED_BY = "RLHF_MCORE_STARTED_BY"  # process id of the parent, in the environment of its child
# What a worker's program needs to find its files and to print; a user adds names by reward.env.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
# The order of sets does not differ from worker to worker, and libraries do not start a thread per core in each of them.
SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
START_TIMEOUT_S = 300.0  # for the imports of a user's file
MAX_STARTS = 3  # of processes that signals end while they load a file; another program may have sent one
MAX_FRAME_BYTES = 2**28  # a worker of ours writes no longer message
DISCONNECTED = 74  # EX_IOERR of sysexits.h: a worker ends with it when it cannot send

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 30.0
_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 2**16
_READS = 4  # of a worker's output, at a time
_SHOWN_CHARS = 2**16  # that a worker may print for an item
_TAIL_CHARS = 1000  # of a worker's output, kept for the message about its end
# The working directory is not searched for modules of the standard library, as it is by -c and -m.
_BOOTSTRAP = (
    "import sys; del sys.path[0]; sys.path.append(sys.argv[2]); "
    "from importlib import import_module; import_module(sys.argv[3]).main(int(sys.argv[1]))"
)

# Each line is the id of a process group: the first time it is to be kept, the second time it has ended.
_KEEPER = """
import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
kept = set()
for line in open(0):
    kept ^= {int(line)}
for group in kept:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a program in a session of its own: Ctrl-C in a terminal reaches this process alone. ``options``: of ``Popen``."""
    return subprocess.Popen(list(command), start_new_session=True, **options)


def kill_group(process: subprocess.Popen[Any], wait_s: float = 10.0) -> None:
    """Kill a program that ``start`` has started, with its whole group, and wait until it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=wait_s)


class ProcessGroupReaper:
    """A process that kills the process groups it keeps when this process is gone.

    A group of its own outlives its parent, and nobody kills it where the parent is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] = start(
            [sys.executable, "-I", "-S", "-c", _KEEPER],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def keep(self, group: int) -> None:
        """Keep a process group."""
        self._tell(group)

    def release(self, group: int) -> None:
        """Forget a process group, which has ended."""
        self._tell(group)

    def _tell(self, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # somebody has killed the keeper
            self._process.stdin.write(f"{group}\n".encode())


def signal_name(number: int) -> str:
    """Return the name of a signal; those for real time have none."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def end_with_parent(number: signal.Signals) -> None:
    """Receive signal ``number`` when the process that started this one ends; at once if it has ended already."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(os.environ.get(STARTED_BY, parent)):
        os.kill(os.getpid(), number)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit: the usual 1,024 are too few for the sockets of some hundred ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that ``end_all(children())`` finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> Iterator[int]:
    """Yield the ids of the processes whose parent is this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        status = _status(int(folder.name))
        if status is not None and int(status[1]) == os.getpid():
            yield int(folder.name)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits for its parent to read its exit code."""
    status = _status(pid)
    return status is None or status[0] == "Z"


def end_all(pids: Iterable[int]) -> None:
    """Kill children of this process with their process groups, and wait until they are gone."""
    pids = list(pids)
    for pid in pids:
        with suppress(OSError):
            own_group = os.getpgid(pid) == pid
            (os.killpg if own_group else os.kill)(pid, signal.SIGKILL)
    end = time.monotonic() + _REAP_S
    for pid in pids:
        with suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < end:
                time.sleep(0.01)


def _status(pid: int) -> list[str] | None:
    """Read [state, parent, ...] of a process; None where it is gone."""
    try:
        # pid (name) state parent ...; the name may hold anything
        return (
            (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class FrameError(ValueError):
    """Bytes that are no frame."""


def pack(text: bytes) -> bytes:
    """Make a frame of a JSON text."""
    if len(text) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(text)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(text)) + text


def encode(value: Any) -> bytes:
    """Make a frame of a value. It is pure ASCII, so that lone surrogates travel too."""
    return pack(json.dumps(value).encode("ascii"))


def decode(buffer: bytearray) -> Iterator[Any]:
    """Take all whole frames from the start of ``buffer``, and yield their values.

    Raises:
        FrameError: they are not frames.
    """
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"a message of {length} bytes is announced")
        end = _LENGTH.size + length
        if len(buffer) < end:
            return
        text = bytes(buffer[_LENGTH.size : end])
        del buffer[:end]
        try:
            yield json.loads(text)
        except ValueError as error:
            raise FrameError(f"a message is not JSON: {error}") from error


@dataclass(slots=True)
class ProcessLost(Exception):
    """A process has ended or answers no more: its cause in words, or that its time is over."""

    cause: str
    timed_out: bool = False


def loading_problem(name: str, cause: str, was_killed: bool) -> str:
    """Return the message about a file whose process has ended while it was loaded."""
    if was_killed:
        return f"{name} {cause}, {MAX_STARTS} times in a row: correct the file if it does this itself, or free memory on this machine"
    return f"{name} {cause}: correct the file"


class WorkerProcess:
    """One process, which runs ``main`` of the module ``program``.

    Args:
        order: a frame that tells it what to load.
        env: names of further environment variables that it sees.
    """

    def __init__(self, order: bytes, env: Sequence[str], program: str) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(rlhf_mcore.__file__).parents[1])
        names = (*ENVIRONMENT, *env)
        with theirs:
            self.process: subprocess.Popen[bytes] = start(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), root, program],
                env={name: os.environ[name] for name in names if name in os.environ} | SETTINGS,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
            )
        assert self.process.stdout is not None
        ours.setblocking(False)
        os.set_blocking(self.process.stdout.fileno(), False)
        self._connection, self._printed = ours, self.process.stdout.fileno()
        self._exit = os.pidfd_open(self.process.pid)  # readable when the process has ended
        self._outgoing, self._incoming = bytearray(order), bytearray()
        self._messages: deque[dict[str, Any]] = deque()  # that ``receive`` has not returned yet
        self._disconnected = False
        self.tail, self._shown_chars = "", 0

    def send(self, frame: bytes) -> None:
        """Have a frame sent by the next calls of ``exchange``."""
        self._outgoing += frame

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """Wait for a message.

        Raises:
            ProcessLost: none comes.
        """
        deadline = time.monotonic() + timeout_s
        while not self._messages:
            poll = select.poll()
            for descriptor, wanted in self.interests():
                poll.register(descriptor, wanted)
            poll.poll(max(0, math.ceil(1000 * min(deadline - time.monotonic(), 60.0))))
            ending = self.ending()  # asked before the last messages are read, so that none is lost
            self._messages += self.exchange()
            if self._messages:
                break
            if ending is not None or self._disconnected:
                raise ProcessLost(ending or "was disconnected")
            if time.monotonic() >= deadline:
                raise ProcessLost("", timed_out=True)
        return self._messages.popleft()

    def disconnect(self) -> None:
        """Close the connection, which ends the process group. May be called by another thread than ``receive``."""
        self._disconnected = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def interests(self) -> list[tuple[int, int]]:
        """Return the descriptors to wait for, and for what."""
        wanted = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        return [(self._connection.fileno(), wanted), (self._exit, select.POLLIN), (self._printed, select.POLLIN)]

    def exchange(self) -> list[dict[str, Any]]:
        """Send and receive what can be without waiting. Returns the messages that have come.

        Raises:
            ProcessLost: something else has come.
        """
        with suppress(BlockingIOError, ConnectionError):
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing[:_RECEIVE_BYTES])]
        with suppress(BlockingIOError, ConnectionError):
            while data := self._connection.recv(_RECEIVE_BYTES):
                self._incoming += data
        self._show_printed()
        try:
            messages = list(decode(self._incoming))
        except FrameError as error:
            raise ProcessLost(f"broke its connection ({error})") from error
        if messages:
            self._shown_chars = 0
        return messages

    def _show_printed(self) -> None:
        """Show it up to a bound for each item, so that no disk is filled; a few reads at a time, so that nobody waits for its end."""
        with suppress(BlockingIOError):
            for _ in range(_READS):
                text = os.read(self._printed, _RECEIVE_BYTES).decode(errors="replace")
                self.tail = (self.tail + text)[-_TAIL_CHARS:]
                room, self._shown_chars = _SHOWN_CHARS - self._shown_chars, self._shown_chars + len(text)
                sys.stderr.write(text[: max(room, 0)])
                if 0 <= room < len(text):
                    sys.stderr.write(
                        f"\n(the rest of what process {self.process.pid} prints for this item is left out)\n"
                    )

    def ending(self) -> str | None:
        """Return how the process has ended, or None. It is not reaped: until ``stop``, its number is not given to another one."""
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED and status.si_status == DISCONNECTED:
            return "closed the descriptors of its process"
        if status.si_code == os.CLD_EXITED:
            return f"ended its process with exit code {status.si_status}"
        return f"was ended by {signal_name(status.si_status)}"

    @property
    def was_killed(self) -> bool:
        """Return whether a signal has ended the process."""
        status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return status is not None and status.si_code != os.CLD_EXITED

    def stop(self) -> None:
        """Kill the process and its whole group."""
        kill_group(self.process)
        self._connection.close()
        os.close(self._exit)
        assert self.process.stdout is not None
        self.process.stdout.close()


def map_in_fork(
    function: Callable[[Any], Any], inputs: Sequence[Any], *, cpu_s: int, memory_bytes: int
) -> Iterator[Any]:
    """Yield the JSON value that ``function`` returns for each input, from a forked child whose resources the kernel bounds.

    Args:
        cpu_s: processor time for each input, so the load of the machine does not matter.
        memory_bytes: beyond the memory of this process.

    Raises:
        ProcessLost: the child has ended before its last answer; ``timed_out``: it took too much time.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # It is about threads, but the child runs no code that takes their locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reading)
        _serve_fork(function, inputs, writing, cpu_s, memory_bytes)
    os.close(writing)
    has_ended = False
    try:
        with os.fdopen(reading, "rb") as lines:
            for _ in inputs:
                line = lines.readline()
                if not line.endswith(b"\n"):
                    _, status = os.waitpid(child, 0)
                    has_ended = True
                    code = os.waitstatus_to_exitcode(status)
                    raise ProcessLost(f"its process ended with {code}", timed_out=code == -signal.SIGXCPU)
                yield json.loads(line)
    finally:
        if not has_ended:
            # A child that nobody reads from ends with a broken pipe.
            os.waitpid(child, 0)


def _serve_fork(
    function: Callable[[Any], Any], inputs: Sequence[Any], writing: int, cpu_s: int, memory_bytes: int
) -> NoReturn:
    """Run the child. It ends here, without the exit handlers of its parent."""
    code = 1
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            allowed = int(statm.read().split()[0]) * resource.getpagesize() + memory_bytes
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(
            resource.RLIMIT_AS, (allowed if most == resource.RLIM_INFINITY else min(allowed, most), most)
        )
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with os.fdopen(writing, "wb") as lines:
            for item in inputs:
                used = resource.getrusage(resource.RUSAGE_SELF)
                seconds = int(used.ru_utime + used.ru_stime) + cpu_s + 1
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
                lines.write(json.dumps(function(item)).encode("ascii") + b"\n")
                # Without it an earlier input would be blamed when the child is ended.
                lines.flush()
        code = 0
    finally:
        os._exit(code)


def receive_messages(connection: socket.socket) -> Iterator[Any]:
    """Yield the messages of the starter, until it closes the connection."""
    buffer = bytearray()
    while data := connection.recv(_RECEIVE_BYTES):
        buffer += data
        yield from decode(buffer)


def end_group_with(descriptor: int) -> None:
    """End this process group with its starter, whatever the worker is doing and whatever it has started.

    The kernel ends this process with the thread that has started it. Its children are ended by a second process, which waits
    until the starter's end of the socket is closed.
    """
    end_with_parent(signal.SIGKILL)
    if os.fork() == 0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        closed = select.poll()
        closed.register(descriptor, select.POLLRDHUP)
        closed.poll()
        os.killpg(0, signal.SIGKILL)


def limit_memory(memory_bytes: int) -> None:
    """Have allocations of this process, and of each that it starts, fail beyond ``memory_bytes``."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of the data, not of the address space: libraries reserve much of that and use little.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
