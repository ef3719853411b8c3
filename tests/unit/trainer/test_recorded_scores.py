from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from rlhf_mcore.protocols import EngineRank, RewardFunction
from rlhf_mcore.trainer.evaluation import Evaluator, grade, graded, graded_of, metrics, sample_record
from rlhf_mcore.trainer.model_reward import PART
from rlhf_mcore.trainer.recorded_scores import TOKENS, Record, score_records, with_tokens
from rlhf_mcore.types import Sampling, Score, Trajectory
from tests.unit.trainer.records import prompt, trajectory, worker
from tests.unit.trainer.test_evaluation import Engine

PROMPTS = [prompt(i) for i in range(5)]


@dataclass
class LastToken:
    """A reward model: adds a thousandth of the last token to what the others said, and remembers its batches."""

    graders: RewardFunction
    asked: list[list[tuple[int, int]]] = field(default_factory=list)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        self.asked.append([(t.prompt.index, t.sample) for t in trajectories])
        others = self.graders.score(trajectories)
        said = [float(t.token_ids[-1]) / 1000 for t in trajectories]
        return [Score(o.value + s, {**o.parts, PART: s}) for o, s in zip(others, said, strict=True)]


def records() -> list[Record]:
    """As they come from a parts file: two responses for each of five prompts."""
    found = []
    for made_of in PROMPTS:
        for sample in range(2):
            drawn = trajectory(made_of, sample, 3, "length")
            verdict = Score(10.0 * sample, {"format": 1.0})
            record = with_tokens(sample_record(drawn, verdict, graded(drawn, verdict)), drawn)
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

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return [Score(0.3 * t.prompt.index - 4.0 + t.sample) for t in trajectories]


@pytest.mark.usefixtures("world")
def test_the_command_ends_with_the_numbers_of_training() -> None:
    sampling = Sampling(n=2, temperature=1.0)
    in_training = Evaluator(PROMPTS, worker(Engine()), LastToken(Function()), sampling, 1, 2).run(1)
    drawn = grade(worker(Engine()), Function(), sampling, PROMPTS)
    kept = [with_tokens(sample_record(*row), row[0]) for row in drawn]
    by_command = metrics([graded_of(r) for r in score_records(PROMPTS, kept, EngineRank(), 2, LastToken)])
    assert by_command == in_training
    assert 0 < in_training["evaluate/accuracy"] < 1
