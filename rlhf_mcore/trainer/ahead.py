"""Sampling ahead of training: select the prompts to sample, and the finished groups for each step.

This module runs on one rank, without collectives. ``pipeline`` contains the part that runs on all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition
from typing import Any

from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.sampling.rollouts import jobs_of, sampling_of_batch
from rlhf_mcore.trainer.batches import BeginScores
from rlhf_mcore.types import DRAFTS, ROUTES, Job, Prompt, Sampling, Score, Trajectory

# Starts jobs, and returns a future of each trajectory. Cancelling it stops the job.
BeginJobs = Callable[["Sequence[Job]"], "Sequence[Future[Trajectory]]"]
_KEPT = ("number", "place", "step", "attempt")  # fields of a group that a checkpoint stores


@dataclass(frozen=True, slots=True)
class SamplingSchedule:
    """Limits how far sampling may run ahead of training.

    ``max_staleness``: most versions between the policy that sampled a token and the policy that trains on it. ``oversample``:
    started prompts per prompt of a step. ``in_order``: steps take prompts in data order, not in finishing order. ``drain``: finish
    all started requests before each weight sync. ``last_step``: last step of the run.
    """

    prompts_per_step: int
    max_staleness: int
    oversample: float = 1.0
    in_order: bool = False
    drain: bool = False
    last_step: int | None = None

    @property
    def is_synchronous(self) -> bool:
        """Return whether each step samples its own prompts. Such a run equals a run with colocated engines bit for bit."""
        return not self.max_staleness and self.oversample == 1

    def limit(self, step: int) -> int:
        """Return the limit of prompts that are started but not yet trained on, in ``step``.

        Without ``in_order``, no prompt is started for steps after ``last_step``. With ``in_order``, they are started. Then a run
        that is resumed with more steps equals a run with these steps from the start. The resumed run could not sample these
        prompts later, because the policies that sample them no longer exist.
        """
        ahead = self.max_staleness
        if self.last_step is not None and not self.in_order:
            ahead = max(min(ahead, self.last_step - step), 0)
        return math.ceil(self.prompts_per_step * self.oversample) + self.prompts_per_step * ahead


@dataclass(slots=True)
class PromptGroup:
    """A prompt and its responses, from the read of the prompt until a step trains on them."""

    number: int  # counts the prompts read from the sampler, from 0
    place: int  # index of the prompt in the data
    prompt: Prompt
    step: int  # step for the seeds of its responses
    attempt: int = 0  # number of restarts, plus the index of its batch within the step in synchronous runs
    version: int | None = None  # policy version when its jobs were started; None: not started
    futures: Sequence[Future[Trajectory]] = ()  # one per sample, until the last has finished
    lengths: list[int] = field(default_factory=list)  # sampled tokens of each finished sample
    trajectories: list[Trajectory] = field(default_factory=list)  # empty until the last sample has finished
    scores: Future[list[Score]] | None = None  # scores of the trajectories

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled its tokens. While jobs are in flight, this is a lower bound."""
        if not self.trajectories:
            return self.version
        return min(version for trajectory in self.trajectories for _, version in trajectory.versions)


class SamplingAhead:
    """Keeps engines busy with prompts of future steps, and starts scoring finished groups.

    Groups finish in the thread that resolves the futures of their jobs, while the trainer trains.

    Args:
        prompts: prompts of the data; ``sampler`` returns indices into them.
        sampler: returns ``schedule.prompts_per_step`` indices per batch. Every index that it has returned is either pending here
            or already trained on.
        begin_jobs: starts jobs on the engines.
        begin_scores: starts scoring trajectories in the background.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        begin_jobs: BeginJobs,
        sampling: Sampling,
        schedule: SamplingSchedule,
        begin_scores: BeginScores,
    ) -> None:
        self.schedule, self.redrawn = schedule, 0
        self._begin_jobs, self._begin_scores = begin_jobs, begin_scores
        self._prompts, self._sampler, self._sampling = prompts, sampler, sampling
        self._num_read = 0
        self._batches = (0, 0)  # a step, and the index of its last batch from the sampler
        self._groups: list[PromptGroup] = []  # by rising number
        self._finished: list[PromptGroup] = []  # in finishing order
        self.num_in_flight = 0  # responses in flight
        self._changed = Condition()  # its lock protects all fields above
        self._error: BaseException | None = None

    def wait(self, timeout_s: float) -> None:
        """Wait until a group finishes, at most ``timeout_s``.

        Raises:
            RuntimeError: a response is of another version than required, or the error that ended the engines.
        """
        with self._changed:
            if self._error is None:
                self._changed.wait(timeout_s)
            if self._error is not None:
                raise self._error

    def progress(self) -> str:
        """Return a line for the display about the responses that are started but not trained on."""
        with self._changed:
            lengths = [length for group in self._groups for length in group.lengths]
            return (
                f"{len(lengths)} finished · {self.num_in_flight} waiting · longest {max(lengths, default=0):,} tokens"
            )

    def fill(self, step: int) -> None:
        """Start all prompts that policy version ``step - 1`` may sample. Step ``step`` begins with this version."""
        with self._changed:
            self._fill(step)

    def _fill(self, step: int) -> None:
        version, limit = step - 1, self.schedule.limit(step)
        stale = [
            group
            for group in self._groups
            if group.oldest_version is not None and version - group.oldest_version > self.schedule.max_staleness
        ]
        for group in stale:
            self._begin_again(group)
        while len(self._groups) < limit:
            self._read_batch(step)
        # Prompts beyond the limit wait. A single call lets an engine start with all jobs.
        due = [group for group in self._groups[:limit] if group.version is None]
        jobs = [self._jobs(group) for group in due]
        futures = iter(self._begin_jobs([job for own in jobs for job in own]) if due else ())
        for group, own in zip(due, jobs, strict=True):
            group.version, group.futures = version, [next(futures) for _ in own]
            self.num_in_flight += len(own)
            for future in group.futures:
                future.add_done_callback(partial(self._end_job, group, group.futures))

    def _read_batch(self, step: int) -> None:
        """Read the next batch of prompts, and choose the step for their seeds.

        In a synchronous run, seeds follow the current step and the batch index within it, as with colocated engines. Otherwise
        each ``prompts_per_step`` prompts get the seeds of a separate step.
        """
        places = self._sampler.next_batch()
        self._batches = step, self._batches[1] + 1 if self._batches[0] == step else 0
        seen: Counter[int] = Counter()
        for place in places:
            prompt = self._prompts[place]
            numbered = replace(prompt, occurrence=seen[prompt.index])
            seen[prompt.index] += 1
            own = self._num_read // self.schedule.prompts_per_step + 1, 0
            self._groups.append(
                PromptGroup(self._num_read, place, numbered, *(self._batches if self.schedule.is_synchronous else own))
            )
            self._num_read += 1

    def _jobs(self, group: PromptGroup) -> list[Job]:
        sampling = sampling_of_batch(self._sampling, group.attempt)
        return jobs_of([group.prompt], sampling, group.step, first=group.number)

    def _begin_again(self, group: PromptGroup) -> None:
        """Restart a group, because its sampled responses are too old to train on."""
        futures = group.futures
        if futures:
            self.num_in_flight -= len(futures) - len(group.lengths)
        if group in self._finished:
            self._finished.remove(group)
        group.futures, group.lengths, group.trajectories, group.scores = (), [], [], None
        group.version, group.attempt = None, group.attempt + 1
        self.redrawn += 1
        for future in futures:
            future.cancel()

    def _end_job(self, group: PromptGroup, futures: Sequence[Future[Trajectory]], future: Future[Trajectory]) -> None:
        """Note the end of a job. Finish its group if this was the last job."""
        with self._changed:
            if group.futures is not futures:
                return  # the group was restarted
            self.num_in_flight -= 1
            try:
                group.lengths.append(future.result().num_sampled)
                if len(group.lengths) == len(futures):
                    self._finish(group, [each.result() for each in futures])
            except Exception as error:
                self._error = self._error or error
                self._changed.notify_all()

    def _finish(self, group: PromptGroup, trajectories: list[Trajectory]) -> None:
        for trajectory in trajectories:
            if self.schedule.in_order and any(version != group.version for _, version in trajectory.versions):
                raise RuntimeError(
                    f"a response that version {group.version} was to draw is of versions {trajectory.versions}"
                )
        group.futures, group.trajectories, group.scores = (), trajectories, self._begin_scores(trajectories)
        self._finished.append(group)
        self._changed.notify_all()

    def is_ready(self, wanted: int) -> bool:
        """Return whether ``wanted`` groups are ready for ``take``."""
        if self.schedule.in_order:
            return all(group.trajectories for group in self._groups[:wanted])
        return len(self._finished) >= wanted

    def take(self, wanted: int) -> list[PromptGroup]:
        """Remove and return ``wanted`` groups for a step, sorted by number.

        With ``in_order`` these are the first groups. Otherwise they are the oldest finished groups. A long response finishes after
        many short responses that started with it. If newer groups were taken first, it would become too old.
        """
        with self._changed:
            assert self.is_ready(wanted), "wait until it is"
            by_age = sorted(self._finished, key=lambda group: group.oldest_version or 0)
            source = self._groups if self.schedule.in_order else by_age
            taken = sorted(source[:wanted], key=lambda group: group.number)
            numbers = {group.number for group in taken}
            self._finished = [group for group in self._finished if group.number not in numbers]
            self._groups = [group for group in self._groups if group.number not in numbers]
            return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts that are read but not trained on, as plain JSON values.

        ``finished_trajectories`` returns their tokens.
        """
        described = [
            {name: getattr(group, name) for name in _KEPT} | {"occurrence": group.prompt.occurrence}
            for group in self._groups
        ]
        return {"drawn": self._num_read, "redrawn": self.redrawn, "groups": described}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the prompts of ``state``. Requests that were in flight are submitted again."""
        self._num_read, self.redrawn = state["drawn"], state["redrawn"]
        self._groups = [
            PromptGroup(
                prompt=replace(self._prompts[group["place"]], occurrence=group["occurrence"]),
                **{name: group[name] for name in _KEPT},
            )
            for group in state["groups"]
        ]

    def finished_trajectories(self) -> dict[int, list[Trajectory]]:
        """Return the finished responses that are not trained on, by group number, in finishing order."""
        with self._changed:
            return {group.number: group.trajectories for group in self._finished}

    def prompts_by_number(self) -> dict[int, Prompt]:
        """Return the prompt of each group."""
        return {group.number: group.prompt for group in self._groups}

    def load_finished(self, finished: Mapping[int, list[Trajectory]]) -> None:
        """Restore the responses that ``finished_trajectories`` returned. Call it after ``load_state_dict``.

        Updates of this run may need data that the earlier run did not record, such as the support or the routes. Responses without
        this data are sampled again.
        """
        by_number = {group.number: group for group in self._groups}
        for number, trajectories in finished.items():
            if any(self._sampling.of_sample(t.sample).records_support and t.support is None for t in trajectories):
                continue
            recorded = {ROUTES: self._sampling.records_routes, DRAFTS: self._sampling.records_drafts}
            if any(is_there != (name in t.fields) for t in trajectories for name, is_there in recorded.items()):
                continue
            group = by_number[number]
            group.trajectories, group.scores = trajectories, self._begin_scores(trajectories)
            group.version, group.lengths = group.oldest_version, [each.num_sampled for each in trajectories]
            self._finished.append(group)
