"""Sharing a step's prompts out to the engines, and scoring what comes back where it was made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlhf_mcore.protocols import RewardFunction, RolloutEngine
from rlhf_mcore.types import Prompt, Sampling, Score, Trajectory


@dataclass(slots=True)
class Rollouts:
    """What this rank owns of a step: nothing, unless it leads an engine. Lists run in parallel."""

    positions: list[int]  # place of each trajectory's prompt among the step's prompts
    trajectories: list[Trajectory]


def generate(engine: RolloutEngine, prompts: Sequence[Prompt], sampling: Sampling, *, step: int) -> Rollouts:
    """Every engine takes each ``num_engines``-th prompt with all its samples, so that they share the prompt's cache.

    ``prompts`` are those of the whole step. One that comes again is numbered, and gets other responses.
    """
    numbered = number_occurrences(prompts)
    mine = range(engine.engine_index, len(prompts), engine.num_engines)
    trajectories = engine.generate([numbered[place] for place in mine], sampling, step=step)
    positions = [place for place in mine for _ in range(sampling.n)] if engine.is_lead else []
    return Rollouts(positions, trajectories)


def number_occurrences(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts of a step, each with the number of times that its row came before."""
    seen: Counter[int] = Counter()
    numbered = []
    for prompt in prompts:
        numbered.append(replace(prompt, occurrence=seen[prompt.index]) if seen[prompt.index] else prompt)
        seen[prompt.index] += 1
    return numbered


def score(reward: RewardFunction, rollouts: Rollouts) -> list[Score]:
    """Scores of this rank's trajectories, in their order."""
    return reward.score(rollouts.trajectories)
