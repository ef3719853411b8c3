"""``rlhf-mcore evaluate`` with a reward model: it scores when all responses are there, in the batches in which training scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_mcore.data.episodes import episode
from rlhf_mcore.protocols import EngineRank, RewardFunction
from rlhf_mcore.trainer.evaluation import batches, is_correct
from rlhf_mcore.types import Completion, Prompt, Score, Trajectory

Record = dict[str, Any]  # a line of samples.jsonl
TOKENS = "response_ids"  # what a record has until the model has scored it: it reads tokens and not text


def with_tokens(record: Record, trajectory: Trajectory) -> Record:
    """A record that waits for the reward model."""
    return record | {TOKENS: trajectory.sampled_ids.tolist()}


@dataclass(frozen=True, slots=True)
class RecordedScores:
    """A grader that remembers what others have said of each response."""

    scores: dict[tuple[int, int], Score]  # (row of the prompt, sample)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score per trajectory, in order."""
        return [self.scores[t.prompt.index, t.sample] for t in trajectories]


def score_records(
    prompts: Sequence[Prompt],
    records: Sequence[Record],
    engine: EngineRank,
    size: int,
    add_model: Callable[[RewardFunction], RewardFunction],
) -> list[Record]:
    """Records of the prompts of this rank's engine with the reward model's score in theirs. Collective over the world.

    Args:
        prompts: all of them.
        records: of all responses, with ``TOKENS``; the same on every rank.
        engine: this rank's part of the engines that drew them.
        size: prompts that an engine is handed at a time.
        add_model: the reward of training around other graders.
    """
    by_prompt: dict[int, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(record["index"], []).append(record)
    known = {(r["index"], r["sample"]): Score(r["score"], r["parts"]) for r in records}
    reward = add_model(RecordedScores(known))
    scored = []
    for batch in batches(prompts, engine, size):
        mine = [(p, r) for p in batch for r in by_prompt[p.index]] if engine.is_lead else []
        scores = reward.score([_trajectory(*pair) for pair in mine])
        scored += [_finished(record, score) for (_, record), score in zip(mine, scores, strict=True)]
    return scored


def _finished(record: Record, score: Score) -> Record:
    correct = is_correct(score.value, score.parts)
    whole = record | {"score": score.value, "parts": score.parts, "correct": correct}
    return {name: value for name, value in whole.items() if name != TOKENS}


def _trajectory(prompt: Prompt, record: Record) -> Trajectory:
    token_ids = np.array(record[TOKENS], np.int32)
    reason = "length" if record["truncated"] else "stop"
    completion = Completion(0, token_ids, np.zeros(len(token_ids), np.float32), ((0, 0),), reason)
    return episode(prompt, record["sample"], [completion], record["response"])
