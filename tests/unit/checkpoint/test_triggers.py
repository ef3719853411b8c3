from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.triggers import Decision, Triggers
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.data.sampler import PromptSampler

ACCURACY = "evaluate/accuracy"


class Clock:
    """A clock that a test moves forward."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


Make = Callable[..., Triggers]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Make:
    def build(*, deadline: float | None = None, num_steps: int = 100, **keys: object) -> Triggers:
        triggers = Triggers(CheckpointConfig(**keys), num_steps, tmp_path, deadline, clock)  # type: ignore[arg-type]
        triggers.begin()
        return triggers

    return build


def reasons(triggers: Triggers, steps: range) -> dict[int, tuple[str, ...]]:
    """Return the reason of each save, by step."""
    out = {}
    for step in steps:
        decision = triggers.decide(step, {})
        if decision.save:
            triggers.record_save(step, 0.0)
            out[step] = decision.reasons
    return out


def test_only_the_end_is_saved_when_nothing_is_asked(make: Make) -> None:
    assert reasons(make(num_steps=7), range(1, 8)) == {7: ("end",)}


def test_every_n_steps_and_the_end(make: Make) -> None:
    expected = {3: ("steps",), 6: ("steps",), 7: ("end",)}
    assert reasons(make(num_steps=7, save_steps=3), range(1, 8)) == expected
    assert reasons(make(num_steps=6, save_steps=3), range(1, 7)) == {3: ("steps",), 6: ("steps", "end")}


def test_every_n_minutes_since_the_last_save_whatever_its_reason(make: Make, clock: Clock) -> None:
    triggers = make(save_minutes=1.5, save_steps=4)
    saved = {}
    for step in range(1, 9):
        clock.now += 40
        decision = triggers.decide(step, {})
        if decision.save:
            saved[step] = decision.reasons
            clock.now += 100  # the save itself does not count
            triggers.record_save(step, 100)
    assert saved == {3: ("minutes",), 4: ("steps",), 7: ("minutes",), 8: ("steps",)}


def test_every_n_epochs_after_the_step_with_which_one_is_over(make: Make) -> None:
    sampler = PromptSampler(10, 4, seed=0, shuffle=True)

    def list_saves(triggers: Triggers, steps: range) -> dict[int, tuple[str, ...]]:
        triggers.num_epochs = lambda: sampler.num_epochs
        triggers.begin()
        out = {}
        for step in steps:
            sampler.next_batch()
            out |= reasons(triggers, range(step, step + 1))
        return out

    # 4, 8, 12, 16, 20, 24 prompts
    assert list_saves(make(save_epochs=1), range(1, 7)) == {3: ("epochs",), 5: ("epochs",)}
    # a run resumed there, after 2.4 epochs: 28, 32, ..., 52
    assert list_saves(make(save_epochs=2), range(7, 14)) == {10: ("epochs",)}
    # after 5.2: 56, 60, 64, 68 and 72 prompts pass 5.5, 6, (6.4,) 6.5 and 7 epochs
    assert list(list_saves(make(save_epochs=0.5), range(14, 19))) == [14, 15, 17, 18]


def test_steps_that_are_named_are_saved(make: Make) -> None:
    assert reasons(make(num_steps=9, keep=[4, 5, 50]), range(1, 9)) == {4: ("kept",), 5: ("kept",)}


def test_a_better_model_is_saved_and_an_equal_one_is_not(make: Make) -> None:
    triggers = make(metric_for_best_model=ACCURACY)
    best = [triggers.decide(k, {ACCURACY: value}).best for k, value in enumerate([0.5, 0.5, 0.4, float("nan"), 0.6], 1)]
    assert best == [True, False, False, False, True]
    assert (triggers.best_value, triggers.best_step) == (0.6, 5)
    assert triggers.decide(6, {}) == Decision()  # no evaluation at this step


def test_smaller_may_be_better(make: Make) -> None:
    triggers = make(metric_for_best_model="-evaluate/loss")
    assert [triggers.decide(k, {"evaluate/loss": v}).best for k, v in enumerate([2.0, 3.0, 1.0])] == [True, False, True]


def test_a_best_model_that_could_not_be_saved_is_not_the_best(make: Make) -> None:
    triggers = make(metric_for_best_model=ACCURACY)
    triggers.decide(1, {ACCURACY: 0.5})
    triggers.record_save(1, 1.0)
    decision = triggers.decide(2, {ACCURACY: 0.9})
    triggers.not_saved(decision)
    assert (triggers.best_value, triggers.best_step) == (0.5, 1)
    assert triggers.decide(3, {ACCURACY: 0.8}).best


def test_a_metric_that_the_evaluation_lacks_is_refused_with_those_that_it_has(make: Make) -> None:
    triggers = make(metric_for_best_model="evaluate/acuracy")
    with pytest.raises(ConfigError, match=r"metric_for_best_model='evaluate/acuracy' .* one of: evaluate/accuracy"):
        triggers.decide(1, {ACCURACY: 0.5})


def test_a_file_asks_once(make: Make, tmp_path: Path) -> None:
    triggers = make()
    (tmp_path / "SAVE").touch()
    assert triggers.decide(1, {}).reasons == ("request",)
    assert (tmp_path / "SAVE").exists()  # until the save succeeds, because it may fail
    triggers.record_save(1, 0.0)
    assert not (tmp_path / "SAVE").exists()
    assert not triggers.decide(2, {}).save


def test_a_file_that_was_touched_while_saving_asks_again(make: Make, tmp_path: Path) -> None:
    triggers = make()
    (tmp_path / "SAVE").touch()
    triggers.decide(1, {})
    os.utime(tmp_path / "SAVE", ns=(1, 1))
    triggers.record_save(1, 0.0)
    assert triggers.decide(2, {}).reasons == ("request",)


def test_signals_ask_for_a_save_or_an_end(make: Make) -> None:
    triggers = make(num_steps=5)
    assert triggers.decide(1, {}, save_requested=True) == Decision(("signal",))
    assert triggers.decide(2, {}, stop_requested=True) == Decision(("stop",), stop=True)
    # a finished run is not restarted
    assert triggers.decide(5, {}, stop_requested=True) == Decision(("stop", "end"), stop=False)


def test_a_saved_step_is_not_saved_twice(make: Make) -> None:
    triggers = make(save_steps=1)
    assert triggers.decide(1, {}).save
    triggers.record_save(1, 0.0)
    assert triggers.decide(1, {}, stop_requested=True) == Decision(stop=True)


def test_fault_17_the_run_saves_while_a_step_and_a_save_still_fit(make: Make, clock: Clock) -> None:
    start, limit = clock.now, 1000.0
    triggers = make(deadline=start + limit, save_steps=2)
    for step in range(1, 100):
        clock.now += 100
        decision = triggers.decide(step, {})
        if decision.save:
            clock.now += 60
            triggers.record_save(step, 60)
        if decision.stop:
            break
    # Saves end at 260, 520 and 780 s, and step 7 at 880 s. One more step and a save, times 1.25, would end at 1080 s.
    assert (step, decision) == (7, Decision(("deadline",), stop=True))
    assert clock.now - start == 940


def test_fault_17_a_long_step_is_remembered_for_a_hundred_steps(make: Make, clock: Clock) -> None:
    triggers = make(num_steps=1000)
    taken = []
    for step, seconds in enumerate([10, 50, *[10] * 99, 10], 1):
        clock.now += seconds
        triggers.decide(step, {})
        taken.append(triggers.step_s.seconds)
    assert taken[:3] == [10, 50, 50] and taken[-2:] == [50, 10]


def test_a_machine_that_stood_still_for_a_day_teaches_the_budget_nothing(make: Make, clock: Clock) -> None:
    triggers = make(deadline=clock.now + 100_000)
    for step, seconds in enumerate([10, 10, 86_400, 10], 1):
        clock.now += seconds
        assert not triggers.decide(step, {}).stop
    assert triggers.step_s.seconds == 10
    clock.now += 90  # slow twice in a row counts as the time of a step
    triggers.decide(5, {})
    clock.now += 95
    triggers.decide(6, {})
    assert triggers.step_s.seconds == 95


def test_a_time_that_an_earlier_version_learned_from_a_jump_is_forgotten(make: Make, clock: Clock) -> None:
    triggers = make(deadline=clock.now + 3600)
    triggers.load_state_dict({"best_value": None, "best_step": None, "step_s": 30135.0, "save_s": 2.0})
    clock.now += 10
    assert not triggers.decide(1, {}).stop
    assert (triggers.step_s.seconds, triggers.save_s.seconds) == (10, 2)


def test_the_clock_of_the_wall_may_be_set_to_any_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock one day ahead does not make a step long. A clock one day back does not delay saves that are due by minutes."""
    wall = Clock(time.time())
    monkeypatch.setattr(time, "time", wall)
    triggers = Triggers(CheckpointConfig(save_minutes=1e-9), 100, tmp_path, time.monotonic() + 3600)
    triggers.begin()
    wall.now += 86_400
    assert triggers.decide(1, {}).reasons == ("minutes",)
    wall.now -= 2 * 86_400
    assert triggers.decide(2, {}) == Decision(("minutes",))
    assert triggers.step_s.seconds is not None and triggers.step_s.seconds < 3600


def test_fault_17_a_save_is_measured_while_there_is_time(make: Make, clock: Clock) -> None:
    triggers = make(deadline=clock.now + 1000)
    saved = {}
    for step in range(1, 100):
        clock.now += 90
        decision = triggers.decide(step, {})
        if decision.save:
            saved[step] = decision.reasons
            clock.now += 200
            triggers.record_save(step, 200)
        if decision.stop:
            break
    assert saved == {6: ("measure",), 7: ("deadline",)}
    # without a measurement the first save would start after 810 s and end after 1010 s
    assert clock.now <= 2000 + 50


def test_fault_17_a_save_that_is_due_now_counts_too(make: Make, clock: Clock) -> None:
    triggers = make(deadline=clock.now + 1000, save_steps=1)
    for step in range(1, 100):
        clock.now += 10
        decision = triggers.decide(step, {})
        clock.now += 300
        triggers.record_save(step, 300)
        if decision.stop:
            break
    # At 630 s, a save, a step and a save, times 1.25, would end at 1392 s. So the second save is the last, not the third.
    assert (step, clock.now) == (2, 1000 + 620)


def test_fault_17_a_limit_shorter_than_one_step_still_saves_it(make: Make, clock: Clock) -> None:
    triggers = make(deadline=clock.now + 10)
    clock.now += 30
    decision = triggers.decide(1, {})
    assert decision.stop and "deadline" in decision.reasons


def test_the_state_is_plain_json_and_goes_on_where_it_was(make: Make, clock: Clock) -> None:
    first = make(metric_for_best_model=ACCURACY)
    clock.now += 20
    first.decide(4, {ACCURACY: 0.7})
    state = json.loads(json.dumps(first.state_dict()))  # as stored in this checkpoint
    first.record_save(4, 8.0)
    second = make(metric_for_best_model=ACCURACY)
    second.load_state_dict(state)
    assert (second.best_value, second.best_step, second.step_s.seconds) == (0.7, 4, 20)
    assert not second.decide(5, {ACCURACY: 0.6}).best
    with pytest.raises(AssertionError, match="unknown or missing"):
        second.load_state_dict({**state, "other": 1})


def test_a_decision_survives_its_travels() -> None:
    decision = Decision(("steps", "best"), best=True, stop=True)
    assert Decision.from_json(json.loads(json.dumps(decision.to_json()))) == decision
