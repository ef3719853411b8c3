"""Compare simulated schedules with cases worked out by hand, with a slow simulation of every second, and with the analytic bound."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest

from rlhf_mcore_contrib.simulate.compare import samples_bound
from rlhf_mcore_contrib.simulate.engine import EngineTimes
from rlhf_mcore_contrib.simulate.lengths import read_lengths
from rlhf_mcore_contrib.simulate.schedule import (
    CONTINUE,
    DRAIN,
    RESUBMIT,
    Contention,
    Scenario,
    StepSchedule,
    TrainTimes,
    simulate,
)


def one_engine(prompts: int, samples: int, slots: int, sequence_s: float = 0.0, train_s: float = 4.0) -> Scenario:
    """Return a scenario with one engine. A decode step takes 1 s plus ``sequence_s`` per sequence, and a sync 1 s."""
    return Scenario(
        prompts, samples, 1, EngineTimes(1.0, sequence_s, slots=slots), TrainTimes(train_s, 0.0), sync_s=1.0
    )


def test_synchronous_with_one_slot() -> None:
    outcome = simulate(one_engine(1, 2, slots=1), StepSchedule(), lambda number: [2, 3], 5)
    assert outcome.step_s == pytest.approx(2 + 3 + 4 + 1)
    assert outcome.samples_per_s == pytest.approx(0.2)
    assert (outcome.rollout_busy, outcome.training_busy, outcome.running) == pytest.approx((0.5, 0.4, 1.0))
    assert (outcome.staleness, outcome.staleness_mean, outcome.length_mean) == ({0: 10}, 0.0, 2.5)


def test_sequences_that_are_decoded_together_slow_each_other() -> None:
    outcome = simulate(one_engine(1, 2, slots=2, sequence_s=1.0), StepSchedule(), lambda number: [2, 3], 5)
    assert outcome.step_s == pytest.approx(
        2 * 3 + 1 * 2 + 4 + 1
    )  # two steps with both sequences, one with the longer sequence alone
    assert outcome.running == pytest.approx((6 * 2 + 2 * 1) / 8)


def test_a_request_begins_when_a_slot_is_free() -> None:
    outcome = simulate(one_engine(1, 3, slots=2), StepSchedule(), lambda number: [2, 5, 4], 5)
    assert outcome.step_s == pytest.approx(2 + 4 + 4 + 1)  # the third follows the first


def test_prompts_are_computed_before_their_first_token() -> None:
    scenario = replace(one_engine(1, 2, slots=2), engine=EngineTimes(1.0, 0.0, prompt_s=0.5, slots=2))
    assert simulate(scenario, StepSchedule(), lambda number: [3, 3], 5).step_s == pytest.approx(2 * 0.5 + 3 + 4 + 1)


@pytest.mark.parametrize(("train_s", "step_s"), [(4.0, 5 + 1), (7.0, 7 + 1)])
def test_one_step_off_takes_the_longer_of_both_sides_and_the_sync(train_s: float, step_s: float) -> None:
    outcome = simulate(one_engine(1, 2, slots=1, train_s=train_s), StepSchedule(1, DRAIN), lambda number: [2, 3], 5)
    assert outcome.step_s == pytest.approx(step_s)
    assert (outcome.staleness, outcome.staleness_mean) == ({1: 10}, 1.0)


@pytest.mark.parametrize(
    ("train_s", "step_s", "busy"),
    [
        (2.0, 3 * 1.2 + 2 * 1.0 + 1, (5.6, 3.0)),  # training ends after 3 s, within the third step of decoding
        (7.0, 5 * 1.2 + (7 - 6 / 1.5) + 1, (6.0, 9.0)),  # when the engine ends after 6 s, 4 s of training are done
    ],
)
def test_trainer_and_engine_slow_each_other_while_both_compute(
    train_s: float, step_s: float, busy: tuple[float, float]
) -> None:
    scenario = replace(one_engine(1, 2, slots=1, train_s=train_s), contention=Contention(train=1.5, decode=1.2))
    outcome = simulate(scenario, StepSchedule(1, DRAIN), lambda number: [2, 3], 5)
    assert outcome.step_s == pytest.approx(step_s)
    assert (outcome.rollout_busy * step_s, outcome.training_busy * step_s) == pytest.approx(busy)
    alone = simulate(scenario, StepSchedule(), lambda number: [2, 3], 5)
    assert alone.step_s == pytest.approx(5 + train_s + 1)


def test_a_trainer_slows_passes_over_prompts_too() -> None:
    engine = EngineTimes(1.0, 0.0, prompt_s=0.5, slots=1)  # the second prompt starts when the first response has ended
    scenario = replace(one_engine(1, 2, slots=1, train_s=8.0), engine=engine, contention=Contention(decode=1.2))
    outcome = simulate(scenario, StepSchedule(1, DRAIN), lambda number: [2, 3], 5)
    assert outcome.step_s == pytest.approx(8 + 1)
    assert outcome.rollout_busy * outcome.step_s == pytest.approx(1.2 * (2 + 3 + 2 * 0.5))


def test_an_engine_of_two_slows_the_trainer_by_half() -> None:
    """Training runs at half speed for 2 s (two busy engines), at two thirds for 4 s (one), and then at full speed."""
    scenario = Scenario(2, 1, 2, EngineTimes(1.0, 0.0, slots=1), TrainTimes(5.0, 0.0), 1.0, Contention(train=2.0))
    outcome = simulate(scenario, StepSchedule(1, DRAIN), lambda number: [6 if number % 2 else 2], 5)
    assert outcome.step_s == pytest.approx(2 + 4 + (5 - 2 / 2 - 4 / 1.5) + 1)


def test_a_response_continues_over_a_publish() -> None:
    """3 of 10 tokens are decoded while the previous step trains (3 s), and 7 with the newer weights after the sync (1 s)."""
    outcome = simulate(one_engine(1, 1, slots=1, train_s=3.0), StepSchedule(1, CONTINUE), lambda number: [10], 6)
    assert outcome.step_s == pytest.approx(11.0)
    assert (outcome.rollout_busy, outcome.training_busy) == pytest.approx((10 / 11, 3 / 11))
    assert (outcome.staleness, outcome.staleness_max) == ({1: 6}, 1)
    assert outcome.staleness_mean == pytest.approx(0.3)


def test_resubmitted_tokens_are_computed_again() -> None:
    scenario = one_engine(1, 1, slots=1, train_s=3.0)
    scenario = replace(scenario, engine=EngineTimes(1.0, 0.0, prompt_s=0.25, prefix_token_s=0.5, slots=1))
    outcome = simulate(scenario, StepSchedule(1, RESUBMIT), lambda number: [10], 6)
    # The prompt takes 0.25 s of the 3 s of training. That leaves 2.75 tokens, so 3 tokens are ready after 3.25 s. After the sync, the
    # prompt and the 3 tokens are computed again (1.75 s).
    assert outcome.step_s == pytest.approx(3.25 + 1 + 0.25 + 1.5 + 7)


def test_what_is_too_old_is_started_again() -> None:
    """Steps take 10 s. A response of 40 tokens is over three versions old at its end, so a staleness of 1 never trains on it."""
    scenario = one_engine(1, 1, slots=2, train_s=9.0)
    outcome = simulate(scenario, StepSchedule(1, CONTINUE), lambda number: [40 if number == 6 else 8], 12)
    assert outcome.redrawn * 12 == 1
    assert outcome.length_mean == 8.0
    assert sum(outcome.staleness.values()) == 12 and outcome.staleness_max == 1


# ------------------------------------------------------------------------------------------- slow simulation of every second
@dataclass
class SlowGroup:
    order: int
    responses: list[list[int]]  # for each response, the versions of its tokens
    lengths: list[int]
    version: int  # at submission
    finished_at: int = -1
    cancelled: bool = False

    @property
    def is_finished(self) -> bool:
        return all(len(done) == length for done, length in zip(self.responses, self.lengths, strict=True))

    @property
    def oldest(self) -> int:
        return min(min(done) for done in self.responses)


@dataclass
class SlowEngine:
    times: EngineTimes
    waiting: list[tuple[SlowGroup, int]] = field(default_factory=list)
    running: list[tuple[SlowGroup, int]] = field(default_factory=list)
    left: int = 0  # remaining seconds of its current activity
    decodes: bool = False
    pausing: bool = False
    paused: bool = False
    busy: int = 0

    def border(self) -> bool:
        return self.left == 0

    def tidy(self) -> None:
        if self.border():
            self.running = [entry for entry in self.running if not entry[0].cancelled]
            self.waiting = [entry for entry in self.waiting if not entry[0].cancelled]

    def begin(self) -> None:
        """Start requests until all slots are used, and compute their prompts."""
        if not self.border() or self.paused:
            return
        begun = 0
        while self.waiting and len(self.running) < self.times.slots:
            self.running.append(self.waiting.pop(0))
            begun += 1
        self.left, self.decodes = round(begun * self.times.prompt_s), False

    def decode(self) -> None:
        if self.border() and self.running and not self.paused:
            self.left, self.decodes = round(self.times.decode_s(len(self.running))), True

    def tick(self, version: int) -> None:
        """Simulate one second."""
        if not self.left:
            return
        self.left -= 1
        self.busy += 1
        if not self.left and self.decodes:
            for group, place in self.running:
                group.responses[place].append(version)
            self.running = [(g, place) for g, place in self.running if len(g.responses[place]) < g.lengths[place]]


def slow(
    scenario: Scenario, schedule: StepSchedule, lengths: list[list[int]], uncounted: int, steps: int
) -> tuple[dict[int, int], dict[str, float]]:
    """Simulate every second. All durations are whole seconds. Order: engines, finished groups, trainer, engines again."""
    bound, engines = schedule.max_staleness, [SlowEngine(scenario.engine) for _ in range(scenario.num_engines)]
    per_step = int(-(-scenario.prompts * schedule.oversample // 1))
    groups: list[SlowGroup] = []  # started, but neither trained nor dropped
    drawn = started = version = now = redrawn = training = spent = 0
    state, until, batch = "wait", 0, list[SlowGroup]()
    published: list[tuple[int, ...]] = []
    staleness: Counter[int] = Counter()
    ages: list[int] = []

    def fill() -> None:
        nonlocal drawn, started, redrawn
        old = [g for g in groups if (g.oldest if g.finished_at >= 0 else g.version) < version - bound]
        for group in old:
            group.cancelled = True
            groups.remove(group)
            redrawn += 1
        orders = sorted(group.order for group in old)
        while len(groups) + len(orders) < per_step + bound * scenario.prompts:
            orders.append(started)
            started += 1
        for order in orders:
            group = SlowGroup(order, [[] for _ in lengths[drawn]], lengths[drawn], version)
            drawn += 1
            groups.append(group)
            target = min(engines, key=lambda engine: len(engine.running) + len(engine.waiting))
            target.waiting += [(group, place) for place in range(len(group.lengths))]

    fill()
    while version < uncounted + steps:
        for engine in engines:
            engine.tidy()
            if engine.border() and engine.pausing:
                engine.paused, engine.pausing = True, False
            engine.begin()
        ended = [g for g in groups if g.finished_at < 0 and g.is_finished]
        for group in ended:
            group.finished_at = now
        if state == "train" and now >= until:
            state = "drain" if schedule.at_publish == DRAIN else "pause"
        if state == "drain" and all(g.finished_at >= 0 for g in groups):
            state = "pause"
        if state == "pause":
            for engine in engines:
                engine.paused = engine.paused or (engine.border())
                engine.pausing = not engine.paused
            if all(engine.paused for engine in engines):
                state, until = "sync", now + int(scenario.sync_s)
        if state == "sync" and now >= until:
            if version >= uncounted:
                for group in batch:
                    staleness[version - group.oldest] += len(group.lengths)
                    ages += [version - made for done in group.responses for made in done]
            version, state = version + 1, "wait"
            for engine in engines:
                engine.paused = False
                again = round(scenario.engine.prompt_s) * len(engine.running)
                again += round(scenario.engine.prefix_token_s) * sum(len(g.responses[i]) for g, i in engine.running)
                engine.begin()
                if schedule.at_publish == RESUBMIT:
                    engine.left += again
            training += spent
            fill()
        if state == "wait":
            ready = sorted((g for g in groups if g.finished_at >= 0), key=lambda g: (g.oldest, g.finished_at, g.order))
            if len(ready) >= scenario.prompts:
                batch, state = ready[: scenario.prompts], "train"
                groups = [g for g in groups if g not in batch]
                tokens = sum(sum(g.lengths) for g in batch)
                spent = int(scenario.train.step_s + scenario.train.token_s * tokens)
                until = now + spent
        if len(published) < version:
            published.append((now, redrawn, training, sum(engine.busy for engine in engines)))
        for engine in engines:
            engine.tidy()
            engine.begin()
            engine.decode()
            engine.tick(version)
        now += 1
    counts = [after - before for before, after in zip(published[uncounted - 1], published[-1], strict=True)]
    return dict(sorted(staleness.items())), {
        "step_s": counts[0] / steps,
        "redrawn": counts[1] / (steps * scenario.prompts),
        "training_busy": counts[2] / counts[0],
        "rollout_busy": counts[3] / counts[0] / scenario.num_engines,
        "staleness_mean": sum(ages) / len(ages),
    }


def case(seed: int) -> tuple[Scenario, StepSchedule, list[list[int]]]:
    """Return a small random case with durations in whole seconds."""
    rng = random.Random(seed)
    bound = rng.randrange(4)
    prompts, samples = rng.randint(1, 4), rng.randint(1, 3)
    schedule = StepSchedule(
        bound,
        rng.choice((DRAIN, CONTINUE, RESUBMIT)) if bound else DRAIN,
        rng.choice((1.0, 1.0, 1.25, 2.0)) if bound else 1.0,
    )
    engine = EngineTimes(
        rng.randint(1, 3), rng.randint(0, 2), rng.randint(0, 2), rng.randint(0, 1), slots=rng.randint(1, 6)
    )
    train = TrainTimes(rng.randint(1, 60), rng.randint(0, 1))
    scenario = Scenario(prompts, samples, rng.randint(1, 3), engine, train, float(rng.randint(1, 5)))
    longest = rng.choice((6, 40))
    return scenario, schedule, [[1 + int(rng.random() ** 3 * longest) for _ in range(samples)] for _ in range(600)]


def test_every_schedule_is_as_a_slow_version_plays_it() -> None:
    seen: Counter[str] = Counter()
    for seed in range(50):
        scenario, schedule, lengths = case(seed)
        outcome = simulate(scenario, schedule, lengths.__getitem__, 12)
        staleness, expected = slow(scenario, schedule, lengths, 2 * schedule.max_staleness + 2, 12)
        found = {name: getattr(outcome, name) for name in expected}
        assert found == pytest.approx(expected, rel=1e-9), (seed, scenario, schedule)
        assert outcome.staleness == staleness
        seen[schedule.at_publish] += 1
        seen["begun again"] += outcome.redrawn > 0
        seen["mixed versions"] += 0 < outcome.staleness_mean % 1 < 1
    assert len(seen) == 5 and min(seen.values()) >= 4, seen  # every feature occurs in several compared cases


# ------------------------------------------------------------------------------------------------------------- the bound
BALANCED = Scenario(64, 8, 4, EngineTimes(0.02, 0.0002, 0.01, slots=128), TrainTimes(2.0, 0.0), sync_s=1.0)


# Engines are slower than, about as fast as, or faster than the trainer. If they are slower, a staleness of 2 drops 1 of 20 groups.
@pytest.mark.parametrize(("train_s", "bound"), [(8.0, 3), (14.0, 3), (20.0, 2), (40.0, 1)])
def test_partial_rollouts_come_near_to_the_bound_where_lengths_are_mild(train_s: float, bound: int) -> None:
    """Benchmark row ``pipelined``: 64 prompts with 8 responses of about 250 tokens on four engines, 13 s of generation."""
    lengths = read_lengths("lognormal(5.5,0.3,600)", 600)
    scenario = replace(BALANCED, train=TrainTimes(train_s, 0.0))
    schedule = StepSchedule(bound, CONTINUE)
    outcome = simulate(scenario, schedule, lengths.draw(8, 0), 20)
    assert 0.95 <= outcome.samples_per_s / samples_bound(scenario, schedule, lengths.mean) <= 1.01


def test_the_bound_by_hand() -> None:
    scenario = Scenario(4, 2, 2, EngineTimes(1.0, 0.5, 0.25, slots=3), TrainTimes(5.0, 0.1), sync_s=2.0)
    # On average an engine runs three of at most four requests: 10 * (1 + 3 / 2) / 3 + 1 / 4 seconds for each of its four responses.
    generate_s, train_s = 4 * (10 * 2.5 / 3 + 0.25), 5 + 0.1 * 8 * 10
    assert samples_bound(scenario, StepSchedule(), 10.0) == pytest.approx(8 / (generate_s + train_s + 2))
    assert samples_bound(scenario, StepSchedule(1, CONTINUE), 10.0) == pytest.approx(8 / (max(generate_s, train_s) + 2))


def test_a_long_tail_is_what_partial_rollouts_are_for() -> None:
    """With mild lengths, one step off comes equally close to its bound. With a long tail, only partial rollouts do."""
    scenario = replace(BALANCED, train=TrainTimes(20.0, 0.0))

    def share(source: str, schedule: StepSchedule) -> float:
        lengths = read_lengths(source, 4096)
        rate = simulate(scenario, schedule, lengths.draw(8, 0), 20).samples_per_s
        return rate / samples_bound(scenario, schedule, lengths.mean)

    off, partial = StepSchedule(1, DRAIN), StepSchedule(2, CONTINUE)
    assert share("lognormal(5.5,0.05,600)", off) > 0.9
    assert share("lognormal(5,1,4096)", off) < 0.6 < 0.85 < share("lognormal(5,1,4096)", partial)
