"""Sampling ahead: which prompts a step takes, against engines that finish in any order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from threading import Thread

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mcore.data.episodes import decode_trajectories, encode_trajectories
from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.sampling.rollouts import request_of, single_turn_trajectory
from rlhf_mcore.trainer.ahead import PromptGroup, SamplingAhead, SamplingSchedule
from rlhf_mcore.types import Completion, Job, Ragged, Sampling, Score, Trajectory
from tests.episodes import resolved_future
from tests.messages import expect_error
from tests.unit.trainer.records import prompt

SAMPLES = 2
PROMPTS = [prompt(index) for index in range(7)]


class Engines:
    """Engines that finish a few jobs per call, in random order. A response contains its seed and versions. Jobs are numbered."""

    def __init__(self, order: random.Random, at_once: int = 3) -> None:
        self.order, self.at_once, self.version = order, at_once, 0
        self.begun: dict[int, tuple[Job, list[int], Future[Trajectory]]] = {}  # with the versions of the tokens so far
        self.submitted: list[list[int]] = []
        self.numbers = count()

    def begin(self, jobs: Sequence[Job]) -> list[Future[Trajectory]]:
        started = {next(self.numbers): (job, [self.version], Future[Trajectory]()) for job in jobs}
        self.submitted.append(list(started))
        self.begun |= started
        return [future for *_, future in started.values()]

    def publish(self, version: int) -> None:
        self.version = version
        for _, versions, _ in self.running().values():
            versions.append(version)

    def running(self) -> dict[int, tuple[Job, list[int], Future[Trajectory]]]:
        """Drop cancelled jobs, and return the others."""
        self.begun = {number: each for number, each in self.begun.items() if not each[2].cancelled()}
        return self.begun

    def finish(self, *numbers: int) -> None:
        """Finish these jobs, by default some of all."""
        for number in numbers or self.order.sample(sorted(self.running()), min(self.at_once, len(self.begun))):
            job, versions, future = self.begun.pop(number)
            future.set_result(trajectory(job, versions))


def trajectory(job: Job, versions: list[int]) -> Trajectory:
    ids = np.array([request_of(job).seed % 1000, *versions], np.int32)
    runs = ((0, versions[0]), *((place + 1, version) for place, version in enumerate(versions) if place))
    completion = Completion(job.number, ids, np.full(len(ids), -0.5, np.float32), runs, "stop")
    return single_turn_trajectory(job, completion, lambda rows: ["text"])


def scores_of(trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
    return resolved_future([Score(float(t.sampled_ids[0])) for t in trajectories])


def ahead_of(
    engines: Engines, schedule: SamplingSchedule, sampling: Sampling | None = None
) -> tuple[SamplingAhead, PromptSampler]:
    sampler = PromptSampler(len(PROMPTS), schedule.prompts_per_step, seed=5, shuffle=True)
    sampling = sampling or Sampling(n=SAMPLES, seed=9)
    return SamplingAhead(PROMPTS, sampler, engines.begin, sampling, schedule, scores_of), sampler


def step_with(ahead: SamplingAhead, engines: Engines, step: int) -> list[PromptGroup]:
    """Make a step like the loop: fill, wait, take; learn; drain if the schedule says so; publish."""
    ahead.fill(step)
    assert ahead.num_in_flight <= ahead.schedule.limit(step) * SAMPLES
    wanted = ahead.schedule.prompts_per_step
    while not ahead.is_ready(wanted):
        engines.finish()
    taken = ahead.take(wanted)
    for _ in range(engines.order.randrange(3)):  # engines continue while the trainer learns
        engines.finish()
    while ahead.schedule.drain and ahead.num_in_flight:
        engines.finish()
    engines.publish(step)
    return taken


def describe(taken: Sequence[PromptGroup]) -> list[tuple[int, str, int, list[list[int]]]]:
    return [
        (
            group.number,
            group.prompt.prompt_id,
            group.prompt.occurrence,
            [t.sampled_ids.tolist() for t in group.trajectories],
        )
        for group in taken
    ]


schedules = st.builds(
    SamplingSchedule,
    prompts_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 3),
    oversample=st.sampled_from([1.0, 1.25, 2.0]),
)


@settings(max_examples=30, deadline=None)
@given(schedules, st.integers(0, 2**32), st.integers(1, 9))
def test_every_prompt_is_learned_from_once_and_soon(schedule: SamplingSchedule, seed: int, at_once: int) -> None:
    engines = Engines(random.Random(seed), at_once)
    ahead, sampler = ahead_of(engines, schedule)
    learned: list[int] = []
    for step in range(1, 9):
        taken = step_with(ahead, engines, step)
        assert len(taken) == schedule.prompts_per_step
        learned += [group.number for group in taken]
        for group in taken:
            assert [t.sample for t in group.trajectories] == list(range(SAMPLES)) and group.scores is not None
            assert [score.value for score in group.scores.result()] == [t.sampled_ids[0] for t in group.trajectories]
            versions = [version for t in group.trajectories for _, version in t.versions]
            assert step - 1 - max(versions) >= 0 and step - 1 - min(versions) <= schedule.max_staleness
    waiting = [group["number"] for group in ahead.state_dict()["groups"]]
    assert Counter(learned + waiting) == Counter(range(sampler.num_drawn))


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_in_order_and_drained_the_engines_order_does_not_matter(max_staleness: int) -> None:
    """Prompts and seeds equal the synchronous trainer's, and policies are ``max_staleness`` versions older."""
    schedule = SamplingSchedule(3, max_staleness, in_order=True, drain=True)
    runs = []
    for seed in range(4):
        engines = Engines(random.Random(seed), at_once=seed + 1)
        ahead, _ = ahead_of(engines, schedule)
        runs.append([describe(step_with(ahead, engines, step)) for step in range(1, 7)])
    assert runs[0] == runs[1] == runs[2] == runs[3]
    for step, taken in enumerate(runs[0], 1):
        assert [number for number, *_ in taken] == list(range(3 * (step - 1), 3 * step))
        assert {ids[1] for *_, samples in taken for ids in samples} == {max(step - 1 - max_staleness, 0)}


def test_one_step_off_submits_a_batch_while_the_one_before_is_learned_from() -> None:
    engines = Engines(random.Random(0))
    ahead, _ = ahead_of(engines, SamplingSchedule(2, 1, in_order=True, drain=True))
    step_with(ahead, engines, 1)
    assert engines.submitted == [list(range(8))]  # two batches of two prompts
    assert (
        ahead.progress() == "4 finished · 0 waiting · longest 2 tokens"
    )  # longest of the second batch: a seed and a version
    step_with(ahead, engines, 2)
    assert engines.submitted[1:] == [list(range(8, 12))]


@pytest.mark.parametrize("in_order", [False, True])
def test_nothing_is_sampled_for_steps_that_the_run_does_not_have(in_order: bool) -> None:
    """In order it is, as in a run that had more steps from the beginning."""
    schedule = SamplingSchedule(2, 2, in_order=in_order, drain=True, last_step=4)
    engines = Engines(random.Random(0))
    ahead, sampler = ahead_of(engines, schedule)
    for step in range(1, 5):
        step_with(ahead, engines, step)
    assert sampler.num_drawn == (12 if in_order else 8) and len(ahead.state_dict()["groups"]) == (4 if in_order else 0)


def test_what_waits_longest_is_learned_from_first() -> None:
    """Groups 0, 1 and 2 begin together. 3 begins a version later and finishes before 0 and 2. The older 0 and 2 come first."""
    engines = Engines(random.Random(0), at_once=0)
    ahead, _ = ahead_of(engines, SamplingSchedule(1, 2))
    taken = []
    for step, finish in enumerate(([1], [3, 0, 2], [], []), 1):
        ahead.fill(step)
        for number in (group * SAMPLES + sample for group in finish for sample in range(SAMPLES)):
            engines.finish(number)
        taken += [group.number for group in ahead.take(1)]
        engines.publish(step)
    assert taken == [1, 0, 2, 3] and ahead.redrawn == 0


@pytest.mark.parametrize("in_order", [True, False])
def test_a_run_that_was_killed_goes_on_with_what_has_finished(in_order: bool) -> None:
    schedule = SamplingSchedule(3, 2, in_order=in_order, drain=True)
    engines = Engines(random.Random(1))
    ahead, sampler = ahead_of(engines, schedule)
    for step in (1, 2, 3):
        step_with(ahead, engines, step)
    state, data, cursor = ahead.state_dict(), encode_trajectories(ahead.finished_trajectories()), sampler.state_dict()
    further = [describe(step_with(ahead, engines, step)) for step in (4, 5, 6)]

    again = Engines(random.Random(2))
    again.publish(3)
    resumed, sampler = ahead_of(again, schedule)
    sampler.load_state_dict(cursor)
    resumed.load_state_dict(state)
    resumed.load_finished(decode_trajectories(data, resumed.prompts_by_number()))
    found = [describe(step_with(resumed, again, step)) for step in (4, 5, 6)]
    if in_order:
        assert found == further
    else:  # the order of finishing differs; nothing is lost or doubled
        drawn = [number for taken in found for number, *_ in taken]
        drawn += [group["number"] for group in resumed.state_dict()["groups"]]
        assert sorted(drawn) == list(range(9, sampler.num_drawn))


def test_greedy_responses_are_drawn_ahead_and_wait_in_a_checkpoint_with_the_samples() -> None:
    sampling = Sampling(n=1, top_k=3, seed=9, records_support=True, baseline=True)
    ahead, _ = ahead_of(engines := Engines(random.Random(1), at_once=99), SamplingSchedule(2, 1), sampling)

    def with_support(job: Job, versions: list[int]) -> Trajectory:
        made, is_greedy = trajectory(job, versions), job.sample == 1
        if not is_greedy:
            made.support = Ragged(made.loss_mask.astype(np.int32), made.sampled_ids)
        return made

    ahead.fill(1)
    assert sorted(request_of(job).sampling.temperature for job, *_ in engines.begun.values()) == [0.0] * 4 + [1.0] * 4
    for job, versions, future in engines.begun.values():
        future.set_result(with_support(job, versions))
    waiting = describe(ahead.take(2))
    assert [len(samples) for *_, samples in waiting] == [2, 2]
    state, data = ahead.state_dict(), encode_trajectories(ahead.finished_trajectories())
    resumed, _ = ahead_of(Engines(random.Random(2)), SamplingSchedule(2, 1), sampling)
    resumed.load_state_dict(state)
    resumed.load_finished(decode_trajectories(data, resumed.prompts_by_number()))
    assert resumed.is_ready(2) and describe(resumed.take(2)) == describe(ahead.take(2))


def test_what_is_too_old_is_begun_again_with_other_seeds() -> None:
    engines = Engines(random.Random(0), at_once=0)  # nothing finishes
    ahead, _ = ahead_of(engines, SamplingSchedule(1, 1))
    ahead.fill(1)
    first = {number: request_of(job).seed for number, (job, *_) in engines.begun.items()}
    for version in (1, 2):
        engines.publish(version)
        ahead.fill(version + 1)
    assert ahead.redrawn == 2 and not engines.running().keys() & first.keys()
    ahead.wait(0.0)  # jobs of a restarted group are no errors
    assert ahead.num_in_flight == len(engines.begun)
    assert not {request_of(job).seed for job, *_ in engines.begun.values()} & set(first.values())
    assert {job.name for job, *_ in engines.begun.values()} == {
        f"prompt {asked.prompt_id!r}, sample {sample}"
        for asked in ahead.prompts_by_number().values()
        for sample in range(SAMPLES)
    }


def test_each_step_of_an_asynchronous_run_has_its_own_seeds() -> None:
    engines = Engines(random.Random(0))
    ahead, _ = ahead_of(engines, SamplingSchedule(2, 1, drain=True))
    ahead.fill(1)
    jobs = [job for job, *_ in engines.begun.values()]
    assert [job.step for job in jobs] == [1, 1, 1, 1, 2, 2, 2, 2]  # two prompts per step, two samples each
    assert {job.sampling.seed for job in jobs} == {9}  # the seed of the run, until a group is sampled again


def test_a_wait_ends_when_a_group_finishes_or_the_engines_fail() -> None:
    engines = Engines(random.Random(0))
    ahead, _ = ahead_of(engines, SamplingSchedule(2, 1, drain=True))
    ahead.fill(1)
    thread = Thread(target=engines.finish, args=(0, 1))
    thread.start()
    while ahead.num_in_flight > 6:  # the group may finish before the wait begins
        ahead.wait(0.1)
    thread.join()
    assert len(ahead.finished_trajectories()) == 1 and ahead.num_in_flight == 6
    for *_, future in engines.running().values():
        future.set_exception(RuntimeError("all engines are lost"))
    with pytest.raises(RuntimeError, match="all engines are lost"):
        ahead.wait(30.0)


def test_fault_36_in_order_a_response_of_another_version_ends_the_run() -> None:
    engines = Engines(random.Random(0))
    ahead, _ = ahead_of(engines, SamplingSchedule(1, 1, in_order=True, drain=True))
    ahead.fill(1)
    engines.publish(1)  # while the job runs
    engines.finish()
    with expect_error(RuntimeError, field=("version 0", "versions"), value="((2, 0), (4, 1))"):
        ahead.wait(1.0)


def test_damaged_rollouts_are_refused() -> None:
    engines = Engines(random.Random(0))
    ahead, _ = ahead_of(engines, SamplingSchedule(2, 1, drain=True))
    step_with(ahead, engines, 1)
    content, prompts = encode_trajectories(ahead.finished_trajectories()), ahead.prompts_by_number()
    for wrong in (b"", content[:-8], content.replace(b'"records"', b'"recordz"')):
        with pytest.raises(ValueError, match="it contains no trajectories"):
            decode_trajectories(wrong, prompts)
    with pytest.raises(ValueError, match="it contains no trajectories"):
        decode_trajectories(content, {})
