"""A line when the mean score of a data source jumps.

A grader has broken, other data have come, or the policy has found a way around the reward.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MEAN, MIN, MAX, DEVIATION, SAMPLES = "reward/mean", "reward/min", "reward/max", "reward/std", "progress/samples"
LEAST_SHARE = 0.05  # of the span of a step's scores: a smaller change is none, however steady the steps before were


@dataclass(slots=True)
class RewardAlarm:
    """Compares the mean of a step with those of ``steps`` steps before. It is silent until half of them are there.

    ``deviations`` of theirs are what a mean may be away from their mean, and of its own: a mean of few scores varies. 0: off.
    """

    deviations: float = 5.0
    steps: int = 20
    _means: dict[str, deque[float]] = field(default_factory=dict)  # by metric
    _samples: float = 0.0  # scores of all steps before

    def lines(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """What to tell of a step, which then counts among those before. To be used up."""
        names = sorted(name for name in metrics if name.startswith(f"{MEAN}/")) or [MEAN] * (MEAN in metrics)
        number = (metrics.get(SAMPLES, 0.0) - self._samples) / max(len(names), 1)
        self._samples = metrics.get(SAMPLES, self._samples)
        own = metrics.get(DEVIATION, 0.0) / math.sqrt(number) if number > 0 else 0.0
        for name in names if self.deviations else []:
            known = self._means.setdefault(name, deque(maxlen=self.steps))
            if len(known) >= max(self.steps // 2, 2):
                before, spread = statistics.fmean(known), statistics.pstdev(known)
                span = metrics.get(MAX, 0.0) - metrics.get(MIN, 0.0)
                if abs(metrics[name] - before) > max(self.deviations * max(spread, own), LEAST_SHARE * span):
                    away = f"{abs(metrics[name] - before) / spread:.3g} deviations" if spread else "more than ever"
                    of = f" of data source {name.removeprefix(f'{MEAN}/')!r}" if name != MEAN else ""
                    yield (
                        f"the mean score{of} is {metrics[name]:.4g}, {away} from {before:.4g}, that of the {len(known)} steps before: "
                        "look at the responses under rollouts/"
                    )
            known.append(metrics[name])
