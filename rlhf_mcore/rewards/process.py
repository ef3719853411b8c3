"""A worker process beside the trainer, for code that may raise, hang, exit, fork or fill the memory.

It is a fresh interpreter in a session of its own. It sees a short list of environment variables and no credentials, talks JSON over a
socket, and ends with the trainer.
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
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rlhf_mcore
from rlhf_mcore.rewards.frames import DISCONNECTED, FrameError, decode

# What a program needs to find its files and to print; a user adds names by reward.env.
ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")
# The order of sets does not differ from worker to worker, and libraries do not start a thread per core in each of them.
SETTINGS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
START_TIMEOUT_S = 300.0  # for the imports of a user's file
_RECEIVE_BYTES = 2**16
_READS = 4  # of what a worker has printed, at a time
_SHOWN_CHARS = 2**16  # that a worker may print for an item
_TAIL_CHARS = 1000  # of what a worker has printed, kept for the message about its end
# The working directory is not searched for modules of the standard library, as it is by -c and -m.
_BOOTSTRAP = (
    "import sys; del sys.path[0]; sys.path.append(sys.argv[2]); "
    "from importlib import import_module; import_module(sys.argv[3]).main(int(sys.argv[1]))"
)


@dataclass(slots=True)
class ProcessLost(Exception):
    """A process has ended or answers no more: its cause in words, or that its time is over."""

    cause: str
    timed_out: bool = False


class WorkerProcess:
    """One process, which runs ``main`` of the module ``program``. ``order``: a frame that tells it what to load."""

    def __init__(self, order: bytes, env: Sequence[str], program: str = "rlhf_mcore.rewards.worker") -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(rlhf_mcore.__file__).parents[1])
        names = (*ENVIRONMENT, *env)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), root, program],
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
        return f"was ended by {signal.Signals(status.si_status).name}"

    def stop(self) -> None:
        """Kill the process and its whole group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self._connection.close()
        os.close(self._exit)
        assert self.process.stdout is not None
        self.process.stdout.close()
