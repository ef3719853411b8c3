"""Describe the engines of a fleet: plan, state, requests, and errors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.cluster import RayCall, RayProcess
    from rlhf_mcore.rollout.remote.host import EngineReport, EngineSpec, JobOutcome, Work


class EnginesLost(RuntimeError):
    """The run has no usable engines, or an engine has failed."""


RESTARTS = 3  # consecutive failures of an engine before the run ends
STARTING = ("due", "placing", "starting")  # states before an engine is built
REMEDY = "The run has ended; the same command continues it after its newest checkpoint"


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The engines to start, and the limits for their failures."""

    order: EngineSpec
    num_engines: int
    engine_ranks: int  # processes per engine
    threads: int  # compute threads per process
    timeout_s: float  # an engine fails if it does not answer, or samples no token, for this time
    restarts: int  # see RESTARTS
    in_order: bool = False  # responses depend neither on timing nor on engine failures
    slots: int = 0  # maximum number of concurrent requests per engine
    sends_rows: bool = False  # whether jobs need the whole rows of their prompts, for environments


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
        version, tokens = (report.version, report.num_sampled_tokens) if report else (-1, 0)
        return cls(engine.name, state, version, len(engine.jobs), tokens, engine.failures)


@dataclass(slots=True, eq=False)
class Share:
    """Jobs that an engine runs together, without other jobs."""

    jobs: dict[int, Work]  # by number
    version: int  # version of the weights that sample them
    answered: set[int] = field(default_factory=set)
    is_repeated: bool = False  # an engine was lost while it sampled this share
    held: list[JobOutcome] = field(default_factory=list)  # outcomes that are not yet returned

    def drop(self, numbers: Collection[int]) -> None:
        """Remove these jobs."""
        self.jobs = {number: job for number, job in self.jobs.items() if number not in numbers}


@dataclass(slots=True, eq=False)
class FleetEngine:
    """An engine as its fleet knows it."""

    name: str
    state: str = (
        "due"  # due | placing (Ray looks for free resources) | starting | ready (built, waits for weights) | serving
    )
    attempt: int = 0
    failures: int = 0  # in a row
    draining: bool = False
    since: float = 0.0
    address: str = ""
    processes: Sequence[RayProcess] = ()
    starting: list[RayCall] = field(default_factory=list)
    reports: list[RayCall] = field(default_factory=list)  # one call per process, in flight
    answered: list[float] = field(default_factory=list)
    jobs: dict[int, Work] = field(default_factory=dict)  # assigned and not finished, by number
    share: Share | None = None  # the share of ``jobs``, with a SharedBacklog
    version: int = -1  # policy version of its weights; -1: no weights
    last_report: EngineReport | None = None
    progressed: float = 0.0  # time of the last token, or of the last check without jobs

    @property
    def key(self) -> str:
        """The engine's name with the number of its restarts, unique in the run."""
        return f"{self.name}.{self.attempt}"
