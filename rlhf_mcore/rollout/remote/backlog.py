"""Queue jobs and assign them to engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from rlhf_mcore.rollout.remote.fleet_state import FleetEngine, Share

if TYPE_CHECKING:
    from rlhf_mcore.rollout.remote.host import JobOutcome, Work
    from rlhf_mcore.types import Job, Trajectory


class FreeBacklog:
    """Assigns each job to an engine at once. All samples of a prompt go to the engine with the fewest jobs.

    ``FleetEngine.jobs`` contains the engine's jobs until it finishes them.
    """

    def __init__(self) -> None:
        self._jobs: deque[Work] = deque()

    def add(self, jobs: Sequence[Work], version: int) -> None:
        """Add jobs for a version of the weights."""
        self._jobs.extend(jobs)

    def deal(self, serving: Sequence[FleetEngine]) -> list[tuple[FleetEngine, list[Work]]]:
        """Assign waiting jobs to engines that may run them. Return the jobs of each engine that receives some."""
        if not serving:
            return []
        counts = [len(engine.jobs) for engine in serving]
        shares = _share_out(self._jobs, counts)
        self._jobs.clear()
        for engine, jobs in zip(serving, shares, strict=True):
            engine.jobs |= _by_number(jobs)
        return [(engine, jobs) for engine, jobs in zip(serving, shares, strict=True) if jobs]

    def take(self, engine: FleetEngine, outcomes: Sequence[JobOutcome]) -> list[JobOutcome]:
        """Return the outcomes of an engine's jobs. Call this for each report, even without outcomes."""
        return _take_own(engine, outcomes)

    def put_back(self, engine: FleetEngine) -> None:
        """Queue the jobs of a lost engine again, for other engines."""
        self._jobs.extendleft(reversed(engine.jobs.values()))
        engine.jobs = {}

    def drop(self, numbers: Collection[int]) -> None:
        """Remove these jobs from the queue."""
        self._jobs = deque(job for job in self._jobs if job.number not in numbers)


class SharedBacklog:
    """Assigns jobs so that engine failures do not change any bit of a response.

    The last bits of a response depend on the other requests in the engine's batch. Jobs that begin together are therefore split into
    ``num_shares``, regardless of the number of engines. An engine runs one share at a time, with the weights of the share's version.
    If the engine is lost, the whole share is run again, including its finished jobs.
    """

    def __init__(self, num_shares: int) -> None:
        self._num_shares = num_shares
        self._shares: deque[Share] = deque()

    def add(self, jobs: Sequence[Work], version: int) -> None:
        """See :class:`FreeBacklog`, also for the following methods."""
        shares = _share_out(jobs, [0] * self._num_shares)
        self._shares.extend(Share(_by_number(share), version) for share in shares if share)

    def deal(self, serving: Sequence[FleetEngine]) -> list[tuple[FleetEngine, list[Work]]]:
        dealt = []
        for engine in serving:
            share = next((share for share in self._shares if share.version == engine.version), None)
            if share is not None and engine.share is None:
                self._shares.remove(share)
                engine.share, engine.jobs = share, dict(share.jobs)
                dealt.append((engine, list(share.jobs.values())))
        return dealt

    def take(self, engine: FleetEngine, outcomes: Sequence[JobOutcome]) -> list[JobOutcome]:
        """Return outcomes. A repeated share returns all its outcomes together, when its engine has finished every job."""
        share, drawn = engine.share, _take_own(engine, outcomes)
        if share is None:
            return []
        share.held += [outcome for outcome in drawn if outcome.number not in share.answered]
        answers: list[JobOutcome] = []
        if not (share.is_repeated and engine.jobs):
            answers, share.held = share.held, []
        share.answered |= {outcome.number for outcome in answers}
        if not engine.jobs:
            engine.share = None
        return answers

    def put_back(self, engine: FleetEngine) -> None:
        if engine.share is not None:
            engine.share.is_repeated, engine.share.held = True, []
            self._shares.appendleft(engine.share)
        engine.share, engine.jobs = None, {}

    def drop(self, numbers: Collection[int]) -> None:
        for share in self._shares:
            share.drop(numbers)
        self._shares = deque(share for share in self._shares if share.jobs)


@dataclass(slots=True)
class OpenJob:
    """A job without an outcome. ``version``: version of the weights at its start."""

    job: Job
    version: int
    future: Future[Trajectory] = field(default_factory=Future)
    is_lost: bool = False  # whether its engine was lost


class OpenJobs:
    """Jobs without an outcome, by number.

    ``note`` receives a message with the number of responses that another version sampled because their engine was lost.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._open: dict[int, OpenJob] = {}
        self._note = note
        self._num_lost = 0
        self._noted = self._popped = self._other = 0  # counts of responses that another version sampled

    def __len__(self) -> int:
        return len(self._open)

    def add(self, jobs: Sequence[Job], version: int) -> list[Future[Trajectory]]:
        """Open jobs that this version of the weights shall sample. Returns a future of each job's trajectory."""
        opened = [OpenJob(job, version) for job in jobs]
        self._open |= {each.job.number: each for each in opened}
        return [each.future for each in opened]

    def versions(self) -> set[int]:
        """Return the versions of all open jobs."""
        return {each.version for each in self._open.values()}

    def futures(self) -> list[Future[Trajectory]]:
        """Return the futures of all open jobs."""
        return [each.future for each in self._open.values()]

    def lose(self, numbers: Iterable[int]) -> None:
        """Mark jobs whose engine is lost."""
        for each in (self._open[number] for number in numbers if number in self._open):
            self._num_lost += not each.is_lost
            each.is_lost = True

    def drop(self, numbers: Collection[int]) -> None:
        """Drop cancelled jobs."""
        for number in numbers:
            if (each := self._open.pop(number, None)) is not None:
                self._num_lost -= each.is_lost
        self._report()

    def close(self, outcome: JobOutcome) -> OpenJob | None:
        """Close a finished job and return it. None if it is not open."""
        if (each := self._open.pop(outcome.number, None)) is not None and each.is_lost:
            self._num_lost -= 1
            self._other += outcome.version != each.version
            self._report()
        return each

    def pop_other(self) -> int:
        """Return the number of responses that another version has sampled since the last call."""
        count, self._popped = self._other - self._popped, self._other
        return count

    def _report(self) -> None:
        """Write one note for all lost jobs, after the last of them has finished."""
        if not self._num_lost and (count := self._other - self._noted):
            self._noted = self._other
            self._note(
                f"{count} responses were drawn by newer weights than they were begun with: their engine was lost"
            )


def _share_out(jobs: Iterable[Work], counts: list[int]) -> list[list[Work]]:
    """Split jobs into shares. All samples of a prompt join the share with the lowest of ``counts``, which are updated."""
    shares: list[list[Work]] = [[] for _ in counts]
    for _, group in groupby(jobs, key=lambda job: list(job.prompt_ids)):
        samples = list(group)
        fewest = counts.index(min(counts))
        shares[fewest] += samples
        counts[fewest] += len(samples)
    return shares


def _by_number(jobs: Iterable[Work]) -> dict[int, Work]:
    return {job.number: job for job in jobs}


def _take_own(engine: FleetEngine, outcomes: Sequence[JobOutcome]) -> list[JobOutcome]:
    """Return the outcomes of the engine's jobs and close these jobs. Other outcomes are of cancelled jobs."""
    return [outcome for outcome in outcomes if engine.jobs.pop(outcome.number, None) is not None]
