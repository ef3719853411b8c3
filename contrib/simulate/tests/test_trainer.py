"""Compare simulated schedules with the trainer's ``SamplingAhead`` on engines with simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
import pytest

from rlhf_mcore.data.sampler import PromptSampler
from rlhf_mcore.sampling.rollouts import single_turn_trajectory
from rlhf_mcore.trainer.ahead import SamplingAhead
from rlhf_mcore.trainer.ahead import SamplingSchedule as TrainersSchedule
from rlhf_mcore.types import Completion, Job, Sampling, Score, Trajectory
from rlhf_mcore_contrib.simulate.engine import EngineTimes, SimulatedEngine, SimulatedGroup, SimulatedRequest
from rlhf_mcore_contrib.simulate.lengths import read_lengths
from rlhf_mcore_contrib.simulate.schedule import CONTINUE, DRAIN, RESUBMIT, Scenario, StepSchedule, TrainTimes, simulate
from tests.episodes import resolved_future
from tests.unit.trainer.records import prompt

PROMPTS = [prompt(index) for index in range(64)]
SAMPLES, STEPS = 2, 12


class PlayedEngines:
    """Simulated engines. The samples of a prompt go to the engine with the fewest requests."""

    def __init__(self, scenario: Scenario, draw: Callable[[int], list[int]]) -> None:
        self.engines = [SimulatedEngine(scenario.engine) for _ in range(scenario.num_engines)]
        self.draw, self.drawn, self.now, self.version = draw, 0, 0.0, 0
        self.jobs: dict[int, tuple[Job, Future[Trajectory]]] = {}  # by id() of a simulated request
        self.kept: list[SimulatedRequest] = []

    def begin(self, jobs: Sequence[Job]) -> list[Future[Trajectory]]:
        loads, futures = [engine.load for engine in self.engines], [Future[Trajectory]() for _ in jobs]
        for start in range(0, len(jobs), SAMPLES):
            group = SimulatedGroup(SAMPLES, self.version, self.drawn)
            mine = [SimulatedRequest(group, length) for length in self.draw(self.drawn)]
            self.drawn += 1
            self.kept += mine
            for place, request in enumerate(mine, start):
                self.jobs[id(request)] = jobs[place], futures[place]
                futures[place].add_done_callback(partial(self.note_end, group))
            number = loads.index(min(loads))
            loads[number] += SAMPLES
            self.engines[number].submit(mine, self.now)
        return futures

    def note_end(self, group: SimulatedGroup, future: Future[Trajectory]) -> None:
        if future.cancelled():
            group.cancelled = True
            for engine in self.engines:
                engine.cancel(self.now)

    def play(self, until: float) -> bool:
        """Process the next event, if it is not after ``until``."""
        at = min(engine.next_at for engine in self.engines)
        if at > until or at == float("inf"):
            return False
        self.now = at
        done = [(engine, each) for engine in self.engines if engine.next_at == at for each in engine.settle()]
        for engine, request in sorted(done, key=lambda each: self.jobs[id(each[1])][0].number):
            self.jobs[id(request)][1].set_result(self._outcome(engine, request))
        return True

    def _outcome(self, engine: SimulatedEngine, request: SimulatedRequest) -> Trajectory:
        places = [max(0, at - request.first_step) for at in engine.publishes]
        runs = {place: version for version, place in enumerate([0, *places])}  # the newest version at each place
        ids = np.zeros(request.length, np.int32)
        job, logprobs = self.jobs[id(request)][0], np.zeros(len(ids), np.float32)
        completion = Completion(job.number, ids, logprobs, tuple(sorted(runs.items())), "stop")
        return single_turn_trajectory(job, completion, lambda rows: [""])


def scores_of(trajectories: Sequence[Trajectory]) -> Future[list[Score]]:
    return resolved_future([Score(0.0) for _ in trajectories])


def train(
    scenario: Scenario, schedule: StepSchedule, draw: Callable[[int], list[int]], steps: int
) -> tuple[list[float], ...]:
    """Run the loop of ``trainer/pipeline.py``.

    Returns, for each version, its publish time and the number of restarted groups; for each step, the staleness of the oldest token of
    its groups, and its tokens.
    """
    engines = PlayedEngines(scenario, draw)
    sampler = PromptSampler(len(PROMPTS), scenario.prompts, seed=1, shuffle=True)
    drains = schedule.at_publish == DRAIN
    own = TrainersSchedule(scenario.prompts, schedule.max_staleness, schedule.oversample, drain=drains)
    sampling = Sampling(n=SAMPLES, seed=1)
    ahead = SamplingAhead(PROMPTS, sampler, engines.begin, sampling, own, scores_of)
    ends, redrawn, oldest, lengths = [0.0], list[int](), list[list[int]](), list[int]()

    def take_until(is_done: Callable[[], bool], until: float = float("inf")) -> None:
        while not is_done() and engines.play(until):
            pass

    for step in range(1, steps + 1):
        ahead.fill(step)
        redrawn.append(ahead.redrawn)
        take_until(lambda: ahead.is_ready(scenario.prompts))
        taken = [trajectory for group in ahead.take(scenario.prompts) for trajectory in group.trajectories]
        tokens = sum(trajectory.num_sampled for trajectory in taken)
        end = engines.now + scenario.train.step_s + scenario.train.token_s * tokens
        take_until(lambda: False, end)
        engines.now = end
        if drains:
            take_until(lambda: not ahead.num_in_flight)
        for engine in engines.engines:
            engine.pause(engines.now)
        take_until(lambda: all(engine.paused for engine in engines.engines))
        engines.now, engines.version = engines.now + scenario.sync_s, step
        for engine in engines.engines:
            engine.resume(engines.now, step, resubmit=schedule.at_publish == RESUBMIT)
        ends.append(engines.now)
        groups = [taken[start : start + SAMPLES] for start in range(0, len(taken), SAMPLES)]
        oldest += [[step - 1 - min(t.policy_version for t in group) for group in groups]]
        lengths.append(tokens)
    ahead.fill(steps + 1)
    return ends, [*redrawn, ahead.redrawn], oldest, lengths


@pytest.mark.parametrize(
    ("bound", "at_publish", "oversample"),
    [(0, DRAIN, 1.0), (1, DRAIN, 1.0), (1, CONTINUE, 1.0), (2, RESUBMIT, 1.0), (2, CONTINUE, 1.5), (4, CONTINUE, 1.0)],
)
@pytest.mark.parametrize("train_s", [2.0, 9.0])
def test_a_simulated_schedule_is_the_trainers(bound: int, at_publish: str, oversample: float, train_s: float) -> None:
    engine = EngineTimes(0.031, 0.00173, 0.0037, 0.0001, slots=10)
    scenario = Scenario(6, SAMPLES, 2, engine, TrainTimes(train_s, 0.0011), sync_s=0.53)
    schedule = StepSchedule(bound, at_publish, oversample)
    draw = read_lengths("lognormal(4,1,400)", 400).draw(SAMPLES, 3)
    outcome = simulate(scenario, schedule, draw, STEPS)
    first = 2 * bound + 2
    ends, redrawn, oldest, tokens = train(scenario, schedule, draw, first + STEPS)
    assert outcome.step_s == pytest.approx((ends[-1] - ends[first]) / STEPS, rel=1e-9)
    assert outcome.length_mean == pytest.approx(sum(tokens[first:]) / (STEPS * 6 * SAMPLES))
    ages = Counter(age for step in oldest[first:] for age in step)
    assert {age: count // SAMPLES for age, count in outcome.staleness.items()} == dict(ages)
    assert outcome.redrawn or at_publish == DRAIN or train_s > 2  # restarted groups must be compared too
    assert outcome.redrawn * STEPS * 6 == pytest.approx(redrawn[-1] - redrawn[first])
