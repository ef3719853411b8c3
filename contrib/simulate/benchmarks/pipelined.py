"""Compare simulated samples/s of pipelined schedules with the bound that engines and trainer reach if they wait only for the sync.

Lengths vary mildly (standard deviation: a third of the mean). Engines are slower than the trainer, as fast, or faster. The result is
the lowest ratio. docs/scale/tuning.md measures pipelined training in real runs.
"""

from __future__ import annotations

import argparse

from benchmarks.common import report
from rlhf_mcore_contrib.simulate.compare import samples_bound
from rlhf_mcore_contrib.simulate.engine import EngineTimes
from rlhf_mcore_contrib.simulate.lengths import read_lengths
from rlhf_mcore_contrib.simulate.schedule import CONTINUE, Scenario, StepSchedule, TrainTimes, simulate

GOAL = 0.95
LENGTHS = read_lengths("lognormal(5.5,0.3,600)", 600)
ENGINE = EngineTimes(step_s=0.02, sequence_s=0.0002, prompt_s=0.01, slots=128)
CASES = [
    (engines, train_s, bound) for engines in (2, 4, 8) for train_s, bound in ((8.0, 3), (14.0, 3), (20.0, 2), (40.0, 1))
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="10 steps instead of 40")
    quick = parser.parse_args().quick
    rows = []
    for engines, train_s, bound in CASES:
        scenario = Scenario(16 * engines, 8, engines, ENGINE, TrainTimes(train_s, 0.0), sync_s=1.0)
        schedule = StepSchedule(bound, CONTINUE)
        outcome = simulate(scenario, schedule, LENGTHS.draw(8, seed=0), 10 if quick else 40)
        ratio = outcome.samples_per_s / samples_bound(scenario, schedule, LENGTHS.mean)
        rows.append(
            {
                "engines": engines,
                "train_s": train_s,
                "max_staleness": bound,
                "rollout_busy": round(outcome.rollout_busy, 4),
                "training_busy": round(outcome.training_busy, 4),
                "of_bound": round(ratio, 4),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    report("pipelined", {"rows": rows}, ratio=min(row["of_bound"] for row in rows), goal=GOAL, quick=quick)


if __name__ == "__main__":
    main()
