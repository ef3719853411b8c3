from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest

from rlhf_mcore.protocols import EngineRank, RewardFunction
from rlhf_mcore.sampling.rollouts import request_seed
from rlhf_mcore.trainer.evaluation import (
    TOKENS,
    PolicyEvaluator,
    Record,
    batches,
    grade,
    graded_of,
    is_correct,
    metrics,
    missing_batches,
    sample_record,
    score_records,
    to_graded,
    with_tokens,
)
from rlhf_mcore.trainer.model_reward import PART
from rlhf_mcore.trainer.statistics import Graded
from rlhf_mcore.types import Completion, Prompt, Request, Sampling, Score, Trajectory
from tests.episodes import sample_rollouts
from tests.unit.trainer.records import Streaming, batch_sampler, completions, prompt, trajectory


class Engine(Streaming):
    """Answers prompt i with i + 1 tokens; prompt 3 runs into the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[int]] = []
        self.seeds: list[int] = []

    def draw(self, requests: Sequence[Request]) -> list[Completion]:
        self.asked.append(list(dict.fromkeys(request.prompt_ids[0] - 100 for request in requests)))
        self.seeds += [request.seed for request in requests]
        return completions(requests, lambda index: index + 1, truncated=[3])


class Reward:
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(float(t.prompt.index % 2), {"answer": float(t.prompt.index % 2)}) for t in trajectories]


def prompts(count: int = 4) -> list[Prompt]:
    return [replace(prompt(i), data_source="even" if i % 2 == 0 else "odd") for i in range(count)]


def evaluator(every: int, count: int = 4, size: int = 3) -> PolicyEvaluator:
    sampling = Sampling(temperature=0.0)
    return PolicyEvaluator(prompts(count), batch_sampler(Engine()), Reward(), sampling, every, size)


@pytest.mark.parametrize(
    ("every", "due"), [(0, [0, 7]), (1, [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6, 7]), (7, [0, 7]), (9, [0, 7])]
)
def test_when_it_is_due(every: int, due: list[int]) -> None:
    assert [step for step in range(8) if evaluator(every).is_due(step, 7)] == due


def test_it_is_never_due_without_prompts() -> None:
    assert not any(evaluator(1, count=0).is_due(step, 7) for step in range(8))


@pytest.mark.usefixtures("world")
def test_means_over_all_prompts_and_per_source() -> None:
    which, shown = evaluator(1), list[str]()
    which.progress = shown.append
    assert which.run(5) == {
        "evaluate/reward": 0.5,
        "evaluate/accuracy": 0.5,
        "evaluate/response_length_mean": 2.5,
        "evaluate/truncated_fraction": 0.25,
        "evaluate/accuracy/even": 0.0,
        "evaluate/accuracy/odd": 1.0,
    }
    assert shown == ["0 of 4 prompts", "3 of 4 prompts"]


class BrokenReward(Reward):
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        scored = await super().score(trajectories)
        scored[0] = Score(0.0, failure="error", cause="reward.py raised ValueError")
        return scored


@pytest.mark.usefixtures("world")
def test_responses_without_a_score_are_counted_and_told() -> None:
    notes: list[str] = []
    which = replace(evaluator(1), reward=BrokenReward(), note=notes.append)
    assert which.run(5)["evaluate/without_score"] == 2.0  # the first of each batch
    assert notes == [
        "evaluation after step 5: 2 responses got no score and count as 0; the first: reward.py raised ValueError"
    ]


@pytest.mark.usefixtures("world")
def test_the_seeds_are_those_of_step_0_whatever_the_step_is() -> None:
    engine = Engine()
    which = replace(evaluator(1), sampler=batch_sampler(engine))
    which.run(5)
    assert engine.asked == [[0, 1, 2], [3]]
    assert engine.seeds == [request_seed(0, 0, index, 0) for index in range(4)]


@pytest.mark.usefixtures("world")
def test_several_samples_have_pass_and_majority() -> None:
    which = replace(evaluator(1), sampling=Sampling(n=2, temperature=1.0))
    found = which.run(1)
    assert found["evaluate/pass_at_2"] == 0.5
    assert found["evaluate/majority_at_2"] == 0.5
    assert found["evaluate/accuracy"] == 0.5


def test_a_single_source_is_not_repeated() -> None:
    rows = [Graded("a", 0, "s", 0, 0.5, True, "", 3, False), Graded("b", 1, "s", 0, -0.5, False, "", 5, True)]
    assert metrics(rows) == {
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
        (1.1, {"math": 1.0, "format": 1.0}, True),
        (1.9, {"math": 1.0, "format": 0.9}, False),
        (0.2, {"math": 1.0}, True),  # a weight of 0.2
        (5.0, {"math": 0.0}, False),
        (0.0, {"parsed": 1.0}, False),  # other values of a function are not grades
        (1.0, {"length": 37.0}, True),
    ],
)
def test_correct_means_full_marks(value: float, parts: dict[str, float], correct: bool) -> None:
    assert is_correct(value, parts) is correct


def test_every_prompt_is_in_one_batch_of_one_engine() -> None:
    found = [[p.index for p in batch] for i in range(2) for batch in batches(prompts(7), EngineRank(i, 2), 3)]
    assert found == [[0, 2, 4], [6], [1, 3, 5], []], "all engines have equally many batches"


def run_command(engine: Engine, kept: list[list[dict[str, Any]]], stop_after: int | None = None) -> None:
    """The evaluation of seven prompts, two samples each, in batches of three; killed while a batch is being kept."""
    done = {records[0]["index"] for records in kept}
    for asked in missing_batches(prompts(7), EngineRank(), 3, done):
        rows = grade(batch_sampler(engine), Reward(), Sampling(n=2, temperature=1.0), asked)
        records = [sample_record(*row) for row in rows]
        kept += [list(own) for _, own in groupby(records, key=itemgetter("index"))]
        if stop_after is not None and len(kept) >= stop_after:
            raise KeyboardInterrupt


def test_a_batch_is_kept_prompt_by_prompt_with_all_samples() -> None:
    kept: list[list[dict[str, Any]]] = []
    run_command(Engine(), kept)
    assert [[(r["index"], r["sample"]) for r in records] for records in kept] == [[(i, 0), (i, 1)] for i in range(7)]


def test_killed_and_started_again_no_prompt_is_drawn_twice_and_batches_are_cut_alike() -> None:
    whole: list[list[dict[str, Any]]] = []
    run_command(Engine(), whole)
    kept: list[list[dict[str, Any]]] = []
    with pytest.raises(KeyboardInterrupt):
        run_command(Engine(), kept, stop_after=3)
    del kept[2]  # the last line was cut short
    again = Engine()
    run_command(again, kept)
    assert again.asked == [[2], [3, 4, 5], [6]]
    assert sorted(kept, key=lambda records: records[0]["index"]) == whole


def test_ranks_that_do_not_lead_grade_nothing() -> None:
    engine, rank = Engine(), EngineRank(1, 2, is_lead=False)
    assert grade(batch_sampler(engine, rank), Reward(), Sampling(), prompts(4)) == []
    assert engine.asked == []


def test_a_record_is_what_statistics_need() -> None:
    response = replace(trajectory(prompt(2), 1, 5, "length"), response_text="so #### 12.0")
    verdict = Score(0.5, {"answer": 1.0, "format": 0.0})
    row = to_graded(response, verdict)
    assert row == Graded("p2", 2, "set", 1, 0.5, False, "12", 5, True)
    record = sample_record(response, verdict, row)
    assert graded_of(record) == row
    assert record["parts"] == {"answer": 1.0, "format": 0.0}
    assert (record["prompt"], record["response"]) == ("prompt 2", "so #### 12.0")


def test_engines_take_turns_and_only_their_leads_own_trajectories() -> None:
    five = [prompt(i) for i in range(5)]
    seen = []
    for index in range(2):
        rollouts = sample_rollouts(batch_sampler(Engine(), EngineRank(index, 2)), five, Sampling(n=2), step=3)
        positions = [each.place for each in rollouts]
        assert [each.trajectory.prompt.index for each in rollouts] == positions
        seen.append(positions)
    assert seen == [[0, 0, 2, 2, 4, 4], [1, 1, 3, 3]]
    follower = batch_sampler(Engine(), EngineRank(1, 2, is_lead=False))
    assert sample_rollouts(follower, five, Sampling(n=2), step=3) == []


PROMPTS = [prompt(i) for i in range(5)]


@dataclass
class LastToken:
    """A reward model: adds a thousandth of the last token to what the others said, and remembers its batches."""

    graders: RewardFunction
    asked: list[list[tuple[int, int]]] = field(default_factory=list)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.asked.append([(t.prompt.index, t.sample) for t in trajectories])
        others = await self.graders.score(trajectories)
        said = [float(t.token_ids[-1]) / 1000 for t in trajectories]
        return [Score(o.value + s, {**o.parts, PART: s}) for o, s in zip(others, said, strict=True)]


def records() -> list[Record]:
    """Make records as in a parts file: two responses for each of five prompts."""
    found = []
    for made_of in PROMPTS:
        for sample in range(2):
            drawn = trajectory(made_of, sample, 3, "length")
            verdict = Score(10.0 * sample, {"format": 1.0})
            record = with_tokens(sample_record(drawn, verdict, to_graded(drawn, verdict)), drawn)
            found.append(json.loads(json.dumps(record)))
    return found


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        (EngineRank(0, 2), [[(0, 0), (0, 1), (2, 0), (2, 1)], [(4, 0), (4, 1)]]),
        (EngineRank(1, 2), [[(1, 0), (1, 1), (3, 0), (3, 1)], []]),
        (EngineRank(1, 2, is_lead=False), [[], []]),
    ],
)
def test_each_engine_scores_its_own_in_the_batches_of_training(
    engine: EngineRank, asked: list[list[tuple[int, int]]]
) -> None:
    models: list[LastToken] = []

    def add_model(graders: RewardFunction) -> RewardFunction:
        models.append(LastToken(graders))
        return models[0]

    before = {(r["index"], r["sample"]): r for r in records()}
    found = score_records(PROMPTS, records(), engine, 2, add_model)
    assert models[0].asked == asked
    assert [(r["index"], r["sample"]) for r in found] == [pair for batch in asked for pair in batch]
    for record in found:
        old = before[record["index"], record["sample"]]
        said = (1000 * (record["index"] + 1) + 100 * record["sample"] + 2) / 1000
        assert record["score"] == pytest.approx(10.0 * record["sample"] + said)
        assert record["parts"] == {"format": 1.0, PART: said}
        assert TOKENS not in record
        changed = {"score", "parts", "correct", TOKENS}
        assert {k: v for k, v in old.items() if k not in changed} == {
            k: v for k, v in record.items() if k not in changed
        }


class Function:
    """A user's function without parts: full marks for some responses by itself, for others with the model's help."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.3 * t.prompt.index - 4.0 + t.sample) for t in trajectories]


@pytest.mark.usefixtures("world")
def test_the_command_ends_with_the_numbers_of_training() -> None:
    sampling = Sampling(n=2, temperature=1.0)
    in_training = PolicyEvaluator(PROMPTS, batch_sampler(Engine()), LastToken(Function()), sampling, 1, 2).run(1)
    drawn = grade(batch_sampler(Engine()), Function(), sampling, PROMPTS)
    kept = [with_tokens(sample_record(*row), row[0]) for row in drawn]
    by_command = metrics([graded_of(r) for r in score_records(PROMPTS, kept, EngineRank(), 2, LastToken)])
    assert by_command == in_training
    assert 0 < in_training["evaluate/accuracy"] < 1
