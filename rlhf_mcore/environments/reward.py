"""Scores of episodes: from the environment, from graders, or from both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_mcore.types import Score, Trajectory

if TYPE_CHECKING:
    from rlhf_mcore.protocols import RewardFunction


@dataclass(frozen=True, slots=True)
class EnvironmentReward:
    """``graders``: of the last turn; None: the environment's rewards are all. ``adds``: these count beside the graders."""

    graders: RewardFunction | None = None
    adds: bool = True

    def submit(self, trajectories: Sequence[Trajectory]) -> Callable[[], list[Score]]:
        """Submit episodes to the graders. The result waits for them. An episode whose environment failed has no score."""
        graded = self.graders.submit(trajectories) if self.graders is not None else None

        def finish() -> list[Score]:
            given = graded() if graded is not None else [None] * len(trajectories)
            return [self._score(trajectory, score) for trajectory, score in zip(trajectories, given, strict=True)]

        return finish

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Submit, and wait."""
        return self.submit(trajectories)()

    def _score(self, trajectory: Trajectory, graded: Score | None) -> Score:
        own = trajectory.score
        assert own is not None, "an episode of an environment"
        if own.failure is not None or graded is None:
            return own
        if not self.adds:
            return graded
        value, parts = graded.value + own.value, own.parts | graded.parts
        return Score(value, parts, graded.failure, graded.cause, graded.answered)
