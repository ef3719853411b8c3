"""Estimate the durations of the parts of a step on N devices, from the planner or from measured runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.questions import role_layouts
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.schema.group import with_values
from rlhf_mcore.planning.engines import kv_tokens, state_tokens
from rlhf_mcore.planning.inputs import Assumptions, GpuType, PlanInputs, engines_apart, roles_of, workload
from rlhf_mcore.planning.phases import GENERATE, SYNC
from rlhf_mcore.planning.timing import decode_step_s, most_running, optimizer_s, phase_seconds, prefill_token_s
from rlhf_mcore_contrib.simulate.engine import EngineTimes
from rlhf_mcore_contrib.simulate.measured import PhaseFit
from rlhf_mcore_contrib.simulate.schedule import Contention, Scenario, StepSchedule, TrainTimes

_FITTED_AT = 16  # number of points of the fit, each a number of running sequences


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of devices that generate and that train. ``colocated``: the same devices do both."""

    rollout: int
    training: int
    colocated: bool = False

    @property
    def devices(self) -> int:
        return self.training if self.colocated else self.rollout + self.training


@dataclass(frozen=True, slots=True)
class Times:
    """A source of times: its name for the user, and a function that returns a step's work on the devices of a split.

    ``scenario`` raises ConfigError if the split cannot do this work.
    """

    source: str
    scenario: Callable[[Split], Scenario]


def splits(cfg: Config, devices: int, schedule: StepSchedule) -> list[Split]:
    """List the splits of ``devices`` into engines and trainer that are multiples of both layouts."""
    size, unit = cfg.rollout.layout.num_ranks, math.lcm(*(role.model_size for role in role_layouts(cfg)))
    if schedule.colocated:
        return [Split(devices, devices, colocated=True)] if devices % math.lcm(size, unit) == 0 else []
    return [Split(used, devices - used) for used in range(size, devices, size) if (devices - used) % unit == 0]


def configured_split(cfg: Config, world_size: int) -> Split:
    """Return the split of a configuration whose trainer has ``world_size`` ranks."""
    if engines_apart(cfg):
        return Split(cfg.rollout.num_engines * cfg.rollout.layout.num_ranks, world_size)
    return Split(world_size, world_size, colocated=True)


def planned_times(cfg: Config, gpu: GpuType, assumed: Assumptions, mean: float) -> Times:
    """Estimate times from device peaks and assumed efficiencies, like ``rlhf-mcore plan``. ``mean``: mean tokens per response."""
    return Times(f"estimates for {gpu.name}", lambda split: _plan(cfg, gpu, assumed, mean, split))


def _plan(cfg: Config, gpu: GpuType, assumed: Assumptions, mean: float, split: Split) -> Scenario:
    engines = split.rollout // cfg.rollout.layout.num_ranks
    placement = "colocated" if split.colocated else "disaggregated"
    cfg = with_values(cfg, {"rollout.placement": placement, "rollout.num_engines": engines})
    dtype = "bf16" if cfg.model.dtype == "auto" else cfg.model.dtype
    work = replace(workload(cfg, assumed), response_tokens=mean)
    roles = roles_of(cfg, split.training, dtype)
    inputs = PlanInputs(cfg, roles, dtype, gpu, assumed, work, split.training)
    if kv_tokens(inputs) < work.prompt_tokens + work.response_tokens + state_tokens(inputs):
        raise ConfigError(
            f"rollout.gpu_memory_utilization={cfg.rollout.gpu_memory_utilization:g} leaves no cache for a sequence; "
            "raise it or rollout.layout.tp, see rlhf-mcore plan"
        )
    seconds = phase_seconds(inputs)
    always = sum(optimizer_s(inputs, role) for role in roles if role.trained)
    by_tokens = sum(spent for name, spent in seconds.items() if name not in (GENERATE, SYNC)) - always
    token_s = by_tokens / work.tokens
    return Scenario(
        cfg.trainer.prompts_per_step,
        cfg.rollout.sampling.n,
        engines,
        _engine_times(inputs),
        TrainTimes(always + token_s * work.sequences * work.prompt_tokens, token_s),
        seconds[SYNC],
    )


def _engine_times(inputs: PlanInputs) -> EngineTimes:
    """Fit a line to the planner's decode time, which is nearly linear in the running sequences."""
    slots = max(1, int(most_running(inputs)))
    running = np.unique(np.linspace(1, slots, _FITTED_AT).round())
    steps = [decode_step_s(inputs, float(count)) for count in running]
    slope, start = np.polyfit(running, steps, 1) if len(running) > 1 else (0.0, steps[0])
    if slope < 0 or start < 0:  # arithmetic limits nearly all points
        start, slope = 0.0, steps[-1] / slots
    token_s = prefill_token_s(inputs)
    prompt_s = token_s * inputs.work.prompt_tokens / inputs.cfg.rollout.sampling.n
    return EngineTimes(float(start), float(slope), prompt_s, token_s, slots)


def measured_times(cfg: Config, fit: PhaseFit, runs: Sequence[str]) -> Times:
    """Scale measured times to other lengths and device counts. The part that grows with tokens is divided by the devices."""
    source = f"measured in {', '.join(runs)}: {fit.steps} steps, half of them within {fit.error:.1%} of the fit"
    if (both := fit.contention) is not None:
        source += f"; while both compute training takes {both.train:.2f} times as long, decoding {both.decode:.2f}"
    prefix_token_s = fit.prompt_s / cfg.data.max_prompt_tokens
    engine = EngineTimes(fit.step_s, fit.sequence_s, fit.prompt_s, prefix_token_s, cfg.rollout.slots)

    def scenario(split: Split) -> Scenario:
        return Scenario(
            cfg.trainer.prompts_per_step,
            cfg.rollout.sampling.n,
            split.rollout // cfg.rollout.layout.num_ranks,
            engine,
            TrainTimes(fit.train_step_s, fit.train_token_s / split.training),
            fit.sync_s,
            fit.contention or Contention(),
        )

    return Times(source, scenario)
