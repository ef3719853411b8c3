"""Sampling that runs ahead of training: which prompts are being answered, and which answers a step takes.

On one rank, and without collectives: see ``pipeline`` for what all ranks do with it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Condition, Event, Thread
from typing import Any

from rlhf_mcore.data.sampler import Sampler
from rlhf_mcore.protocols import Generator
from rlhf_mcore.sampling.checks import REMEDY, LostTrajectory, check_completion
from rlhf_mcore.sampling.requests import MakeRequest, request_of
from rlhf_mcore.sampling.rollouts import Decode, build_trajectories
from rlhf_mcore.sampling.seeds import sampling_of_batch
from rlhf_mcore.trainer.sampled import BeginScores
from rlhf_mcore.types import DRAFTS, ROUTES, Completion, Prompt, Request, Sampling, Score, Trajectory

POLL_S, IDLE_S = 1.0, 0.05  # of the thread: most that it waits for a response, and when there is none to wait for
_KEPT = ("number", "place", "step", "attempt")  # of a group, in a checkpoint


@dataclass(frozen=True, slots=True)
class SamplingSchedule:
    """Bound how far sampling may run ahead of training.

    ``max_staleness``: versions between the policy that sampled a token and the one that learns from it. ``oversample``: prompts that
    are started for each that a step takes. ``in_order``: a step takes prompts in their order, not in that in which they finish.
    ``drain``: everything that was started is finished before new weights come. ``last_step``: of the run.
    """

    prompts_per_step: int
    max_staleness: int
    oversample: float = 1.0
    in_order: bool = False
    drain: bool = False
    last_step: int | None = None

    @property
    def is_synchronous(self) -> bool:
        """Tell whether each step has prompts of its own, and a run is that of colocated engines bit for bit."""
        return not self.max_staleness and self.oversample == 1

    def limit(self, step: int) -> int:
        """Return the most prompts that may be started and not yet learned from, in a step.

        Nothing is started for steps that the run does not have, unless ``in_order``: then a run that
        is resumed with more steps equals a run that had them from the beginning. Later it could
        not sample them: their policies are gone.
        """
        ahead = self.max_staleness
        if self.last_step is not None and not self.in_order:
            ahead = max(min(ahead, self.last_step - step), 0)
        return math.ceil(self.prompts_per_step * self.oversample) + self.prompts_per_step * ahead


@dataclass(slots=True)
class PromptGroup:
    """A prompt and its responses, from when it is drawn until a step learns from them."""

    number: int  # counts the prompts that were drawn, from 0
    place: int  # of the prompt in the data
    prompt: Prompt
    step: int  # whose seeds its responses have
    attempt: int = 0  # how often it was begun again, or its step had drawn before
    version: int | None = None  # of the policy when its requests were submitted; None: they are not
    requests: dict[int, Request] = field(default_factory=dict)  # that are not answered yet, by request id
    completions: dict[int, Completion] = field(default_factory=dict)  # by sample
    trajectories: list[Trajectory] = field(default_factory=list)  # of all samples, when the last one has finished
    scores: Future[list[Score]] | None = None  # of the trajectories

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest policy that sampled its tokens; a lower bound while it is being answered."""
        if not self.trajectories:
            return self.version
        return min(version for trajectory in self.trajectories for _, version in trajectory.versions)


class SamplingAhead:
    """Keeps a generator busy with the prompts of coming steps, and begins to score what has finished.

    A thread takes what finishes while the trainer learns; ``run`` is around that.

    Args:
        prompts: of the data, in the order that ``sampler`` counts.
        sampler: draws ``schedule.prompts_per_step`` at a time. What it has drawn is answered here or learned from.
        begin_scores: trajectories -> their scores, which are computed meanwhile.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        generator: Generator,
        decode: Decode,
        sampling: Sampling,
        schedule: SamplingSchedule,
        begin_scores: BeginScores,
        make_request: MakeRequest = request_of,
    ) -> None:
        self.schedule, self.redrawn = schedule, 0
        self._begin_scores = begin_scores
        self._prompts, self._sampler, self._generator = prompts, sampler, generator
        self._decode, self._sampling, self._make_request = decode, sampling, make_request
        self._drawn = 0
        self._batches = (0, 0)  # a step, and how often it has drawn
        self._groups: list[PromptGroup] = []  # by rising number
        self._finished: list[PromptGroup] = []  # in the order in which they have finished
        self._asked: dict[int, tuple[PromptGroup, int]] = {}  # request id -> its group and sample
        self._cancelled: set[int] = set()
        self._next_id = 0
        self._changed = Condition()  # its lock is of everything above
        self._error: BaseException | None = None

    @contextmanager
    def run(self) -> Iterator[None]:
        """Take what finishes, in a thread of its own, until the end of the block."""
        ended = Event()

        def take() -> None:
            try:
                while not ended.is_set():
                    if not self.num_in_flight or not self.poll(POLL_S):
                        ended.wait(IDLE_S)
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()

        thread = Thread(target=take, name="sampling-ahead", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def wait(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """Wait for ``is_done``, inside ``run``, but no longer than ``timeout_s``.

        Raises:
            LostTrajectory, RuntimeError: as ``poll``, or what ended the engines.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or is_done(), timeout_s)
            if self._error is not None:
                raise self._error

    @property
    def num_in_flight(self) -> int:
        """Responses that are being drawn."""
        return len(self._asked)

    def progress(self) -> str:
        """Describe what was started and not learned from, for the display."""
        with self._changed:
            lengths = [trajectory.num_sampled for group in self._finished for trajectory in group.trajectories]
            lengths += [len(c.token_ids) for group in self._groups for c in group.completions.values()]
        return f"{len(lengths)} finished · {self.num_in_flight} waiting · longest {max(lengths, default=0):,} tokens"

    def fill(self, step: int) -> None:
        """Begin with everything that the policy of version ``step - 1`` may sample, with which step ``step`` starts."""
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
            self._draw(step)
        # What the last batch of the sampler has beyond the limit waits. One call, so that an engine begins with all of it.
        due = [group for group in self._groups[:limit] if group.version is None]
        if requests := [request for group in due for request in self._requests(group, version)]:
            self._generator.submit(requests)

    def _draw(self, step: int) -> None:
        """Draw the next prompts, with seeds of a step of their own or, as with colocated engines, of further draws of the step."""
        places = self._sampler.next_batch()
        self._batches = step, self._batches[1] + 1 if self._batches[0] == step else 0
        seen: Counter[int] = Counter()
        for place in places:
            prompt = self._prompts[place]
            numbered = replace(prompt, occurrence=seen[prompt.index])
            seen[prompt.index] += 1
            own = self._drawn // self.schedule.prompts_per_step + 1, 0
            self._groups.append(
                PromptGroup(self._drawn, place, numbered, *(self._batches if self.schedule.is_synchronous else own))
            )
            self._drawn += 1

    def _requests(self, group: PromptGroup, version: int) -> Iterable[Request]:
        sampling = sampling_of_batch(self._sampling, group.attempt)
        group.version = version
        for sample in range(sampling.num_drawn):
            request = self._make_request(self._next_id, group.prompt, sample, sampling, group.step)
            group.requests[request.request_id] = request
            self._asked[request.request_id] = group, sample
            self._next_id += 1
        return group.requests.values()

    def _begin_again(self, group: PromptGroup) -> None:
        """Draw a group's responses again: those that were sampled are too old to be learned from."""
        self._generator.cancel(group.requests.keys())
        self._cancelled |= group.requests.keys()
        for request_id in group.requests:
            del self._asked[request_id]
        if group in self._finished:
            self._finished.remove(group)
        group.requests, group.completions, group.trajectories, group.scores = {}, {}, [], None
        group.version, group.attempt = None, group.attempt + 1
        self.redrawn += 1

    def poll(self, timeout_s: float) -> int:
        """Take what has been drawn; waits for something, but no longer than ``timeout_s``. Returns how many responses there were.

        Raises:
            LostTrajectory: an answer to what was not asked for.
            RuntimeError: a response that must not be trained on.
        """
        completions = self._generator.collect(timeout_s)
        with self._changed:
            for completion in completions:
                self._accept(completion)
            self._changed.notify_all()
        return len(completions)

    def _accept(self, completion: Completion) -> None:
        if completion.request_id in self._cancelled:
            return  # it finished while it was cancelled
        if completion.request_id not in self._asked:
            raise LostTrajectory(
                f"the engines answered request {completion.request_id}, which was not made or had its answer. {REMEDY}"
            )
        group, sample = self._asked.pop(completion.request_id)
        check_completion(group.requests.pop(completion.request_id), completion)
        if self.schedule.in_order and any(version != group.version for _, version in completion.versions):
            raise RuntimeError(
                f"a response that version {group.version} was to draw is of versions {completion.versions}"
            )
        group.completions[sample] = completion
        if group.requests:
            return
        samples = sorted(group.completions.items())
        asked = [(group.prompt, sample) for sample, _ in samples]
        group.trajectories = build_trajectories(asked, [completion for _, completion in samples], self._decode)
        group.completions, group.scores = {}, self._begin_scores(group.trajectories)
        self._finished.append(group)

    def is_ready(self, wanted: int) -> bool:
        """Return whether ``take`` has so many groups to take."""
        if self.schedule.in_order:
            return all(group.trajectories for group in self._groups[:wanted])
        return len(self._finished) >= wanted

    def take(self, wanted: int) -> list[PromptGroup]:
        """Hand over so many groups for a step, by rising number.

        These are the first ones, or of those that have finished the oldest: a long response finishes behind many short ones that
        began with it, and would become too old behind them.
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
        """Return which prompts have been drawn and not learned from, as plain JSON values. Their tokens: see ``finished``."""
        described = [
            {name: getattr(group, name) for name in _KEPT} | {"occurrence": group.prompt.occurrence}
            for group in self._groups
        ]
        return {"drawn": self._drawn, "redrawn": self.redrawn, "groups": described}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the prompts of ``state``. What was being answered is asked for again."""
        self._drawn, self.redrawn = state["drawn"], state["redrawn"]
        self._groups = [
            PromptGroup(
                prompt=replace(self._prompts[group["place"]], occurrence=group["occurrence"]),
                **{name: group[name] for name in _KEPT},
            )
            for group in state["groups"]
        ]

    def finished(self) -> dict[int, list[Trajectory]]:
        """Return the responses that wait to be learned from by the number of their group, in the order in which they have finished."""
        with self._changed:
            return {group.number: group.trajectories for group in self._finished}

    def prompts_by_number(self) -> dict[int, Prompt]:
        """Return the prompt of each group."""
        return {group.number: group.prompt for group in self._groups}

    def load_finished(self, finished: Mapping[int, list[Trajectory]]) -> None:
        """Continue with responses that ``finished`` has returned, after ``load_state_dict``.

        Those of a run that did not record what this one does, such as the support or the routes that updates need, are drawn again.
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
            group.version = group.oldest_version
            self._finished.append(group)
