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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlhf_mcore
from rlhf_mcore.rewards.frames import DISCONNECTED, decode

if TYPE_CHECKING:
    from rlhf_mcore.rewards.pool import Job

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


class Worker:
    """One process, with what it was given and has not answered yet. ``program``: the module whose ``main`` it runs."""

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
        self.connection, self.printed = ours, self.process.stdout.fileno()
        self.exit = os.pidfd_open(self.process.pid)  # readable when the process has ended
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.ready = False
        self.held: deque[tuple[Job, int]] = deque()  # items, in the order in which they will be answered
        self.since = 0.0  # when it began with the first of them
        self.item_s = math.inf  # that its last item took
        self.outgoing, self.incoming = bytearray(order), bytearray()
        self.tail, self._shown_chars = "", 0

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
        self._show_printed()
        if messages := list(decode(self.incoming)):
            self._shown_chars = 0
        return messages

    def _show_printed(self) -> None:
        """Up to a bound for each item, so that nobody's disk is filled; a few reads at a time, so that nobody waits for its end."""
        with suppress(BlockingIOError):
            for _ in range(_READS):
                text = os.read(self.printed, _RECEIVE_BYTES).decode(errors="replace")
                self.tail = (self.tail + text)[-_TAIL_CHARS:]
                room, self._shown_chars = _SHOWN_CHARS - self._shown_chars, self._shown_chars + len(text)
                sys.stderr.write(text[: max(room, 0)])
                if 0 <= room < len(text):
                    sys.stderr.write(
                        f"\n(the rest of what process {self.process.pid} prints for this item is left out)\n"
                    )

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
