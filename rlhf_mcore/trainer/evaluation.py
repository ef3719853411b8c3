"""Held-out evaluation with the resident engine: one greedy response per prompt, scored by the run's own reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mcore.parallel.collectives import all_gather_json
from rlhf_mcore.protocols import RewardFunction, RolloutEngine
from rlhf_mcore.trainer.rollouts import generate, score
from rlhf_mcore.types import Prompt, Sampling


@dataclass(slots=True)
class Evaluator:
    """Scores ``prompts`` with the policy that the engine holds."""

    prompts: Sequence[Prompt]
    engine: RolloutEngine
    reward: RewardFunction
    sampling: Sampling
    every: int

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether to evaluate after ``step`` steps: always before the first and after the last."""
        if not self.prompts:
            return False
        return step in (0, num_steps) or (self.every > 0 and step % self.every == 0)

    def run(self, step: int) -> dict[str, float]:
        """Means over all prompts, and per data source where there are several. Collective over the world.

        ``evaluate/accuracy`` is the share of responses with the full mark of every part (a score of at least 1 where a
        function of the user's gives none).
        """
        rollouts = generate(self.engine, self.prompts, self.sampling, step=step)
        scores = score(self.reward, rollouts)
        rows = [
            (
                t.prompt.data_source,
                s.value,
                float(is_correct(s.value, s.parts)),
                len(t.response_ids),
                t.finish_reason == "length",
            )
            for t, s in zip(rollouts.trajectories, scores, strict=True)
        ]
        return summarize([tuple(row) for part in all_gather_json(rows) for row in part])


def is_correct(value: float, parts: dict[str, float]) -> bool:
    """All parts at their full mark; without parts, a score of at least 1."""
    return all(part >= 1.0 for part in parts.values()) if parts else value >= 1.0


def summarize(rows: Sequence[tuple[str, float, float, int, bool]]) -> dict[str, float]:
    """Means of (data source, score, correct, response tokens, truncated) rows, under the names of metrics.jsonl."""
    metrics = {
        "evaluate/reward": _mean([row[1] for row in rows]),
        "evaluate/accuracy": _mean([row[2] for row in rows]),
        "evaluate/response_length_mean": _mean([float(row[3]) for row in rows]),
        "evaluate/truncated_fraction": _mean([float(row[4]) for row in rows]),
    }
    sources = sorted({row[0] for row in rows})
    if len(sources) > 1:
        for source in sources:
            metrics[f"evaluate/accuracy/{source}"] = _mean([row[2] for row in rows if row[0] == source])
    return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
