"""The fleet's actions over time, with fake engines and a fake clock. Real engines under Ray are in tests/e2e/remote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.data.episodes import episode
from rlhf_mcore.protocols import EngineProcess, GroupSpec, PeersLost
from rlhf_mcore.rollout.remote.fleet import Fleet
from rlhf_mcore.rollout.remote.fleet_state import EnginesLost, FleetPlan
from rlhf_mcore.rollout.remote.host import EngineReport, JobOutcome, Location, RankRendezvous, Work, without_rows
from rlhf_mcore.types import Completion, EngineWork, Job, Prompt, Request, Sampling, Trajectory
from tests.messages import expect_error

TIMEOUT_S = 10.0
SLOTS = 4  # turns that an engine samples at once


@dataclass(eq=False)
class Call:
    """Answered when the test says so."""

    method: str
    arguments: tuple[Any, ...]
    answer: Any = None
    done: bool = False

    def is_done(self) -> bool:
        return self.done

    def result(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass(eq=False)
class Engine:
    """A rank of an engine that obeys at once, until it is lost or stops answering."""

    process: str
    calls: list[Call] = field(default_factory=list)
    drawing: dict[int, Work] = field(default_factory=dict)
    tokens: int = 0
    reported: int = 0  # tokens in reports
    lost: bool = False
    answers: bool = True
    draws: bool = True
    raises: dict[str, Exception] = field(default_factory=dict)
    location: Location = field(default_factory=lambda: Location("127.0.0.1", 1))
    finished: list[JobOutcome] = field(default_factory=list)
    held: list[Request] = field(default_factory=list)  # turns of episodes that wait for room
    lent: list[Request] = field(default_factory=list)
    came_back: list[tuple[int, Completion]] = field(default_factory=list)

    def call(self, method: str, *arguments: Any) -> Call:
        call = Call(method, arguments)
        self.calls.append(call)
        if method == "submit":
            self.drawing |= {work.number: work for work in arguments[0]}
        elif method == "cancel":
            self.drawing = {number: found for number, found in self.drawing.items() if number not in arguments[0]}
        elif method == "lend_turns":
            self.lent, self.held = self.held[: arguments[0]], self.held[arguments[0] :]
        elif method == "take_back":
            self.came_back.append((arguments[0], arguments[1]))
        if self.lost:
            call.answer, call.done = RuntimeError("the process is gone"), True
        elif method != "report" and self.answers:
            call.answer, call.done = self.raises.get(method, self.location if method == "locate" else None), True
        return call

    def calls_of(self, *methods: str) -> list[tuple[Any, ...]]:
        return [(call.method, *call.arguments) for call in self.calls if call.method in methods]

    def draw(self, *request_ids: int) -> None:
        """Finish these requests, by the weights that came last."""
        version = self.calls_of("sync")[-1][1] if self.calls_of("sync") else 0
        for number in request_ids:
            work = self.drawing.pop(number)
            self.finished.append(JobOutcome(number, result_of(work, version)))
            self.tokens += 1

    def look(self) -> None:
        """Sample tokens, and answer the pending calls."""
        self.tokens += self.draws and len(self.drawing)
        for call in self.calls:
            if call.method == "report" and not call.done and (self.answers or self.lost):
                call.done = True
                work, held = EngineWork(2, self.tokens, 0.5), len(self.held)
                call.answer = (
                    RuntimeError("the process is gone")
                    if self.lost
                    else EngineReport(self.finished, self.tokens, len(self.drawing), 0, 0, work, held, self.lent)
                )
                self.lent = []
                self.finished, self.reported = [], self.reported if self.lost else self.tokens


class Machines:
    """Starts fakes, and advances the clock when the fleet waits."""

    def __init__(self) -> None:
        self.now, self.engines, self.ended = 0.0, {}, []  # type: ignore[var-annotated]
        self.is_gone: str | None = None
        self.room = 8

    def clock(self) -> float:
        return self.now

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def problem(self) -> str | None:
        return self.is_gone

    def capacity_problem(self, engines: int, tp: int, wait_s: float = 0.0) -> str | None:
        return "no room" if engines * tp > self.room else None

    def spawn(self, name: str, tp: int) -> Sequence[Engine]:
        made = [Engine(f"{name}.{rank}") for rank in range(tp)]
        self.engines |= {found.process: found for found in made}
        return made

    def end(self, name: str, processes: Sequence[Any]) -> None:
        self.ended.append(name)

    def wait(self, calls: Sequence[Any], timeout_s: float, *, every: bool = False) -> None:
        self.now += timeout_s


@dataclass
class Run:
    machines: Machines
    fleet: Fleet
    notes: list[str]
    futures: dict[int, Future[Trajectory]] = field(default_factory=dict)  # by the number of the job

    def begin(self, made: Sequence[Job]) -> None:
        """Start jobs with their own numbers."""
        self.fleet._job_numbers = iter([job.number for job in made])  # type: ignore[assignment]
        self.futures |= zip([job.number for job in made], self.fleet.begin(made), strict=True)

    def cancel(self, *cancelled: int) -> None:
        for number in cancelled:
            self.futures.pop(number).cancel()

    def take_finished(self) -> dict[int, Trajectory]:
        """Return the trajectories that have finished since the last call."""
        done = {number: future.result() for number, future in self.futures.items() if future.done()}
        self.futures = {number: future for number, future in self.futures.items() if number not in done}
        return done

    def turn(self, seconds: float = 0.1) -> None:
        """The engines answer, and the fleet looks at them."""
        self.machines.now += seconds
        for engine in list(self.machines.engines.values()):
            engine.look()
        self.fleet.tick()

    def pass_time(self, seconds: float) -> None:
        """In turns that are short against every deadline."""
        for _ in range(int(seconds / 2)):
            self.turn(2.0)

    def publish(self, version: int = 0) -> list[str]:
        members = self.fleet.pause()
        self.fleet.join([GroupSpec("g", "", 0, rank, len(members), 1.0) for rank in range(len(members))], "{}")
        assert self.fleet.finish(5.0) == []
        self.fleet.begin_sync(version)
        assert self.fleet.finish(5.0) == []
        self.fleet.resume(version)
        return [member.process for member in members]

    def engine(self, name: str) -> Engine:
        found: Engine = self.machines.engines[name]
        return found


Start = Callable[..., Run]


@pytest.fixture
def start() -> Start:
    """A fleet whose engines have weights."""

    def start_run(engines: int = 2, tp: int = 1, restarts: int = 2, in_order: bool = False) -> Run:
        machines, notes = Machines(), []  # type: ignore[var-annotated]
        order: Any = None
        plan = FleetPlan(order, engines, tp, 1, TIMEOUT_S, restarts, in_order, SLOTS)
        fleet = Fleet(machines, plan, notes.append, machines.clock)
        fleet._changed.wait = lambda seconds: machines.wait((), seconds)  # type: ignore[method-assign,assignment,return-value]
        run = Run(machines, fleet, notes)
        for _ in range(3):
            run.turn()
        run.publish()
        assert notes == [f"engine {number} is ready after 0 s, at 127.0.0.1" for number in range(engines)]
        notes.clear()
        return run

    return start_run


def result_of(work: Work, version: int) -> Trajectory | Completion:
    """A job's response has its number as its token, and a turn its seed."""
    token = work.number if isinstance(work, Job) else work.request.seed
    drawn = Completion(0, np.array([token], np.int32), np.zeros(1, np.float32), ((0, version),), "stop")
    return episode(work.prompt, work.sample, [drawn], "") if isinstance(work, Job) else drawn


def jobs(*prompts: int, samples: int = 2) -> list[Job]:
    """Numbers are 10 * prompt + sample."""
    made = [Prompt(f"p{prompt}", prompt, [prompt, 7], "") for prompt in prompts]
    return [Job(10 * p.index + sample, p, sample, Sampling(n=samples), 1) for p in made for sample in range(samples)]


def numbers(finished: Mapping[int, Trajectory]) -> list[int]:
    assert all(trajectory.sampled_ids.tolist() == [number] for number, trajectory in finished.items())
    return sorted(finished)


def test_samples_of_a_prompt_share_an_engine_and_engines_share_the_prompts(start: Start) -> None:
    run = start()
    run.begin(jobs(1, 2, 3))
    assert [sorted(run.engine(name).drawing) for name in ("0.0.0", "1.0.0")] == [[10, 11, 30, 31], [20, 21]]
    run.begin(jobs(4))
    assert sorted(run.engine("1.0.0").drawing) == [20, 21, 40, 41]
    run.engine("0.0.0").draw(11, 30)
    run.turn()
    assert numbers(run.take_finished()) == [11, 30] and run.take_finished() == {}


TURN = 2**40  # ids of turns are above it, and the same in two engines


def turns(count: int) -> list[Request]:
    return [Request((number + 1) * TURN, "turn", [number], Sampling(), seed=number) for number in range(count)]


def start_two_engines(run: Run) -> tuple[Engine, Engine]:
    """Start two engines with an episode each. The first runs four turns and queues six; the second runs one."""
    run.begin(jobs(1, 2, samples=1))
    first, second = run.engine("0.0.0"), run.engine("1.0.0")
    first.drawing |= {number: jobs(1)[0] for number in (901, 902, 903)}
    first.held = turns(6)
    return first, second


def test_an_engine_with_room_draws_turns_that_wait_in_another(start: Start) -> None:
    run = start()
    first, second = start_two_engines(run)
    run.turn(), run.turn()
    assert first.calls_of("lend_turns") == [("lend_turns", 3)] and not second.calls_of("lend_turns")
    lent = sorted(number for number in second.drawing if number != 20)
    assert (
        len(lent) == 3
        and max(lent) < 0
        and {tuple(second.drawing[number].prompt_ids) for number in lent} == {(0,), (1,), (2,)}
    )
    run.turn(), run.turn()
    assert len(first.calls_of("lend_turns")) == 1 and len(first.held) == 3  # the second has no room any more
    second.draw(*lent[1:], 20)
    run.turn()
    assert numbers(run.take_finished()) == [20]  # a turn is no answer to the trainer
    assert sorted((number, int(turn.token_ids[0])) for number, turn in first.came_back) == [(TURN, 0), (2 * TURN, 1)]
    run.turn(), run.turn()
    assert [call[1] for call in first.calls_of("lend_turns")] == [3, 3] and not first.held
    assert run.fleet.pop_work()[0].lent == 6


def test_turns_go_on_where_the_engine_is_lost_that_they_were_lent_to(start: Start) -> None:
    run = start(engines=3)
    run.begin(jobs(1, 2, 3, samples=1))
    first, second, third = (run.engine(f"{number}.0.0") for number in range(3))
    first.drawing |= {number: jobs(1)[0] for number in (901, 902, 903)}
    third.drawing |= {number: jobs(1)[0] for number in (901, 902, 903)}
    first.held = turns(2)
    run.turn(), run.turn()
    lent = [number for number in second.drawing if number < 0]
    assert len(lent) == 2
    lose(second)
    run.turn(), run.turn()
    drawn = [(engine, number) for engine in (first, third) for number in engine.drawing if number in lent]
    assert sorted(number for _, number in drawn) == sorted(lent)
    for engine, number in drawn:
        engine.draw(number)
    run.turn()
    assert sorted(number for number, _ in first.came_back) == [TURN, 2 * TURN]


def test_turns_of_an_engine_that_is_lost_are_drawn_for_nobody(start: Start) -> None:
    run = start()
    first, second = start_two_engines(run)
    run.turn(), run.turn()
    lent = {number for number in second.drawing if number < 0}
    lose(first)
    run.turn()
    assert len(lent) == 3 and sorted(second.drawing) == [10, 20]  # its episode is played again
    second.draw(10, 20)
    run.turn()
    assert numbers(run.take_finished()) == [10, 20] and not first.came_back


def test_nothing_is_lent_where_responses_must_not_depend_on_time(start: Start) -> None:
    run = start(in_order=True)
    first, _ = start_two_engines(run)
    run.turn(), run.turn()
    assert not first.calls_of("lend_turns") and len(first.held) == 6


def test_what_is_cancelled_is_not_returned(start: Start) -> None:
    run = start(engines=1)
    run.begin(jobs(1, 2))
    run.engine("0.0.0").draw(10, 20)
    run.cancel(10, 11)
    run.turn()
    assert numbers(run.take_finished()) == [20]
    assert run.engine("0.0.0").calls_of("cancel") == [("cancel", [10, 11])]


def lose(engine: Engine) -> None:
    engine.lost = True


def silence(engine: Engine) -> None:
    engine.answers = False


def keep_from_drawing(engine: Engine) -> None:
    engine.draws = False


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lose, "the process is gone"),
        (silence, "0.0.0 has not answered for 10 s"),
        (keep_from_drawing, "it has drawn no token for 10 s, although it has requests"),
    ],
)
def test_fault_18_and_19_requests_of_an_engine_that_fails_are_drawn_by_another(
    start: Start, fault: Callable[[Engine], None], reason: str
) -> None:
    run = start()
    run.begin(jobs(1, 2))
    first, second = run.engine("0.0.0"), run.engine("1.0.0")
    first.draw(10)
    run.turn()
    fault(first)
    second.draw(20, 21)
    run.turn()
    run.pass_time(TIMEOUT_S + 4)
    assert run.machines.ended == ["0.0"]
    assert sorted(second.drawing) == [11] and second.drawing[11] == jobs(1)[1]
    second.draw(11)
    run.turn()
    assert numbers(run.take_finished()) == [10, 11, 20, 21]
    failed, *others = run.notes
    assert failed == f"engine 0 has failed and is started again, its 1 requests are drawn again: {reason}"
    assert all(note.startswith("engine 0 is ready after ") and note.endswith("the next publish") for note in others)
    tokens = first.reported + second.reported + run.engine("0.1.0").reported  # from both starts of engine 0
    assert run.fleet.pop_work() == (EngineWork(6, tokens, 1.5), 0) and run.fleet.pop_work() == (EngineWork(), 0)
    if fault is not lose:
        first.answers = True
        first.drawing = {11: jobs(1)[1]}
        first.draw(11)  # too late: it has an answer
        run.turn()
        assert run.take_finished() == {}


def test_an_idle_engine_that_draws_nothing_is_well(start: Start) -> None:
    run = start()
    run.pass_time(5 * TIMEOUT_S)
    assert run.machines.ended == []


def test_a_trainer_that_stood_still_blames_no_engine(start: Start) -> None:
    run = start()
    run.begin(jobs(1))
    run.machines.now += 100 * TIMEOUT_S
    run.fleet.tick()
    run.turn()
    assert run.machines.ended == [] and run.notes == []


def test_a_new_engine_draws_nothing_before_it_has_weights(start: Start) -> None:
    run = start(engines=2)
    lose(run.engine("1.0.0"))
    for _ in range(5):
        run.turn()
    run.begin(jobs(1, 2))
    assert sorted(run.engine("0.0.0").drawing) == [10, 11, 20, 21]
    assert [found.state for found in run.fleet.status()] == ["serving", "ready"]
    assert run.publish(3) == ["0.0.0", "1.1.0"]
    assert run.engine("1.1.0").calls_of("start", "join", "sync", "resume")[-2:] == [("sync", 3), ("resume",)]
    run.begin(jobs(3))
    assert sorted(run.engine("1.1.0").drawing) == [30, 31]


def test_where_all_engines_were_lost_their_successors_wait_for_weights(start: Start) -> None:
    run = start(engines=1)
    run.begin(jobs(1))
    assert not run.fleet.needs_weights()
    lose(run.engine("0.0.0"))
    run.turn()
    assert not run.fleet.needs_weights()  # no engine can receive weights yet
    run.turn(), run.turn(), run.turn()
    assert run.fleet.needs_weights() and run.take_finished() == {}
    run.begin(jobs(2))
    run.publish(2)
    assert sorted(run.engine("0.1.0").drawing) == [10, 11, 20, 21] and not run.fleet.needs_weights()
    run.engine("0.1.0").draw(20, 21)
    run.turn()
    assert numbers(run.take_finished()) == [20, 21]


def test_nothing_is_drawn_between_pause_and_resume(start: Start) -> None:
    run = start()
    members = run.fleet.pause()
    assert members == [EngineProcess("0", "0.0.0"), EngineProcess("1", "1.0.0")]
    run.begin(jobs(1))
    run.pass_time(3 * TIMEOUT_S)
    assert not run.engine("0.0.0").drawing and run.machines.ended == []
    run.fleet.resume(1)
    assert sorted(run.engine("0.0.0").drawing) == [10, 11]


def test_all_ranks_of_an_engine_join_and_the_lead_alone_gets_jobs(start: Start) -> None:
    run = start(engines=2, tp=2)
    assert run.publish(1) == ["0.0.0", "0.0.1", "1.0.0", "1.0.1"]
    follower = run.engine("1.0.1")
    assert [spec.rank for _, spec, _ in follower.calls_of("join")] == [3, 3]
    assert follower.calls_of("pause", "submit") == [] and len(follower.calls_of("resume")) == 2
    silence(follower)
    run.pass_time(TIMEOUT_S + 4)
    assert run.machines.ended == ["1.0"]


@pytest.mark.parametrize(
    ("nodes", "order"), [("aabb", ["0.0.0", "0.0.1", "0.0.2", "0.0.3"]), ("abab", ["0.0.0", "0.0.2", "0.0.1", "0.0.3"])]
)
def test_all_ranks_of_an_engine_are_told_of_their_machines_and_devices(nodes: str, order: list[str]) -> None:
    """Ray may place the second half of an engine's ranks beside the first."""
    machines: Any = Machines()
    plan: Any = object()
    fleet = Fleet(machines, FleetPlan(plan, 1, 4, 4, TIMEOUT_S, 0), print, machines.clock)
    spawn, notes = machines.spawn, list[str]()
    places: dict[str, Location] = {}

    def spawn_located(name: str, size: int) -> Sequence[Engine]:
        processes: Sequence[Engine] = spawn(name, size)
        for number, (engine, node) in enumerate(zip(processes, nodes, strict=True)):
            engine.location = Location(f"10.0.0.{node}", 40 * (not number), (str(7 - number),), node)
            places[engine.process] = engine.location
        return processes

    machines.spawn, fleet._note = spawn_located, notes.append
    fleet.tick()
    told = [engine.calls_of("locate") for engine in machines.engines.values()]
    assert told == [[("locate", number == 0)] for number in range(4)]
    locations = tuple(places[name] for name in order)
    for rank, name in enumerate(order):
        assert machines.engines[name].calls_of("start") == [("start", plan, RankRendezvous(locations, rank, "0"), 4)]
    assert fleet._engines[0].address == "10.0.0.a and 1 more machine"


def test_fault_20_a_sync_that_fails_is_told_and_those_that_are_well_stay(start: Start) -> None:
    run = start(engines=3)
    run.fleet.pause()
    run.engine("0.0.0").raises["sync"] = PeersLost("rank 3 is gone")
    run.engine("1.0.0").raises["sync"] = ValueError("a digest differs")
    silence(run.engine("2.0.0"))
    run.fleet.begin_sync(4)
    problems = run.fleet.finish(5.0)
    assert problems == [
        "engine 0: rank 3 is gone",
        "engine 1: a digest differs",
        "engine 2: its sync did not end within 5 s",
    ]
    assert run.fleet.pause() == [EngineProcess("0", "0.0.0")]
    run.turn()
    assert sorted(run.machines.ended) == ["1.0", "2.0"]


def test_an_engine_that_fails_too_often_ends_the_run(start: Start) -> None:
    run = start(engines=1, restarts=2)
    for attempt in range(2):
        lose(run.engine(f"0.{attempt}.0"))
        for _ in range(5):
            run.turn()
    lose(run.engine("0.2.0"))
    with expect_error(
        EnginesLost,
        field="engine 0",
        value=(3, 2, "the process is gone"),
        remedy="same command",
    ):
        run.turn()


def test_a_completion_ends_a_row_of_failures(start: Start) -> None:
    run = start(engines=1, restarts=1)
    for attempt in range(4):
        run.begin([jobs(attempt)[0]])
        run.engine(f"0.{attempt}.0").draw(10 * attempt)
        run.turn()
        assert numbers(run.take_finished()) == [10 * attempt]
        lose(run.engine(f"0.{attempt}.0"))
        for _ in range(5):
            run.turn()
        run.publish()


def test_fault_32_without_ray_the_run_ends_with_one_message(start: Start) -> None:
    run = start()
    run.machines.is_gone = "Ray on this machine has ended"
    lose(run.engine("0.0.0"))
    for wait in (lambda: run.fleet.begin(jobs(1)), run.fleet.needs_weights, run.fleet.pause, run.turn):
        with pytest.raises(EnginesLost, match=r"^Ray on this machine has ended\. .* the same command continues it"):
            wait()


def test_fault_33_engines_come_and_go(start: Start) -> None:
    run = start(engines=1)
    run.begin(jobs(1, 2))
    with expect_error(ConfigError, field="engine '0'", remedy="add another"):
        run.fleet.drain("0")
    assert run.fleet.add(2) == ["1", "2"]
    with pytest.raises(ConfigError, match="no room"):
        run.fleet.add(9)
    for _ in range(4):
        run.turn()
    run.publish()
    run.begin(jobs(3))
    assert sorted(run.engine("1.0.0").drawing) == [30, 31]
    run.fleet.drain("0")
    run.begin(jobs(4, 5, 6))
    assert sorted(run.engine("0.0.0").drawing) == [10, 11, 20, 21]
    run.fleet.remove("1")  # others sample its requests
    assert sorted(run.engine("2.0.0").drawing) == [30, 31, 40, 41, 50, 51, 60, 61]
    with expect_error(ConfigError, field="engine '1'", remedy=(0, 2)):
        run.fleet.remove("1")
    run.engine("0.0.0").draw(10, 11, 20, 21)
    run.turn(), run.turn()
    assert [found.name for found in run.fleet.status()] == ["2"] and sorted(run.machines.ended) == ["0.0", "1.0"]


def test_numbers_of_jobs_may_repeat(start: Start) -> None:
    run = start(engines=1)
    first, second = run.fleet.begin(jobs(1, samples=1)), run.fleet.begin(jobs(1, samples=1))
    drawing = run.engine("0.0.0").drawing
    assert len(drawing) == 2
    run.engine("0.0.0").draw(max(drawing))
    run.turn()
    assert not first[0].done() and second[0].result().prompt.index == 1


def test_an_error_of_a_job_ends_the_run(start: Start) -> None:
    run = start()
    run.begin(jobs(1, 2))
    run.engine("0.0.0").finished.append(JobOutcome(10, ConfigError("environment.function raises")))
    run.turn()
    with pytest.raises(ConfigError, match=r"environment\.function raises"):
        run.fleet.needs_weights()
    with pytest.raises(ConfigError, match=r"environment\.function raises"):
        run.take_finished()


def test_rows_are_sent_to_environments_only(start: Start) -> None:
    prompt = Prompt("p", 3, [1, 2], "text", ground_truth="42", extra_info={"tests": [1] * 1000}, occurrence=1)
    sent = without_rows([Job(sample, prompt, sample, Sampling(), 1) for sample in range(2)])
    assert all(isinstance(work, Job) and work.prompt == Prompt("p", 3, [1, 2], "", occurrence=1) for work in sent)
    assert isinstance(sent[0], Job) and isinstance(sent[1], Job) and sent[0].prompt is sent[1].prompt
    run = start(engines=1)
    run.begin([Job(0, prompt, 0, Sampling(), 1)])
    run.engine("0.0.0").draw(0)
    run.engine("0.0.0").finished[0].result.prompt = None  # type: ignore[union-attr,assignment]
    run.turn()
    assert run.take_finished()[0].prompt is prompt


# ---------------------------------------------------------------------------------------------- versions, and order
def restart(run: Run, *names: str) -> None:
    """These engines are lost, and their successors are there."""
    for name in names:
        lose(run.engine(name))
    for _ in range(5):
        run.turn()


def submitted_numbers(engine: Engine) -> list[list[int]]:
    """Numbers of the jobs that it was given, by submission."""
    return [[work.number for work in asked] for _, asked, _ in engine.calls_of("submit")]


def test_fault_36_what_newer_weights_draw_is_counted_and_told_in_one_line(start: Start) -> None:
    run = start(engines=1)
    run.begin(jobs(1, 2))
    run.engine("0.0.0").draw(10)
    run.turn()
    restart(run, "0.0.0")
    run.publish(1)
    run.begin(jobs(3))
    run.cancel(20)
    run.engine("0.1.0").draw(11, 30)
    run.turn()
    assert run.fleet.pop_work()[1] == 1  # request 30 lost no tokens
    run.engine("0.1.0").draw(21, 31)
    run.turn()
    assert numbers(run.take_finished()) == [10, 11, 21, 30, 31] and not run.futures
    assert run.fleet.pop_work()[1] == 1 and run.fleet.pop_work()[1] == 0
    assert (
        run.notes[0] == "engine 0 has failed and is started again, its 3 requests are drawn again: the process is gone"
    )
    assert run.notes[2:] == ["2 responses were drawn by newer weights than they were begun with: their engine was lost"]


def test_what_another_engine_draws_with_the_same_weights_is_not_counted(start: Start) -> None:
    run = start(engines=2)
    run.begin(jobs(1, 2))
    run.fleet.remove("0")
    run.engine("1.0.0").draw(10, 11, 20, 21)
    run.turn()
    assert numbers(run.take_finished()) == [10, 11, 20, 21]
    assert run.fleet.pop_work()[1] == 0 and run.notes == ["engine 0 has left"]


@pytest.mark.parametrize("fault", [lose, silence, keep_from_drawing])
def test_fault_36_in_order_a_share_is_drawn_again_as_a_whole(start: Start, fault: Callable[[Engine], None]) -> None:
    """The new engine also samples the answered requests, so that each batch is the same. No request is answered twice."""
    run = start(engines=1, in_order=True)
    run.begin(jobs(1, 2))
    first = run.engine("0.0.0")
    first.draw(20, 10)
    run.turn()
    assert numbers(run.take_finished()) == [10, 20]
    fault(first)
    run.pass_time(TIMEOUT_S + 8)
    assert run.fleet.needs_weights() and len(run.futures) == 2
    run.publish(0)
    second = run.engine("0.1.0")
    assert submitted_numbers(second) == submitted_numbers(first) == [[10, 11, 20, 21]]
    assert [afresh for _, _, afresh in second.calls_of("submit")] == [True]
    second.draw(20, 10, 11)
    run.turn()
    restart(run, "0.1.0")  # once more
    run.publish(0)
    third = run.engine("0.2.0")
    assert submitted_numbers(third) == [[10, 11, 20, 21]]
    third.draw(20, 21, 11)
    run.turn()
    assert run.take_finished() == {} and len(run.futures) == 2
    third.draw(10)
    run.turn()
    assert numbers(run.take_finished()) == [11, 21] and not run.futures
    run.begin(jobs(3))
    assert sorted(third.drawing) == [30, 31]
    assert run.fleet.pop_work()[1] == 0


def test_fault_36_in_order_shares_are_those_of_a_run_whose_engines_are_all_well(start: Start) -> None:
    """Shares depend neither on the number of engines nor on their samples. An engine runs its shares one after the other."""
    run = start(engines=2, in_order=True)
    run.begin(jobs(1, 2, 3))
    assert [submitted_numbers(run.engine(name)) for name in ("0.0.0", "1.0.0")] == [[[10, 11, 30, 31]], [[20, 21]]]
    run.fleet.remove("0")
    second = run.engine("1.0.0")
    run.begin(jobs(4))  # as a step does that has dropped prompts
    assert submitted_numbers(second) == [[20, 21]]
    second.draw(21)
    run.turn()
    assert submitted_numbers(second) == [[20, 21]]
    second.draw(20)
    run.turn()
    assert submitted_numbers(second) == [[20, 21], [10, 11, 30, 31]]
    second.draw(30, 31, 10, 11)
    run.turn()
    second.draw(40, 41)
    run.turn()
    assert submitted_numbers(second)[2:] == [[40, 41]] and len(numbers(run.take_finished())) == 8
    run.fleet.add(2)
    for _ in range(4):
        run.turn()
    run.publish(1)
    run.begin(jobs(5, 6, 7))
    assert [sorted(engine.drawing) for engine in run.machines.engines.values()][2:] == [[60, 61], []]
    assert sorted(second.drawing) == [50, 51, 70, 71]


def test_fault_36_in_order_an_engine_that_leaves_finishes_its_share(start: Start) -> None:
    run = start(engines=2, in_order=True)
    run.begin(jobs(1, 2))
    run.fleet.drain("0")
    run.begin(jobs(3))
    run.engine("0.0.0").draw(10, 11)
    run.turn()
    assert run.machines.ended == ["0.0"] and run.take_finished() != {}
    run.engine("1.0.0").draw(20, 21)
    run.turn()
    assert sorted(run.engine("1.0.0").drawing) == [30, 31]


def test_fault_36_in_order_requests_wait_for_their_version(start: Start) -> None:
    run = start(engines=2, in_order=True)
    run.publish(3)
    restart(run, "1.0.0")
    run.begin(jobs(1, 2))
    assert submitted_numbers(run.engine("0.0.0")) == [[10, 11]]
    run.fleet.pause()
    with expect_error(RuntimeError, field="version", value=4):
        run.fleet.resume(4)
    run.publish(3)  # again, also to the one that was lost
    assert submitted_numbers(run.engine("1.1.0")) == [[20, 21]]


def test_fault_36_in_order_an_evaluation_is_drawn_again_too(start: Start) -> None:
    run = start(engines=1, in_order=True)
    run.publish(2)
    run.begin(jobs(1, 2))
    run.engine("0.0.0").draw(11)
    run.turn()
    assert run.futures[11].done()  # an answer counts at once; the repeated share gives the same
    restart(run, "0.0.0")
    assert run.fleet.needs_weights()
    run.publish(2)
    assert submitted_numbers(run.engine("0.1.0")) == [[10, 11, 20, 21]]
    run.engine("0.1.0").draw(21, 20, 10, 11)
    run.turn()
    drawn = run.take_finished()
    assert numbers(drawn) == [10, 11, 20, 21] and [each.policy_version for each in drawn.values()] == [2] * 4


def test_a_share_on_which_engines_fail_again_and_again_ends_the_run(start: Start) -> None:
    """Each start samples the answered requests again, which does not count as progress."""
    run = start(engines=1, restarts=2, in_order=True)
    run.begin(jobs(1))
    run.engine("0.0.0").draw(10)
    run.turn()
    for attempt in range(2):
        restart(run, f"0.{attempt}.0")
        run.publish(0)
        run.engine(f"0.{attempt + 1}.0").draw(10)
        run.turn()
    lose(run.engine("0.2.0"))
    with expect_error(EnginesLost, field="engine 0", value=3, remedy="same command"):
        run.turn()


def test_in_order_what_is_cancelled_is_not_returned(start: Start) -> None:
    run = start(engines=1, in_order=True)
    run.begin(jobs(1))
    run.begin(jobs(2, 3))
    run.cancel(10, 20, 21)
    restart(run, "0.0.0")
    run.publish(0)
    engine = run.engine("0.1.0")
    assert submitted_numbers(engine) == [[11]]
    engine.draw(11)
    run.turn()
    assert submitted_numbers(engine) == [[11], [30, 31]] and numbers(run.take_finished()) == [11]
