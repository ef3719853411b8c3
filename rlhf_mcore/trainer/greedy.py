"""The greedy responses of a step: graded with the samples, their scores are baselines, and nothing learns from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from rlhf_mcore.parallel.collectives import all_gather_rows
from rlhf_mcore.trainer.rollouts import REMEDY, LostTrajectory

if TYPE_CHECKING:
    from torch import Tensor

    from rlhf_mcore.trainer.collecting import Collected
    from rlhf_mcore.types import Prompt, Score


def take_out_greedy(collected: Collected, num_samples: int) -> dict[int, Score]:
    """Take the greedy responses out of what was collected. Returns their scores by the place of their prompt."""
    is_greedy = [trajectory.sample >= num_samples for trajectory in collected.trajectories]
    greedy = {collected.positions[k]: collected.scores[k] for k, out in enumerate(is_greedy) if out}
    sampled = [k for k, out in enumerate(is_greedy) if not out]
    collected.positions = [collected.positions[k] for k in sampled]
    collected.trajectories = [collected.trajectories[k] for k in sampled]
    collected.scores = [collected.scores[k] for k in sampled]
    return greedy


def gather_baselines(prompts: Sequence[Prompt], mine: Mapping[int, Score]) -> Tensor:
    """Return the score of each prompt's greedy response: [P] float64. Collective over the world.

    Raises:
        LostTrajectory: a prompt does not have one.
        RuntimeError: one is not finite.
    """
    own = [[float(place), score.value] for place, score in mine.items()]
    table = all_gather_rows(torch.tensor(own, dtype=torch.float64).reshape(-1, 2))
    table = table[table[:, 0].argsort()]
    if not torch.equal(table[:, 0], torch.arange(len(prompts), dtype=torch.float64)):
        raise LostTrajectory(f"the engines returned {len(table)} greedy responses for {len(prompts)} prompts. {REMEDY}")
    if len(wrong := (~table[:, 1].isfinite()).nonzero().flatten()):
        raise RuntimeError(f"the greedy response to prompt {prompts[int(wrong[0])].prompt_id!r} has no finite score")
    return table[:, 1]
