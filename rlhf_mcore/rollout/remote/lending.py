"""Turns of episodes that another engine draws, because the one that has their history in its cache is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

from rlhf_mcore.rollout.remote.fleet_state import FleetEngine

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.host import EngineReport
    from rlhf_mcore.types import Completion, Request

_FIRST_ID = -(2**50)  # of lent turns; other requests with ids below 0 count down from -1


@dataclass(frozen=True, slots=True)
class _Lent:
    """A turn of an engine's that another one draws. ``number`` is its id there; ``owner`` is a start of an engine."""

    owner: str
    number: int


class Lending:
    """Lets engines with room draw turns that wait in others.

    An engine plays its episodes itself, and draws their turns, whose history is in its cache. ``slots`` is how many turns it draws
    at a time; it holds back what is more, and of this it lends those with the least history. A turn comes back to the engine that
    plays its episode. Where an engine is lost that draws lent turns, the backlog gives them to others as any request; where one is
    lost that has lent them, nobody waits for them any more.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._ids = count(_FIRST_ID, -1)
        self._lent: dict[int, _Lent] = {}  # by their ids in the fleet
        self._asked: set[str] = set()  # engines that were asked to lend, and have not reported since
        # Turns that were lent to an engine since its last report, and before that: it may have been made before they came.
        self._given: dict[str, tuple[int, int]] = {}

    def note(self, engine: FleetEngine, report: EngineReport, serving: Sequence[FleetEngine]) -> int:
        """Take note of an engine's report, and give the turns that it lends to those that have room. Returns how many these are."""
        self._asked.discard(engine.key)
        self._given[engine.key] = 0, self._given.get(engine.key, (0, 0))[0]
        for request in report.lent:
            number = next(self._ids)
            self._lent[number] = _Lent(engine.key, request.request_id)
            others = [other for other in serving if other is not engine] or [engine]
            self._give(max(others, key=self._room), replace(request, request_id=number))
        return len(report.lent)

    def balance(self, serving: Sequence[FleetEngine]) -> None:
        """Ask engines that hold turns back to lend as many as others have room for."""
        for engine in serving:
            held = engine.last_report.num_held if engine.last_report is not None else 0
            room = sum(max(self._room(other), 0) for other in serving if other is not engine)
            if min(held, room) and engine.key not in self._asked:
                self._asked.add(engine.key)
                engine.processes[0].call("lend", min(held, room))

    def _give(self, engine: FleetEngine, request: Request) -> None:
        now, before = self._given.get(engine.key, (0, 0))
        self._given[engine.key] = now + 1, before
        engine.requests[request.request_id] = request
        engine.processes[0].call("submit", [request], False)

    def _room(self, engine: FleetEngine) -> int:
        report = engine.last_report
        if report is None:
            return 0
        return self._slots - report.num_in_flight - report.num_held - sum(self._given.get(engine.key, (0, 0)))

    def answer(self, completion: Completion, engines: Iterable[FleetEngine]) -> bool:
        """Bring a lent turn back to the engine that plays its episode. Returns False where it is none."""
        lent = self._lent.pop(completion.request_id, None)
        if lent is None:
            return False
        for engine in engines:
            if engine.key == lent.owner and engine.processes:
                engine.processes[0].call("take_back", replace(completion, request_id=lent.number))
        return True

    def lose(self, owner: str | None = None) -> list[int]:
        """Forget what a start of an engine has lent, None: all of it. Returns the ids, which nobody waits for any more."""
        lost = [number for number, lent in self._lent.items() if owner in (None, lent.owner)]
        for number in lost:
            del self._lent[number]
        return lost
