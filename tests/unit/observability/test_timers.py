from __future__ import annotations

import pytest

from rlhf_mcore.observability.throughput import Timers


def test_seconds_add_up_by_name_until_popped() -> None:
    instants = iter([0.0, 2.0, 10.0, 10.5, 20.0, 21.0])
    timers = Timers(clock=lambda: next(instants))
    for name in ("generate", "score", "generate"):
        with timers(name):
            pass
    assert timers.pop() == {"timing/generate_s": 3.0, "timing/score_s": 0.5}
    assert timers.pop() == {}


def test_spans_nest_and_survive_an_exception() -> None:
    instants = iter([0.0, 1.0, 3.0, 7.0])
    timers = Timers(clock=lambda: next(instants))
    with pytest.raises(KeyError), timers("step"), timers("update"):
        raise KeyError
    assert timers.pop() == {"timing/update_s": 2.0, "timing/step_s": 7.0}


def test_the_device_is_waited_for_at_both_ends() -> None:
    events: list[str] = []
    timers = Timers(synchronize=lambda: events.append("wait"), clock=lambda: events.append("look") or 0.0)
    with timers("update"):
        events.append("work")
    assert events == ["wait", "look", "work", "wait", "look"]
