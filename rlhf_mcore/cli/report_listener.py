"""Listen to the ranks in the process that started them: phases, standstill, and ends."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.cli.rank_reports import VARIABLE

_MAX_BYTES = 1 << 17  # of a report
_POLL_S = 0.5
_SILENT_S = 10.0  # a rank without a sign of life for so long holds Python's lock
_GONE_S = 45.0  # torchrun ends the others within 30 s of a failure; what it has not noticed by now it took for success


@dataclass(slots=True)
class Rank:
    """Hold what is known of a rank. Seconds are those during which the listener itself was running."""

    pid: int
    local_rank: int
    phase: str = "starting"
    phases: int = 0
    limit_s: int = 0
    since_phase_s: float = 0.0
    since_alive_s: float = 0.0
    gone_s: float = 0.0
    training: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's own words about its end."""

    rank: int
    kind: str
    text: str


class RankReports:
    """The listener's end: the ranks of this node, by their global number.

    Args:
        has_ended: whether a process is gone.
        clock: monotonic seconds.
    """

    def __init__(self, has_ended: Callable[[int], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks: dict[int, Rank] = {}
        self.failures: list[Failed] = []  # in the order in which they came
        self._has_ended, self._clock = has_ended, clock
        self._token, name = secrets.token_hex(16), f"rlhf_mcore-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{name}")
        # The handler of Ctrl-C reads too, in the middle of whatever the main thread does.
        self._reading = threading.RLock()
        self.environment = {VARIABLE: f"{self._token} {name}"}

    @property
    def training(self) -> bool:
        """Return whether a rank has begun its first step."""
        return any(rank.training for rank in self.ranks.values())

    def unfinished(self) -> list[int]:
        """List ranks that have begun and have not reported the end of the run."""
        return sorted(number for number, rank in self.ranks.items() if not rank.done)

    def follow(self, stalled: Callable[[str, list[int]], None]) -> None:
        """Listen in a thread of its own, and call ``stalled(message, ranks to blame)`` once the run makes no progress."""

        def listen() -> None:
            last = self._clock()
            while True:
                self.read(_POLL_S)
                now = self._clock()
                # The whole job may have been suspended meanwhile: what the listener did not see is not counted.
                problem = self.tick(min(now - last, 2 * _POLL_S))
                last = now
                if problem is not None:
                    stalled(*problem)
                    return

        threading.Thread(target=listen, name="rank reports", daemon=True).start()

    def read(self, timeout_s: float = 0.0) -> None:
        """Take what has come; wait at most ``timeout_s`` for the first of it."""
        with self._reading:
            while True:
                self._socket.settimeout(timeout_s)
                try:
                    data = self._socket.recv(_MAX_BYTES)
                except (TimeoutError, BlockingIOError):
                    return
                timeout_s = 0.0
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    message = json.loads(data)
                    if secrets.compare_digest(str(message.get("token")), self._token):
                        self._take(int(message["rank"]), message)

    def tick(self, seconds: float) -> tuple[str, list[int]] | None:
        """Count so many seconds. Returns a message and whom to blame when the run stands still."""
        for rank in self.ranks.values():
            rank.since_phase_s += seconds
            rank.since_alive_s += seconds
            rank.gone_s = rank.gone_s + seconds if self._has_ended(rank.pid) else 0.0
        living = {number: rank for number, rank in self.ranks.items() if not rank.gone_s}
        ended = [n for n, rank in self.ranks.items() if rank.gone_s > _GONE_S and not rank.done]
        if ended and living and not self.failures:
            return f"{_name_ranks(ended)} ended in the middle of the run", ended
        watched = {number: rank for number, rank in living.items() if rank.limit_s}
        # A rank alone may have nothing to do for a while; once it is needed, the others stand still with it.
        if not watched or any(rank.since_phase_s < rank.limit_s for rank in watched.values()):
            return None
        return _blame(watched)

    def _take(self, number: int, message: Mapping[str, Any]) -> None:
        if message["is"] == "started":
            self.ranks[number] = Rank(int(message["pid"]), int(message["local_rank"]))
            return
        rank = self.ranks[number]
        rank.since_alive_s = 0.0
        match message["is"]:
            case "watch":
                rank.limit_s, rank.since_phase_s = int(message["limit_s"]), 0.0
            case "phase":
                rank.phase, rank.phases, rank.since_phase_s = str(message["name"]), rank.phases + 1, 0.0
            case "training":
                rank.training = True
            case "done":
                rank.done = True
            case "failed":
                self.failures.append(Failed(number, str(message["kind"]), str(message["text"])))


def _blame(ranks: dict[int, Rank]) -> tuple[str, list[int]]:
    """Blame silent ranks, else the ranks that are furthest behind."""
    limit = f"for {max(rank.limit_s for rank in ranks.values())} s (trainer.watchdog_s)"
    silent = [number for number, rank in ranks.items() if rank.since_alive_s > _SILENT_S]
    if silent:
        verbs = "is stopped, or holds" if len(silent) == 1 else "are stopped, or hold"
        return f"{_name_ranks(silent)} {verbs} Python's lock in a library: no progress {limit}", silent
    fewest = min(rank.phases for rank in ranks.values())
    behind = [number for number, rank in ranks.items() if rank.phases == fewest]
    if len(behind) < len(ranks):
        return f"{_name_ranks(behind)} did not come to the end of a phase {limit}, the others wait", behind
    return f"no rank has begun a new phase {limit}", behind


def _name_ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
