"""Sharing a step's prompts out to the engines, and scoring what comes back where it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mcore.protocols import RewardFunction, RolloutEngine
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory


@dataclass(slots=True)
class Rollouts:
    """What this rank owns of a step: nothing, unless it leads an engine. Lists run in parallel."""

    positions: list[int]  # place of each trajectory's prompt among the step's prompts
    trajectories: list[Trajectory]


def generate(engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> Rollouts:
    """Every engine takes each ``num_engines``-th prompt with all its samples, so that they share the prompt's cache."""
    mine = range(engine.engine_index, len(prompts), engine.num_engines)
    trajectories = engine.generate([prompts[place] for place in mine], sampling, step=step)
    positions = [place for place in mine for _ in range(sampling.n)] if engine.is_lead else []
    return Rollouts(positions, trajectories)


def score(reward: RewardFunction, rollouts: Rollouts) -> list[Score]:
    """Scores of this rank's trajectories, in their order."""
    return reward.score(rollouts.trajectories)
