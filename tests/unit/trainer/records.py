"""Prompts, trajectories and scores for tests of the loop."""

from __future__ import annotations

from rlhf_mcore.types import Prompt, Score, TrainBatch, Trajectory


def prompt(index: int, length: int = 2) -> Prompt:
    return Prompt(f"p{index}", index, [100 + index] * length, f"prompt {index}", data_source="set")


def trajectory(made_of: Prompt, sample: int, length: int = 3, finish: str = "stop") -> Trajectory:
    """Its token ids and logprobs say whose they are: 1000 (prompt + 1) + 100 sample + t, and minus a thousandth of that."""
    ids = [1000 * (made_of.index + 1) + 100 * sample + t for t in range(length)]
    return Trajectory(made_of, sample, ids, [-i / 1000 for i in ids], f"answer {sample}", finish, 0)


def score(made_of: Trajectory) -> Score:
    """One value per trajectory: prompt index and sample."""
    return Score(made_of.prompt.index + made_of.sample / 10)


def rows_of(batch: TrainBatch) -> dict[int, tuple[int, int, list[int], list[float], float]]:
    """row id -> (group, minibatch, token ids, logprobs of the response, score)."""
    found = {}
    for k, row in enumerate(batch.row_ids.tolist()):
        found[row] = (
            int(batch.group_ids[k]),
            int(batch.minibatch_ids[k]),
            batch.token_ids[k, : batch.lengths[k]].tolist(),
            batch.rollout_logprobs[k][batch.loss_mask[k]].tolist(),
            float(batch.scores[k]),
        )
    assert len(found) == len(batch.row_ids)
    return found
