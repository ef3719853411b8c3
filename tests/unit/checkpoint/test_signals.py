from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from rlhf_mcore.checkpoint.manifest import verify
from rlhf_mcore.checkpoint.triggers import SignalRequests
from tests.unit.checkpoint.saving import RecordingDisk, save

HANDLED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)  # beside SIGINT, which may end a process


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_does_nothing_else(number: int) -> None:
    with SignalRequests().listening() as requests:
        assert not requests.stop_requested
        os.kill(os.getpid(), number)
        assert requests.stop_requested
        assert not requests.take_save()


def test_what_a_signal_asks_for_is_acknowledged_but_not_the_way_torchrun_ends_ranks() -> None:
    told: list[str] = []
    begun: list[str] = []
    with SignalRequests(told.append, lambda: begun.append("yes")).listening() as requests:
        os.kill(os.getpid(), signal.SIGTERM)
        assert told == []
    with SignalRequests(told.append, lambda: begun.append("yes")).listening() as requests:
        requests.begin()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGINT)
        assert requests.stop_requested
        os.kill(os.getpid(), signal.SIGUSR1)
    assert begun == ["yes"]
    assert [text.split(":")[0] for text in told] == ["save requested", "Ctrl-C"]


def test_a_signal_asks_for_one_save() -> None:
    with SignalRequests().listening() as requests:
        assert not requests.take_save()
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert [requests.take_save(), requests.take_save()] == [True, False]
        assert not requests.stop_requested


def test_earlier_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in HANDLED}
    with pytest.raises(ZeroDivisionError), SignalRequests().listening():
        raise ZeroDivisionError
    assert {number: signal.getsignal(number) for number in HANDLED} == before


def test_fault_16_signals_at_every_boundary_of_a_save_change_nothing(tmp_path: Path) -> None:
    class Interrupted(RecordingDisk):
        def perform(self, name, action, path):  # type: ignore[no-untyped-def]
            for number in HANDLED:
                os.kill(os.getpid(), number)
            return super().perform(name, action, path)

    quiet, noisy = RecordingDisk(), Interrupted()
    with SignalRequests().listening() as requests:
        os.kill(os.getpid(), signal.SIGUSR1)
        save(tmp_path / "noisy", 10, disk=noisy)
        assert requests.stop_requested
    save(tmp_path / "quiet", 10, disk=quiet)
    assert [name for name, _ in noisy.log] == [name for name, _ in quiet.log]
    assert verify(tmp_path / "noisy" / "checkpoint-10") == []
