"""Start and end the processes of this package. Each has its own session, is killed with its group, and ends with its parent.

``start`` and ``kill_group`` are for programs. :class:`WorkerProcess` is for user code, which may raise, hang, exit, fork or fill the
memory. It is a new interpreter that sees only a short list of environment variables without credentials, and exchanges JSON over a
socket. Nothing is pickled. ``map_in_fork`` is for short calls with objects of this process. The functions at the end run inside a
worker. For Linux.
"""

from __future__ import annotations

import ctypes
import json
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import rlhf_mcore

STARTED_BY = "RLHF_MCORE_STARTED_BY"  # environment variable of a child with the process id of its parent
# Variables that a worker needs to find its files and to print; users add names with reward.env.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
# All workers order sets in the same way, and libraries do not start one thread per core in each worker.
SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
START_TIMEOUT_S = 300.0  # for the imports of a user's file
MAX_STARTS = (
    3  # attempts if a signal ends a process while it loads a file, because another program may have sent the signal
)
MAX_FRAME_BYTES = 2**28  # no worker sends longer messages
DISCONNECTED = 74  # EX_IOERR of sysexits.h: exit code of a worker that cannot send

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_REAP_S = 30.0
_LENGTH = struct.Struct("!I")
_RECEIVE_BYTES = 2**16
_READS = 4  # reads of a worker's output per call
_SHOWN_CHARS = 2**16  # characters that a worker may print per item
_TAIL_CHARS = 1000  # last characters of a worker's output for the message about its end
# Unlike with -c and -m, the working directory cannot shadow modules of the standard library.
_BOOTSTRAP = (
    "import sys; del sys.path[0]; sys.path.append(sys.argv[2]); "
    "from importlib import import_module; import_module(sys.argv[3]).main(int(sys.argv[1]))"
)

# Each line is the id of a process group: the first line registers the group, the second line releases it.
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
    """Start a program in its own session, so that Ctrl-C in a terminal reaches only this process. ``options`` are for ``Popen``."""
    return subprocess.Popen(list(command), start_new_session=True, **options)


def kill_group(process: subprocess.Popen[Any], wait_s: float = 10.0) -> None:
    """Kill a program from ``start`` with its whole process group, and wait until it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=wait_s)


class ProcessGroupReaper:
    """A helper process that kills registered process groups when this process ends.

    Without it, a process group would continue to run if its parent is killed.
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
        """Register a process group."""
        self._tell(group)

    def release(self, group: int) -> None:
        """Release a process group that has ended."""
        self._tell(group)

    def _tell(self, group: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # another program has killed the helper process
            self._process.stdin.write(f"{group}\n".encode())


def signal_name(number: int) -> str:
    """Return the name of a signal, or "signal N" for real-time signals, which have no name."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def end_with_parent(number: signal.Signals) -> None:
    """Send signal ``number`` to this process when its parent ends, or at once if the parent has already ended."""
    parent = os.getppid()
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != int(os.environ.get(STARTED_BY, parent)):
        os.kill(os.getpid(), number)


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit, because the usual 1,024 is too low for the sockets of many ranks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that ``end_all(children())`` finds them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> Iterator[int]:
    """Yield the process ids of this process's children."""
    for folder in Path("/proc").glob("[0-9]*"):
        status = _status(int(folder.name))
        if status is not None and int(status[1]) == os.getpid():
            yield int(folder.name)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not read its exit code yet."""
    status = _status(pid)
    return status is None or status[0] == "Z"


def end_all(pids: Iterable[int]) -> None:
    """Kill children of this process with their process groups, and wait until they have ended."""
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


def end_children() -> None:
    """Kill all children of this process, and the orphans that it adopts meanwhile, until none runs."""
    while running := [pid for pid in children() if not has_ended(pid)]:
        end_all(running)


def _status(pid: int) -> list[str] | None:
    """Return [state, parent, ...] of a process, or None if it does not exist."""
    try:
        # The format is: pid (name) state parent ... The name may contain any character.
        return (
            (Path("/proc") / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


class FrameError(ValueError):
    """Malformed frame."""


def pack(text: bytes) -> bytes:
    """Return the frame of a JSON text."""
    if len(text) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(text)} bytes is longer than {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(text)) + text


def encode(value: Any) -> bytes:
    """Return the frame of a value. It contains only ASCII, so that lone surrogates can be sent too."""
    return pack(json.dumps(value).encode("ascii"))


def decode(buffer: bytearray) -> Iterator[Any]:
    """Remove all complete frames from the start of ``buffer``, and yield their values.

    Raises:
        FrameError: the frames are malformed.
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
    """A process has ended or no longer answers. ``cause`` describes the reason; ``timed_out`` means that its time limit is over."""

    cause: str
    timed_out: bool = False


def loading_problem(name: str, cause: str, was_killed: bool) -> str:
    """Return the message for a file whose process ended while loading it."""
    if was_killed:
        return f"{name} {cause}, {MAX_STARTS} times in a row: correct the file if it does this itself, or free memory on this machine"
    return f"{name} {cause}: correct the file"


class WorkerProcess:
    """A process that runs ``main`` of the module ``program``.

    Args:
        order: a frame with the instructions to load.
        env: names of further environment variables for the process.
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
        self.tail, self._shown_chars = "", 0

    def send(self, frame: bytes) -> None:
        """Queue a frame, which the next calls of ``exchange`` send."""
        self._outgoing += frame

    def interests(self) -> list[tuple[int, int]]:
        """Return the descriptors to poll, with their events."""
        wanted = select.POLLIN | (select.POLLOUT if self._outgoing else 0)
        return [(self._connection.fileno(), wanted), (self._exit, select.POLLIN), (self._printed, select.POLLIN)]

    def exchange(self) -> list[dict[str, Any]]:
        """Send and receive without waiting. Returns the received messages.

        Raises:
            ProcessLost: the process has sent malformed data.
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
        """Copy the worker's output to stderr.

        The output per item is limited, so that it cannot fill a disk. The reads per call are limited, so that the caller never waits.
        """
        with suppress(BlockingIOError):
            for _ in range(_READS):
                text = os.read(self._printed, _RECEIVE_BYTES).decode(errors="replace")
                self.tail = (self.tail + text)[-_TAIL_CHARS:]
                room, self._shown_chars = _SHOWN_CHARS - self._shown_chars, self._shown_chars + len(text)
                sys.stderr.write(text[: max(room, 0)])
                if 0 <= room < len(text):
                    sys.stderr.write(f"\n(further output of process {self.process.pid} for this item is omitted)\n")

    def ending(self) -> str | None:
        """Return how the process has ended, or None if it is running. It is not reaped, so its id stays reserved until ``stop``."""
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
    """Yield the JSON value that ``function`` returns for each input. A forked child with resource limits computes them.

    Args:
        cpu_s: limit of processor time per input, which does not depend on the load of the machine.
        memory_bytes: memory limit in addition to the memory of this process.

    Raises:
        ProcessLost: the child has ended before its last answer. ``timed_out`` is set if it exceeded ``cpu_s``.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The warning concerns locks of other threads, but the child runs no code that takes such locks.
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
            # The pipe is closed, so the child ends with a broken pipe.
            os.waitpid(child, 0)


def _serve_fork(
    function: Callable[[Any], Any], inputs: Sequence[Any], writing: int, cpu_s: int, memory_bytes: int
) -> NoReturn:
    """Run the child process and end it without the exit handlers of its parent."""
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
                # Otherwise an earlier input would be blamed if the child is killed.
                lines.flush()
        code = 0
    finally:
        os._exit(code)


def receive_messages(connection: socket.socket) -> Iterator[Any]:
    """Yield the messages of the parent until it closes the connection."""
    buffer = bytearray()
    while data := connection.recv(_RECEIVE_BYTES):
        buffer += data
        yield from decode(buffer)


def end_group_with(descriptor: int) -> None:
    """Make this process group end with its parent, even if the worker hangs or has started processes.

    The kernel ends this process when the thread that started it ends. A second process ends the children. It waits until the parent's
    end of the socket is closed.
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
    """Limit the memory of this process, and of each of its children, to ``memory_bytes``. Larger allocations fail."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Limit the data segment, not the address space, because libraries reserve a large address space and use little of it.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
