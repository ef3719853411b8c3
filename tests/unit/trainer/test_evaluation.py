from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rlhf_mcore.trainer.evaluation import Evaluator, is_correct, summarize
from rlhf_mcore.trainer.rollouts import generate
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory
from tests.unit.trainer.records import prompt, trajectory


class Engine:
    """Answers prompt i with i + 1 tokens; the last prompt runs into the limit."""

    def __init__(self, num_engines: int = 1, engine_index: int = 0, is_lead: bool = True) -> None:
        self.num_engines, self.engine_index, self.is_lead = num_engines, engine_index, is_lead
        self.policy_version = 0
        self.asked: list[tuple[list[int], int]] = []

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> list[Trajectory]:
        self.asked.append(([p.index for p in prompts], step))
        if not self.is_lead:
            return []
        finish = {3: "length"}
        return [trajectory(p, k, p.index + 1, finish.get(p.index, "stop")) for p in prompts for k in range(sampling.n)]


class Reward:
    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(float(t.prompt.index % 2), {"answer": float(t.prompt.index % 2)}) for t in trajectories]


def evaluator(every: int, count: int = 4) -> Evaluator:
    prompts = [replace(prompt(i), data_source="even" if i % 2 == 0 else "odd") for i in range(count)]
    return Evaluator(prompts, Engine(), Reward(), Sampling(temperature=0.0), every)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("every", "due"), [(0, [0, 7]), (1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6, 7]), (7, [0, 7]), (9, [0, 7])]
)
def test_when_it_is_due(every: int, due: list[int]) -> None:
    assert [step for step in range(8) if evaluator(every).is_due(step, 7)] == due


def test_it_is_never_due_without_prompts() -> None:
    assert not any(evaluator(1, count=0).is_due(step, 7) for step in range(8))


@pytest.mark.usefixtures("world")
def test_means_over_all_prompts_and_per_source() -> None:
    which = evaluator(1)
    assert which.run(5) == {
        "evaluate/reward": 0.5,
        "evaluate/accuracy": 0.5,
        "evaluate/response_length_mean": 2.5,
        "evaluate/truncated_fraction": 0.25,
        "evaluate/accuracy/even": 0.0,
        "evaluate/accuracy/odd": 1.0,
    }
    assert which.engine.asked == [([0, 1, 2, 3], 5)]  # type: ignore[attr-defined]


def test_a_single_source_is_not_repeated() -> None:
    assert summarize([("a", 0.5, 1.0, 3, False), ("a", -0.5, 0.0, 5, True)]) == {
        "evaluate/reward": 0.0,
        "evaluate/accuracy": 0.5,
        "evaluate/response_length_mean": 4.0,
        "evaluate/truncated_fraction": 0.5,
    }


@pytest.mark.parametrize(
    ("value", "parts", "correct"),
    [
        (1.0, {}, True),
        (0.99, {}, False),
        (2.5, {}, True),
        (1.1, {"answer": 1.0, "format": 1.0}, True),
        (1.9, {"answer": 1.0, "format": 0.9}, False),
        (0.2, {"answer": 1.0}, True),  # a weight of 0.2
        (5.0, {"answer": 0.0}, False),
    ],
)
def test_correct_means_full_marks(value: float, parts: dict[str, float], correct: bool) -> None:
    assert is_correct(value, parts) is correct


def test_engines_take_turns_and_only_their_leads_own_trajectories() -> None:
    prompts = [prompt(i) for i in range(5)]
    seen = []
    for index in range(2):
        engine = Engine(2, index)
        rollouts = generate(engine, prompts, Sampling(n=2), step=3)  # type: ignore[arg-type]
        assert [t.prompt.index for t in rollouts.trajectories] == rollouts.positions
        seen.append(rollouts.positions)
    assert seen == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3]]
    follower = Engine(2, 1, is_lead=False)
    rollouts = generate(follower, prompts, Sampling(n=2), step=3)  # type: ignore[arg-type]
    assert (rollouts.positions, rollouts.trajectories) == ([], [])
    assert follower.asked == [([1, 3], 3)]  # it takes part in the engine's work all the same
