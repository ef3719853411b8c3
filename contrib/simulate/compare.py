"""Compare schedules, each on its fastest split of the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.resolve import at_publish
from rlhf_mcore.config.schema import Config
from rlhf_mcore_contrib.simulate.lengths import ResponseLengths
from rlhf_mcore_contrib.simulate.schedule import CONTINUE, DRAIN, Scenario, ScheduleOutcome, StepSchedule, simulate
from rlhf_mcore_contrib.simulate.times import Split, Times

_MOST_SPLITS = 9  # simulated per schedule


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule on a split of the devices. ``bound``: upper bound of its samples/s."""

    schedule: StepSchedule
    split: Split
    outcome: ScheduleOutcome
    bound: float


@dataclass(frozen=True, slots=True)
class ScheduleComparison:
    """The simulated schedules.

    ``rows``: each schedule on the split that trains most tokens per second. ``tried``: all simulated splits by schedule name.
    ``left_out``: names of schedules for which the layouts allow no split.
    """

    lengths: ResponseLengths
    source: str
    rows: list[ScheduleRow]
    tried: Mapping[str, list[ScheduleRow]]
    left_out: list[str]


def schedules(cfg: Config, bounds: Sequence[int]) -> list[StepSchedule]:
    """List the schedules: synchronous, one step off, bounded staleness with partial rollouts, and the configuration's schedule."""
    own, rollout = read_schedule(cfg), cfg.rollout
    at_publish = CONTINUE if rollout.at_publish in (None, DRAIN) else rollout.at_publish
    known = [StepSchedule(colocated=True), StepSchedule(), StepSchedule(1, DRAIN, rollout.oversample)]
    known += [StepSchedule(bound, at_publish, rollout.oversample) for bound in sorted(set(bounds))]
    return known if own in known else [*known, own]


def read_schedule(cfg: Config) -> StepSchedule:
    """Return the schedule of a configuration."""
    rollout, bound = cfg.rollout, cfg.trainer.max_staleness
    if not bound:
        return StepSchedule(colocated=rollout.placement == "colocated")
    return StepSchedule(bound, at_publish(cfg) or CONTINUE, rollout.oversample)


def samples_bound(scenario: Scenario, schedule: StepSchedule, mean: float) -> float:
    """Return an upper bound of the samples/s. Engines are always full, and only the sync makes them or the trainer wait.

    ``mean``: mean tokens per response.
    """
    in_flight = (schedule.max_staleness + schedule.oversample) * scenario.responses / scenario.num_engines
    running = min(scenario.engine.slots, in_flight)
    response_s = mean * scenario.engine.decode_s(max(1, running)) / running + scenario.engine.prompt_s
    generate_s = scenario.responses / scenario.num_engines * response_s
    train_s = scenario.train.step_s + scenario.train.token_s * scenario.responses * mean
    apart = max(generate_s, train_s) if schedule.max_staleness else generate_s + train_s
    return scenario.responses / (apart + scenario.sync_s)


def compare(
    times: Times,
    lengths: ResponseLengths,
    wanted: Mapping[StepSchedule, Sequence[Split]],
    configured: tuple[StepSchedule, Split],
    *,
    steps: int,
    seed: int,
    begin: Callable[[str], None] = lambda schedule: None,
) -> ScheduleComparison:
    """Simulate each schedule on its most promising splits. Schedules without a split are left out.

    The configured schedule is shown on the configured split, if this split is among its splits. ``begin`` receives the name of each
    schedule when its simulation starts.

    Raises:
        ConfigError: no schedule has a split.
    """
    tried: dict[str, list[ScheduleRow]] = {}
    refusals: list[ConfigError] = []
    for schedule, candidates in wanted.items():
        begin(schedule.name)
        possible: list[tuple[float, Split, Scenario]] = []
        for split in candidates:
            try:
                scenario = times.scenario(split)
            except ConfigError as error:
                refusals.append(error)
                continue
            possible.append((samples_bound(scenario, schedule, lengths.mean), split, scenario))
        rows = []
        own = [entry for entry in possible if (schedule, entry[1]) == configured]
        for bound, split, scenario in own + _promising([entry for entry in possible if entry not in own]):
            outcome = simulate(scenario, schedule, lengths.draw(scenario.samples, seed), steps)
            rows.append(ScheduleRow(schedule, split, outcome, bound))
        if rows:
            tried[schedule.name] = sorted(rows, key=lambda row: row.split.rollout)
    if not tried:
        none = "engines and trainer cannot divide the devices: their layouts ask for more; raise --devices"
        raise refusals[0] if refusals else ConfigError(none)
    left_out = [schedule.name for schedule in wanted if schedule.name not in tried]
    best = [
        max(rows, key=lambda row: ((row.schedule, row.split) == configured, row.outcome.tokens_per_s))
        for rows in tried.values()
    ]
    return ScheduleComparison(lengths, times.source, best, tried, left_out)


def _promising(possible: list[tuple[float, Split, Scenario]]) -> list[tuple[float, Split, Scenario]]:
    """Keep the splits with the highest bounds, and an even selection of the others."""
    ranked = sorted(possible, key=lambda entry: -entry[0])
    first, others = ranked[: _MOST_SPLITS - 4], ranked[_MOST_SPLITS - 4 :]
    return first + others[:: max(1, -(-len(others) // 4))]


def as_json(comparison: ScheduleComparison, own: StepSchedule) -> dict[str, Any]:
    """Convert a comparison without its traces to JSON values. Times are in seconds."""
    lengths, first = comparison.lengths, comparison.rows[0].outcome.tokens_per_s
    described = {"source": lengths.name, "count": len(lengths.values), "mean": lengths.mean, "cut": lengths.cut}
    rows = [
        {"name": row.schedule.name, "configured": row.schedule == own, **asdict(row.schedule), **_rates(row)}
        | {each.name: getattr(row.outcome, each.name) for each in fields(row.outcome) if each.name != "trace"}
        | {"staleness_max": row.outcome.staleness_max, "speedup": row.outcome.tokens_per_s / first}
        | {"splits": [_rates(each) for each in comparison.tried[row.schedule.name]]}
        for row in comparison.rows
    ]
    return {"lengths": described, "times": comparison.source, "schedules": rows}


def _rates(row: ScheduleRow) -> dict[str, Any]:
    outcome, bound = row.outcome, {"bound_samples_per_s": row.bound}
    return {**asdict(row.split), "samples_per_s": outcome.samples_per_s, "tokens_per_s": outcome.tokens_per_s} | bound
