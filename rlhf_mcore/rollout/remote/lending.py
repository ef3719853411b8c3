"""Sample turns of episodes in another engine if the engine with their history in its cache is full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from rlhf_mcore.rollout.remote.fleet_state import FleetEngine
from rlhf_mcore.rollout.remote.host import BorrowedTurn

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.host import EngineReport, JobOutcome

_FIRST_NUMBER = -(2**50)  # number of the first lent turn; jobs have other numbers


@dataclass(frozen=True, slots=True)
class _LentTurn:
    """A turn that another engine samples. ``number`` is the turn's id in the lending engine; ``owner`` is that engine's key."""

    owner: str
    number: int


class BorrowedTurns:
    """Lets engines with free slots sample turns that wait in other engines.

    An engine runs its episodes and samples their turns, because their history is in its cache. It samples at most ``slots`` turns
    at a time and holds back the others. It lends held turns with the least history first. A sampled turn returns to the engine
    that runs its episode. If an engine with borrowed turns is lost, the backlog assigns these turns to other engines like any other
    job. If the lending engine is lost, the turns are cancelled.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._ids = count(_FIRST_NUMBER, -1)
        self._lent: dict[int, _LentTurn] = {}  # by number in the fleet
        self._asked: set[str] = set()  # engines that were asked to lend and have not reported since then
        # Turns lent to an engine after and before its last report. They may have arrived after the engine wrote this report.
        self._given: dict[str, tuple[int, int]] = {}

    def note(self, engine: FleetEngine, report: EngineReport, serving: Sequence[FleetEngine]) -> int:
        """Assign the turns that an engine lends in its report to the engines with most free slots. Return their number."""
        self._asked.discard(engine.key)
        self._given[engine.key] = 0, self._given.get(engine.key, (0, 0))[0]
        for request in report.lent:
            number = next(self._ids)
            self._lent[number] = _LentTurn(engine.key, request.request_id)
            others = [other for other in serving if other is not engine] or [engine]
            self._give(max(others, key=self._room), BorrowedTurn(number, request))
        return len(report.lent)

    def balance(self, serving: Sequence[FleetEngine]) -> None:
        """Ask engines with held turns to lend as many as fit into the free slots of other engines."""
        for engine in serving:
            held = engine.last_report.num_held if engine.last_report is not None else 0
            room = sum(max(self._room(other), 0) for other in serving if other is not engine)
            if min(held, room) and engine.key not in self._asked:
                self._asked.add(engine.key)
                engine.processes[0].call("lend_turns", min(held, room))

    def _give(self, engine: FleetEngine, turn: BorrowedTurn) -> None:
        now, before = self._given.get(engine.key, (0, 0))
        self._given[engine.key] = now + 1, before
        engine.jobs[turn.number] = turn
        engine.processes[0].call("submit", [turn], False)

    def _room(self, engine: FleetEngine) -> int:
        report = engine.last_report
        if report is None:
            return 0
        return self._slots - report.num_in_flight - report.num_held - sum(self._given.get(engine.key, (0, 0)))

    def answer(self, outcome: JobOutcome, engines: Iterable[FleetEngine]) -> bool:
        """Send a sampled lent turn to the engine that runs its episode. Return False if the outcome is not of a lent turn."""
        lent = self._lent.pop(outcome.number, None)
        if lent is None:
            return False
        for engine in engines:
            if engine.key == lent.owner and engine.processes:
                engine.processes[0].call("take_back", lent.number, outcome.result)
        return True

    def lose(self, owner: str | None = None) -> list[int]:
        """Forget the turns that the engine with key ``owner`` has lent; None: all lent turns. Return their numbers, to cancel them."""
        lost = [number for number, lent in self._lent.items() if owner in (None, lent.owner)]
        for number in lost:
            del self._lent[number]
        return lost
