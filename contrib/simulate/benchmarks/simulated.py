"""Compare predictions of ``rlhf-mcore simulate --run`` for disaggregated schedules with measurements, for several workloads.

Workloads differ in the longest response, the responses per prompt and the prompts per step. Trainer and engine have one core each, as
in ``benchmarks.asynchronous``. In every round each workload runs synchronously, one step off, and with partial rollouts. Each of these
runs is predicted in three ways:

- from the lengths and times of the workload's synchronous run, and from the contention in its run one step off. A user has these runs
  before trying partial rollouts.
- ``alone``: from the workload's synchronous run only.
- ``elsewhere``: from these two runs of the other workloads, and from the lengths of this workload's synchronous run.

The ratio is the largest deviation of predicted / measured from 1 for the first kind of prediction, in samples/s and tokens/s, over the
medians of the rounds. The machine must be idle otherwise, because other load slows the runs of a round differently.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.asynchronous import LONG_TAIL, SCHEDULES, Workload, make_model, measure, run_directory
from benchmarks.common import report
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import resolve
from rlhf_mcore_contrib.simulate.compare import read_schedule
from rlhf_mcore_contrib.simulate.lengths import read_lengths
from rlhf_mcore_contrib.simulate.measured import PhaseFit, fit_runs
from rlhf_mcore_contrib.simulate.schedule import simulate
from rlhf_mcore_contrib.simulate.times import Split, measured_times

GOAL, SIMULATED_STEPS = 0.10, 300
PARTIAL = {"partial": ["trainer.max_staleness=4"], "partial_2": ["trainer.max_staleness=2"]}
RUNS = {
    LONG_TAIL: {name: SCHEDULES[name] for name in ("synchronous", "one_step_off")} | PARTIAL,
    Workload("short", 12, 8, 96): {name: SCHEDULES[name] for name in ("synchronous", "one_step_off", "partial")},
    Workload("pairs", 24, 2, 256): {name: SCHEDULES[name] for name in ("synchronous", "one_step_off")} | PARTIAL,
}
# Two workloads, because the prediction ``elsewhere`` needs another workload.
QUICK = {
    workload: {name: SCHEDULES[name] for name in ("synchronous", "one_step_off")}
    for workload in (Workload("short", 4, 4, 64), Workload("pairs", 8, 2, 96))
}
Runs = Mapping[Workload, Mapping[str, list[str]]]
KINDS = ("", "alone_", "elsewhere_")  # prefixes of the predictions
UNITS = {"samples": ("samples_per_s",), "tokens": ("samples_per_s", "length")}
Rates = dict[str, float]


def main() -> None:
    """Run all workloads in turn and write the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of two small workloads")
    parser.add_argument("--rounds", type=int, default=2, help="of 40 steps each run")
    args = parser.parse_args()
    quick: bool = args.quick
    rounds, steps, runs = (1, 12, QUICK) if quick else (args.rounds, 40, RUNS)
    found: dict[str, list[Rates]] = {}
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(directory)
        for _ in range(rounds):
            for workload, schedules in runs.items():
                for name, arguments in schedules.items():
                    rates = measure(directory, workload, experiment(workload, name), arguments, steps)
                    found.setdefault(f"{workload.name}: {name}", []).append(rates)
                    print(workload.name, name, rates, flush=True)
            predict(directory, runs, found)
            shutil.rmtree(directory / "outputs")
    ratios = {name: compare(rounds) for name, rounds in found.items()}
    for name, row in ratios.items():
        print(f"{name:26}", *(f"{kind} {ratio:.2f}" for kind, ratio in row.items()), flush=True)
    worst = max(abs(ratios[name][unit] - 1) for name in ratios for unit in UNITS)
    report("simulated", {"rounds": found, "ratios": ratios, "steps": steps}, ratio=worst, goal=GOAL, quick=quick)


def experiment(workload: Workload, name: str) -> str:
    return f"{workload.name}-{name}".replace(" ", "-")


def predict(directory: Path, all_runs: Runs, found: dict[str, list[Rates]]) -> None:
    """Add the predictions for every run to its last round."""
    sources = {
        workload: [run_directory(directory, experiment(workload, name)) for name in ("synchronous", "one_step_off")]
        for workload in all_runs
    }
    for workload, schedules in all_runs.items():
        others = [run for other, runs in sources.items() if other != workload for run in runs]
        fits = dict(zip(KINDS, map(fit_runs, (sources[workload], sources[workload][:1], others)), strict=True))
        print(workload.name, *fits.values(), sep="\n", flush=True)
        for name in schedules:
            run = run_directory(directory, experiment(workload, name))
            for kind, fit in fits.items():
                rates = simulate_run(run, sources[workload][0], fit, workload)
                found[f"{workload.name}: {name}"][-1] |= {f"{kind}{unit}": rate for unit, rate in rates.items()}


def simulate_run(run: Path, synchronous: Path, fit: PhaseFit, workload: Workload) -> Rates:
    cfg = resolve(load_config(run / "config.yaml"))
    lengths = read_lengths(str(synchronous), cfg.rollout.sampling.max_new_tokens)
    scenario = measured_times(cfg, fit, [run.name]).scenario(Split(1, 1))
    outcome = simulate(scenario, read_schedule(cfg), lengths.draw(workload.samples, 0), SIMULATED_STEPS)
    return {
        "predicted_samples_per_s": round(outcome.samples_per_s, 2),
        "predicted_length": round(outcome.length_mean, 2),
        "predicted_staleness": round(outcome.staleness_mean, 2),
    }


def compare(rounds: list[Rates]) -> Rates:
    """Return predicted / measured, as medians over the rounds."""

    def of(rates: Rates, factors: tuple[str, ...], kind: str = "") -> float:
        return math.prod(rates[kind + factor] for factor in factors)

    return {
        kind + unit: round(
            statistics.median(of(rates, factors, f"{kind}predicted_") / of(rates, factors) for rates in rounds), 3
        )
        for kind in KINDS
        for unit, factors in UNITS.items()
    }


if __name__ == "__main__":
    main()
