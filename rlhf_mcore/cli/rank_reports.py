"""Report from a rank to the process that started it: signs of life, phases, the first step, and the end.

Datagrams over a socket in Linux's abstract namespace: a kill leaves no file behind, and a full disk changes nothing. Every datagram
carries a token that only the environment of the ranks holds. Under a torchrun of the user's own nobody listens, and nothing is sent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

VARIABLE = "RLHF_MCORE_REPORTS"  # token and address, in the environment of the ranks
# Whose mistake ended a rank; the last: another rank's end.
USER, FAILURE, CONSEQUENCE = "user", "failure", "consequence"

_MAX_TEXT = 10_000  # characters, of up to 12 bytes each as JSON
_ALIVE_S = 1.0


class Reporter:
    """A rank's end."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._token, _, name = environment.get(VARIABLE, "").partition(" ")
        rank = environment.get("RANK", "0")
        self._rank = int(rank) if rank.isdecimal() else 0  # what is wrong with it is the user's to be told
        self._address = f"\0{name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._token else None
        self._limit_s = 0

    @property
    def is_heard(self) -> bool:
        """Tell whether a command of ours started this rank. It reports errors, and watches the rank's progress."""
        return self._socket is not None

    def started(self) -> None:
        """Report that the process is there. From now on a thread tells every second that it is alive."""
        self.announce_process(os.getpid(), int(os.environ.get("LOCAL_RANK", "0")))
        if self._socket is not None:
            threading.Thread(target=self._keep_telling, name="alive", daemon=True).start()

    def announce_process(self, pid: int, local_rank: int) -> None:
        """Say which process of its machine this rank is."""
        self._send(is_="started", pid=pid, local_rank=local_rank)

    def watch(self, limit_s: int) -> None:
        """Ask to end the run when no rank begins a phase for ``limit_s`` seconds; 0: this one does not count."""
        self._send(is_="watch", limit_s=limit_s)

    def phase(self, name: str) -> None:
        """Report that a phase begins."""
        self._send(is_="phase", name=name)

    def training(self) -> None:
        """Report that the first step begins: from now on there is something to save."""
        self._send(is_="training")

    def done(self) -> None:
        """Report that the last step was made and saved."""
        self._send(is_="done")

    def failed(self, kind: str, text: str) -> None:
        """Report the error that ends the rank. ``kind``: USER, FAILURE or CONSEQUENCE."""
        self._send(is_="failed", kind=kind, text=text[:_MAX_TEXT])

    def _keep_telling(self) -> None:
        while True:
            self._send(is_="alive")
            time.sleep(_ALIVE_S)

    def _send(self, is_: str, **content: Any) -> None:
        if self._socket is None:
            return
        message = json.dumps({"token": self._token, "rank": self._rank, "is": is_, **content}).encode()
        # A listener that is stopped must stop nobody: a report that all is well may be lost, others wait a little.
        flags = socket.MSG_DONTWAIT if is_ in ("alive", "phase") else 0
        with contextlib.suppress(OSError):
            self._socket.settimeout(5.0)
            self._socket.sendto(message, flags, self._address)
