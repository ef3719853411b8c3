"""Saving in the foreground and in the background, with parts that are small files."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.checkpoint.collective import CheckpointWriter
from rlhf_mcore.checkpoint.disk import Disk, SaveError
from rlhf_mcore.checkpoint.layout import LATEST, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import FULL, CheckpointInfo, read_manifest, verify
from rlhf_mcore.checkpoint.triggers import SignalRequests, Triggers
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.trainer.checkpointer import RunCheckpointer
from rlhf_mcore.trainer.divergence import DivergedError
from tests.messages import expect_error

pytestmark = pytest.mark.usefixtures("world")


@dataclass
class Model:
    """A part whose weights are a number. ``gate`` holds back what writes a copy; ``errors`` are raised while writing, one a time."""

    name: str = "actor"
    weights: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    errors: list[Exception] = field(default_factory=list)
    finite: bool = True
    reads: int = 0  # reads of the live weights

    def __post_init__(self) -> None:
        self.gate.set()

    def num_bytes(self) -> int:
        return len(str(self.weights))

    def is_finite(self) -> bool:
        return self.finite

    def write(self, checkpoint: Path) -> list[Path]:
        self.reads += 1
        return self._write(checkpoint, self.weights)

    def snapshot(self) -> Callable[[Path], list[Path]]:
        self.reads += 1
        copy = self.weights

        def write(checkpoint: Path) -> list[Path]:
            assert self.gate.wait(120)
            return self._write(checkpoint, copy)

        return write

    def _write(self, checkpoint: Path, value: int) -> list[Path]:
        if self.errors:
            raise self.errors.pop(0)
        path = checkpoint / self.name / "weights"
        path.parent.mkdir(exist_ok=True)
        path.write_text(str(value))
        return [path]


@dataclass
class Run:
    """A checkpointer with two models on a run directory."""

    directory: Path
    actor: Model = field(default_factory=Model)
    critic: Model = field(default_factory=lambda: Model("critic"))
    notes: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    tidied: list[int] = field(default_factory=list)
    clock: float = 0.0
    reads_in_room: list[int] = field(default_factory=list)

    def make(self, *, stop_on_failure: bool = True, **settings: Any) -> RunCheckpointer:
        config = CheckpointConfig(**settings)
        made = RunCheckpointer(
            writer=CheckpointWriter(self.directory, Disk(waits_s=())),
            parts=[self.actor, self.critic],
            small_files=lambda step: {
                "trainer_state.json": json.dumps({"step": step, "seen": self.actor.weights}).encode()
            },
            triggers=Triggers(config, 100, self.directory, clock=lambda: self.clock),
            requests=SignalRequests(),
            after_commit=self.tidy,
            note=self.notes.append,
            phase=self.phase,
            in_background=config.async_save,
            room=self.room,
            stop_on_failure=stop_on_failure,
        )
        made.begin()
        return made

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.phases.append(f"{name} begins")
        yield
        self.phases.append(f"{name} ends with {self.steps}")

    @contextmanager
    def room(self) -> Iterator[None]:
        before = self.actor.reads
        yield
        self.reads_in_room.append(self.actor.reads - before)

    def tidy(self, step: int) -> None:
        self.tidied.append(step)

    def read_checkpoint(self, step: int) -> tuple[str, str, int]:
        """Read an intact checkpoint: the actor's weights, the critic's, and the state in the small files."""
        path = self.directory / f"checkpoint-{step}"
        assert verify(path) == []
        state = json.loads((path / "trainer_state.json").read_text())
        assert state["step"] == step
        return (path / "actor/weights").read_text(), (path / "critic/weights").read_text(), state["seen"]

    @property
    def steps(self) -> list[int]:
        return [checkpoint.step for checkpoint in scan(self.directory)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_saves_when_due_and_after_the_last_step(run: Run) -> None:
    made = run.make(save_steps=3)
    for step in range(1, 8):
        run.actor.weights = step
        assert made.after_step(step, {"loss": 1.0}) is False
    assert run.steps == [3, 6] and run.read_checkpoint(6) == ("6", "0", 6)
    made.after_step(100, {})
    assert run.steps[-1] == 100 and (run.directory / LATEST).readlink() == Path("checkpoint-100")
    assert run.tidied == [3, 6, 100]
    assert run.phases[:4] == ["save begins", "save ends with [3]", "save begins", "save ends with [3, 6]"]


@pytest.mark.parametrize("in_background", [False, True])
def test_models_are_read_while_the_others_have_left_the_device(
    run: Run, tmp_path_factory: pytest.TempPathFactory, in_background: bool
) -> None:
    made = run.make(save_steps=2, async_save=in_background)
    for step in (1, 2):
        made.after_step(step, {})
    assert run.reads_in_room == [1]
    made.save_to(tmp_path_factory.mktemp("own"), 2)
    assert run.reads_in_room == [1, 1] and run.actor.reads == 2


def test_the_evaluation_of_the_step_goes_into_the_manifest(run: Run) -> None:
    run.make(save_steps=1).after_step(1, {"evaluate/accuracy": 0.5})
    assert read_manifest(run.directory / "checkpoint-1").info.metrics == {"evaluate/accuracy": 0.5}


@pytest.mark.parametrize("in_background", [False, True])
def test_fault_23_weights_that_are_not_finite_are_never_saved(run: Run, in_background: bool) -> None:
    made = run.make(save_steps=1, async_save=in_background, stop_on_failure=False)
    made.after_step(1, {})
    run.critic.finite = False
    with expect_error(DivergedError, field=("critic", "checkpoint-2"), value="not finite"):
        made.after_step(2, {})
    with pytest.raises(DivergedError, match=r"critic"):
        made.save_to(run.directory, 3)
    assert run.steps == [1] and run.read_checkpoint(1) == ("0", "0", 0), "the last good one is there"


@pytest.mark.parametrize("in_background", [False, True])
def test_one_part_that_fails_does_not_keep_the_others_waiting(run: Run, in_background: bool) -> None:
    made = run.make(save_steps=1, async_save=in_background)
    run.actor.errors = [OSError(28, "No space left on device")]
    with expect_error(SaveError, field="checkpoint-1", value="No space left on device"):
        made.after_step(1, {})
        made.drain()
    assert run.steps == [] and scan_transitional(run.directory) == []


def test_a_failed_save_can_be_passed_over_and_the_next_one_is_made(run: Run) -> None:
    made = run.make(save_steps=1, stop_on_failure=False)
    run.critic.errors = [OSError(28, "No space left on device")]
    made.after_step(1, {})
    made.after_step(2, {})
    assert run.steps == [2] and "checkpoint-1 was not saved" in run.notes[0]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("ending", ["last step", "signal"])
def test_fault_09_the_save_that_a_run_ends_with_is_never_passed_over(
    run: Run, ending: str, in_background: bool
) -> None:
    made = run.make(stop_on_failure=False, async_save=in_background)
    made.requests.stop_requested = ending == "signal"
    run.actor.errors = [OSError(28, "No space left on device")]
    with pytest.raises(SaveError, match="was not saved"):
        made.after_step(100 if ending == "last step" else 7, {})
        made.end()


@pytest.mark.parametrize("in_background", [False, True])
def test_storage_that_fails_for_a_moment_is_tried_again(run: Run, in_background: bool) -> None:
    made = run.make(save_steps=1, async_save=in_background)
    run.actor.weights, run.actor.errors = 4, [OSError(5, "Input/output error")]
    made.after_step(1, {})
    run.actor.weights = 5  # the optimizer goes on
    made.drain()
    assert run.read_checkpoint(1) == ("4", "0", 4)


def test_the_last_checkpoint_and_the_best_one_are_full_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = run.make(save_steps=1, metric_for_best_model="evaluate/reward"), []

    def next_info(step: int, metrics: Mapping[str, float]) -> CheckpointInfo:
        asked.append(step)  # the writer may answer: a delta
        return CheckpointInfo(step, metrics=metrics)

    monkeypatch.setattr(made.writer, "next_info", next_info)
    made.after_step(98, {"evaluate/reward": 0.5})  # the best so far
    made.after_step(99, {})
    made.after_step(100, {})
    assert asked == [99] and read_manifest(run.directory / "checkpoint-100").info.kind == FULL


def test_a_checkpoint_is_saved_anywhere_on_demand(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    made, elsewhere = run.make(async_save=True, save_steps=2), tmp_path_factory.mktemp("elsewhere")
    run.actor.weights = 3
    made.after_step(2, {})
    assert made.save_to(elsewhere, 3) == elsewhere / "checkpoint-3"
    assert verify(elsewhere / "checkpoint-3") == [] and run.steps == [2]
    assert (elsewhere / "checkpoint-3/actor/weights").read_text() == "3"


# --------------------------------------------------------------------------------------------------------- in the background
def test_fault_04_the_link_moves_only_when_everything_is_written(run: Run) -> None:
    made = run.make(save_steps=1, async_save=True)
    run.actor.gate.clear()
    made.after_step(1, {})
    assert run.steps == [] and not (run.directory / LATEST).exists()
    assert [left.state for left in scan_transitional(run.directory)] == ["partial"]
    run.actor.gate.set()
    made.drain()
    assert run.steps == [1] and (run.directory / LATEST).readlink() == Path("checkpoint-1")


def test_fault_06_what_is_written_is_the_snapshot(run: Run) -> None:
    made = run.make(save_steps=2, async_save=True)
    run.actor.gate.clear()
    run.actor.weights = 2
    made.after_step(2, {})
    run.actor.weights = 3  # updated while the save is running
    run.actor.gate.set()
    made.drain()
    assert run.read_checkpoint(2) == ("2", "0", 2)


def test_the_commit_is_made_after_a_later_step_without_waiting(run: Run) -> None:
    made = run.make(save_steps=4, async_save=True)
    run.actor.gate.clear()
    for step in (4, 5, 6):
        made.after_step(step, {})
    assert run.steps == []
    run.actor.gate.set()
    for _ in range(1000):
        made.after_step(7, {})
        if run.steps:
            break
        time.sleep(0.01)
    assert run.steps == [4]


def test_the_next_save_waits_for_the_one_under_way(run: Run) -> None:
    made = run.make(save_steps=1, async_save=True)
    run.actor.gate.clear()
    run.actor.weights = 1
    made.after_step(1, {})
    threading.Timer(0.05, run.actor.gate.set).start()
    run.actor.weights = 2
    made.after_step(2, {})
    made.drain()
    assert run.read_checkpoint(1)[0] == "1" and run.read_checkpoint(2)[0] == "2"


def test_what_the_clock_asks_for_is_not_asked_for_twice(run: Run) -> None:
    made = run.make(save_minutes=1.0, async_save=True)
    run.actor.gate.clear()
    run.clock = 61.0
    made.after_step(1, {})
    made.after_step(2, {})  # would wait for the first one if it saved
    run.actor.gate.set()
    made.drain()
    assert run.steps == [1]


def test_an_error_in_the_thread_is_raised_after_the_next_step(run: Run) -> None:
    made = run.make(save_steps=2, async_save=True)
    run.critic.errors = [ValueError("out of range")]
    made.after_step(2, {})
    with expect_error(SaveError, field=("checkpoint-2", "rank 0"), value="ValueError: out of range"):
        for _ in range(1000):
            made.after_step(3, {})
            time.sleep(0.01)
    made.drain()  # the error is raised once


def test_fault_08_a_step_that_is_tried_again_saves_again(run: Run) -> None:
    """An exception in a step, caught by the caller, leaves a save under way; nothing of it ends up in the next one."""
    made = run.make(save_steps=1, async_save=True)
    run.actor.weights = 1
    made.after_step(1, {})
    run.actor.weights = 10
    made.after_step(1, {})  # the caller went back a step
    made.drain()
    assert run.read_checkpoint(1) == ("10", "0", 10)
    assert scan_transitional(run.directory) == []


def test_a_run_that_has_to_stop_commits_first(run: Run) -> None:
    made = run.make(async_save=True)
    made.requests.stop_requested = True
    assert made.after_step(5, {}) is True
    assert run.steps == [5]


def test_the_end_of_a_run_comes_after_its_last_commit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    made = run.make(save_steps=1, async_save=True)
    seen: list[list[int]] = []
    made.at_end = lambda: seen.append([item.step for item in scan(tmp_path)])
    made.after_step(1, {})
    made.end()
    assert seen == [[1]]
