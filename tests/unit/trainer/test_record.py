from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rlhf_mcore.observability.alarms import RewardAlarm
from rlhf_mcore.observability.run_directory import RunDirectory
from rlhf_mcore.observability.throughput import Timers
from rlhf_mcore.trainer.batches import Rollout
from rlhf_mcore.trainer.record import MAX_WARNINGS, RunRecord
from rlhf_mcore.types import Score
from tests.unit.parallel.world import ThreadGroup, run_ranks
from tests.unit.trainer.records import prompt, trajectory


class Log:
    """A tracker and a console in one."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.lines.append(("log", step, dict(metrics)))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.lines.append(("show", step, dict(metrics)))

    def phase(self, name: str) -> None:
        self.lines.append(("phase", name))

    def note(self, text: str) -> None:
        self.lines.append(("note", text))

    def warning(self, rank: int, text: str) -> None:
        self.lines.append(("warning", rank, text))

    def close(self) -> None: ...


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with closing(RunDirectory.create(str(tmp_path), "project", "experiment")) as made:
        yield made


def clock() -> Timers:
    """Every look at the clock takes a second."""
    seconds = iter(range(1000))
    return Timers(clock=lambda: float(next(seconds)))


@pytest.mark.usefixtures("world")
def test_a_step_is_written_and_shown_with_the_time_of_its_phases() -> None:
    log = Log()
    record = RunRecord(clock(), 1, tracker=log, console=log, wall_clock=lambda: 1.7e9)  # type: ignore[arg-type]
    for name in ("generate", "update", "generate"):
        with record.phase(name):
            pass
    record.step(4, {"reward/mean": 0.5})
    everything = {"reward/mean": 0.5, "timing/generate_s": 2.0, "timing/update_s": 1.0, "timing/step_s": 3.0}
    everything["timing/unix_time"] = 1.7e9
    phases = [("phase", "generate"), ("phase", "update"), ("phase", "generate")]
    assert log.lines == [*phases, ("log", 4, everything), ("show", 4, everything)]
    record.step(5, {})
    assert log.lines[-1] == ("show", 5, {"timing/step_s": 0, "timing/unix_time": 1.7e9})


@pytest.mark.usefixtures("world")
def test_evaluations_and_rewards_are_kept_for_the_summary() -> None:
    record = RunRecord(clock(), 1)
    record.step(0, {"evaluate/accuracy": 0.25})
    record.step(1, {"reward/mean": 0.5, "loss/total": 1.0})
    record.step(2, {"reward/mean": 0.75, "evaluate/accuracy": 0.5})
    assert record.evaluations == {0: {"evaluate/accuracy": 0.25}, 2: {"evaluate/accuracy": 0.5}}
    assert record.rewards == [0.5, 0.75] and record.losses == []


@pytest.mark.usefixtures("world")
def test_losses_are_kept_for_the_summary_of_a_run_without_rewards() -> None:
    record = RunRecord(clock(), 1)
    record.step(1, {"loss/dpo": 0.693})
    record.step(2, {"loss/dpo": 0.5, "evaluate/accuracy": 0.9})
    assert record.losses == [0.693, 0.5] and record.rewards == []


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("shares", "all_zero"), [([1, 1], True), ([1, 0.5, 1], False), ([0.5, 1], False), ([], False)])
def test_a_run_knows_whether_all_its_rewards_were_zero(shares: list[float], all_zero: bool) -> None:
    """A mean of 0 is not enough: +1 and -1 teach something."""
    record = RunRecord(clock(), 1)
    record.step(0, {"evaluate/accuracy": 0.25})
    for step, share in enumerate(shares, 1):
        record.step(step, {"reward/mean": 0.0, "reward/share_zero": float(share)})
    assert record.all_zero is all_zero


@pytest.mark.usefixtures("world")
def test_tokens_per_second_are_those_of_the_step_without_evaluation_and_save() -> None:
    log = Log()
    record = RunRecord(clock(), 1, tracker=log)  # type: ignore[arg-type]
    record.recall([{"step": 3, "progress/tokens": 100.0}])  # the run was resumed
    for step, total in ((4, 400.0), (5, 1000.0)):
        for name in ("save", "generate", "evaluate", "update"):
            with record.phase(name):
                pass
        record.step(step, {"progress/tokens": total})
    assert [line[2]["timing/tokens_per_s"] for line in log.lines] == [300 / 2, 600 / 2]


@pytest.mark.usefixtures("world")
def test_the_last_hundred_steps_are_told_with_loss_and_reward_and_when_they_ended() -> None:
    wall = iter(float(k) for k in range(1000, 2000))
    record = RunRecord(clock(), 1, wall_clock=lambda: next(wall))
    record.recall([{"step": 1, "timing/unix_time": 7.0, "loss/total": 0.5, "reward/mean": 0.25}])
    record.step(0, {"evaluate/accuracy": 0.1})
    for step in range(2, 102):
        record.step(step, {"loss/sft": float("nan") if step == 101 else step / 2})
    assert len(record.recent) == 100
    assert record.recent[0] == {"step": 2, "time": 1001.0, "loss": 1.0, "reward": None}
    assert record.recent[-1] == {"step": 101, "time": 1100.0, "loss": None, "reward": None}
    assert json.dumps(list(record.recent), allow_nan=False)


@pytest.mark.usefixtures("world")
def test_the_best_models_evaluation_has_names_of_its_own_and_is_the_summarys() -> None:
    log = Log()
    record = RunRecord(clock(), 1, tracker=log)  # type: ignore[arg-type]
    record.step(9, {"evaluate/accuracy": 0.25, "reward/mean": 0.5})
    record.final(9, 6, {"evaluate/accuracy": 0.75, "evaluate/accuracy/evaluate/x": 0.5})
    assert log.lines[-1] == ("log", 9, {"final/step": 6, "final/accuracy": 0.75, "final/accuracy/evaluate/x": 0.5})
    assert record.evaluations[9]["evaluate/accuracy"] == 0.75 and record.rewards == [0.5]


@pytest.mark.usefixtures("rank_threads")
@pytest.mark.parametrize("first_listens", [True, False])
def test_who_listens_on_the_first_rank_alone_gets_the_rollouts_of_all(
    directory: RunDirectory, first_listens: bool
) -> None:
    told: list[tuple[int, int, list[tuple[str, int]]]] = []

    def rank(group: ThreadGroup) -> None:
        number = group.rank()

        def listener(step: int, records: Sequence[Mapping[str, Any]]) -> None:
            told.append((number, step, [(record["prompt_id"], record["sample"]) for record in records]))

        record = RunRecord(clock(), 0, directory=None if number else directory)
        record.listen(listener if (number == 0) == first_listens else None)
        record.rollouts(3, [Rollout(0, trajectory(prompt(1 - number), number), Score(1.0))])

    run_ranks(2, rank)
    assert told == ([(0, 3, [("p0", 1), ("p1", 0)])] if first_listens else [])
    assert list(directory.path.glob("rollouts/*")) == []


@pytest.mark.usefixtures("rank_threads")
def test_what_other_ranks_warn_of_is_shown_after_every_kind_of_step() -> None:
    log = Log()

    def rank(group: ThreadGroup) -> None:
        record = RunRecord(clock(), 0, console=None if group.rank() else log)  # type: ignore[arg-type]
        record.heard.extend(f"slow disk {number}" for number in range(group.rank() * 6))
        record.step(1, {})
        record.step(2, {})

    run_ranks(2, rank)
    warned = [line for line in log.lines if line[0] == "warning"]
    assert warned == [("warning", 1, f"slow disk {number}") for number in range(MAX_WARNINGS)]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_rollouts_are_written_when_due(directory: RunDirectory, every: int, due: list[int]) -> None:
    record = RunRecord(clock(), every, directory=directory)
    for step in range(1, 5):
        record.rollouts(step, [Rollout(0, trajectory(prompt(0), 0), Score(1.0))])
    assert sorted(p.name for p in directory.path.glob("rollouts/*")) == [f"step-{step:06d}.jsonl" for step in due]


@pytest.mark.usefixtures("world")
def test_rollouts_come_in_order_with_their_scores(directory: RunDirectory) -> None:
    record = RunRecord(clock(), 1, directory=directory)
    made = [trajectory(prompt(1), 1), trajectory(prompt(0), 0, finish="length"), trajectory(prompt(1), 0)]
    scores = [Score(0.1), Score(0.2, {"answer": 1.0}), Score(0.3)]
    record.rollouts(3, [Rollout(0, *each) for each in zip(made, scores, strict=True)])
    lines = [json.loads(line) for line in directory.rollouts_path(3).read_text().splitlines()]
    assert [(x["prompt_id"], x["sample"], x["score"]) for x in lines] == [
        ("p0", 0, 0.2),
        ("p1", 0, 0.3),
        ("p1", 1, 0.1),
    ]
    assert lines[0]["parts"] == {"answer": 1.0} and lines[0]["finish_reason"] == "length" and lines[0]["step"] == 3


@pytest.mark.usefixtures("world")
def test_a_rank_without_a_directory_writes_nothing(tmp_path: Path) -> None:
    RunRecord(clock(), 1).rollouts(1, [Rollout(0, trajectory(prompt(0), 0), Score(1.0))])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("world")
def test_responses_without_a_score_are_one_line_of_a_step() -> None:
    log = Log()
    record = RunRecord(clock(), 0, console=log)  # type: ignore[arg-type]
    record.rollouts(1, [Rollout(0, trajectory(prompt(0), 0), score) for score in (Score(1.0), Score(0.0))])
    assert log.lines == []
    bad = Score(0.0, failure="error", cause="reward.function=r.py:f on prompt 'p0', sample 1, raised ValueError: x")
    scores = [Score(1.0), bad, Score(0.0, failure="timeout", cause="later")]
    record.rollouts(2, [Rollout(0, trajectory(prompt(0), 0), score) for score in scores])
    assert log.lines == [
        (
            "note",
            "step 2: 2 of 3 responses got no score and count as 0; the first: reward.function=r.py:f on prompt 'p0', sample 1, "
            "raised ValueError: x",
        )
    ]


@pytest.mark.usefixtures("world")
def test_a_jump_of_the_reward_is_told_also_after_a_resume() -> None:
    log = Log()
    record = RunRecord(clock(), 0, console=log, alarm=RewardAlarm(5.0, 4))  # type: ignore[arg-type]
    record.recall([{"step": step, "reward/mean": 0.5} for step in range(1, 5)])
    record.step(5, {"reward/mean": 0.9})
    (note,) = [line[1] for line in log.lines if line[0] == "note"]
    assert note.startswith("step 5: the mean score is 0.9, a jump from the mean 0.5 of the previous 4 steps")
