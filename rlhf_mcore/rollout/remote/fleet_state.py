"""Describe the engines of a fleet: plan, state, requests, and errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.cluster import RayCall, RayProcess
    from rlhf_mcore.rollout.remote.host import EngineReport, EngineSpec
    from rlhf_mcore.types import Completion, Request


class EnginesLost(RuntimeError):
    """There is nothing left to sample with."""


RESTARTS = 3  # of an engine that fails, in a row, before the run ends
STARTING = ("due", "placing", "starting")  # states before an engine is built
REMEDY = "The run has ended; the same command continues it after its newest checkpoint"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Hold how many engines there are to be, what each is, and when it is given up."""

    order: EngineSpec
    num_engines: int
    engine_ranks: int  # processes of an engine
    threads: int  # compute threads of a process
    timeout_s: float  # an engine that does not answer, or draws nothing, for so long has failed
    restarts: int  # see RESTARTS
    in_order: bool = False  # responses depend neither on time nor on what happens to engines
    slots: int = 0  # requests that an engine draws at a time


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """An engine as ``rlhf-mcore rollouts RUN_DIR list`` shows it."""

    name: str
    state: str
    version: int
    requests: int
    tokens: int
    failures: int

    @classmethod
    def of(cls, engine: FleetEngine) -> EngineStatus:
        """Describe an engine."""
        state = "draining" if engine.draining else "starting" if engine.state in STARTING else engine.state
        report = engine.last_report
        version, tokens = (report.version, report.tokens_drawn) if report else (-1, 0)
        return cls(engine.name, state, version, len(engine.requests), tokens, engine.failures)


@dataclass(slots=True, eq=False)
class Share:
    """Requests that an engine draws together, and nothing beside them."""

    requests: dict[int, Request]  # by their ids
    version: int  # of the weights that they are drawn by
    answered: set[int] = field(default_factory=set)
    is_repeated: bool = False  # an engine that drew it was lost
    held: list[Completion] = field(default_factory=list)  # answers that have not been given yet

    def drop(self, request_ids: Collection[int]) -> None:
        """Forget these requests."""
        self.requests = {number: each for number, each in self.requests.items() if number not in request_ids}


@dataclass(slots=True, eq=False)
class FleetEngine:
    """An engine as its fleet knows it."""

    name: str
    state: str = "due"  # due | placing (Ray looks for room) | starting | ready (built, waits for weights) | serving
    attempt: int = 0
    failures: int = 0  # in a row
    draining: bool = False
    since: float = 0.0
    address: str = ""
    processes: Sequence[RayProcess] = ()
    starting: list[RayCall] = field(default_factory=list)
    reports: list[RayCall] = field(default_factory=list)  # one of each process, under way
    answered: list[float] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)  # that it has been given and has not answered
    share: Share | None = None  # that these are of, where requests are dealt in shares
    version: int = -1  # of its weights; -1: it has none
    last_report: EngineReport | None = None
    progressed: float = 0.0  # when it last drew a token, or had nothing to draw

    @property
    def key(self) -> str:
        """Its name and its start."""
        return f"{self.name}.{self.attempt}"
