"""Prompts, trajectories and scores for tests of the loop."""

from __future__ import annotations

from rlhf_mcore.data.episodes import single_turn
from rlhf_mcore.types import Prompt, Score, TrainBatch, Trajectory
from tests.rows import padded_batch


def prompt(index: int, length: int = 2) -> Prompt:
    return Prompt(f"p{index}", index, [100 + index] * length, f"prompt {index}", data_source="set")


def trajectory(made_of: Prompt, sample: int, length: int = 3, finish: str = "stop") -> Trajectory:
    """Its token ids and logprobs say whose they are: 1000 (prompt + 1) + 100 sample + t, and minus a thousandth of that."""
    ids = [1000 * (made_of.index + 1) + 100 * sample + t for t in range(length)]
    return single_turn(made_of, sample, ids, [-i / 1000 for i in ids], f"answer {sample}", finish, 0)


def score(made_of: Trajectory) -> Score:
    """One value per trajectory: prompt index and sample."""
    return Score(made_of.prompt.index + made_of.sample / 10)


def rows_of(batch: TrainBatch) -> list[tuple[int, list[int], list[float], float]]:
    """(group, token ids, logprobs of the response, score) of every row. Collective over the world."""
    whole = padded_batch(batch)
    return [
        (
            int(batch.group_ids[row]),
            whole.token_ids[row, : batch.lengths[row]].tolist(),
            whole.rollout_logprobs[row][whole.loss_mask[row]].tolist(),
            float(batch.scores[row]),
        )
        for row in range(batch.num_rows)
    ]
