"""Fit the times of engines and trainer to the records of runs: metrics.jsonl and rollouts/.

Generation time is linear in up to three numbers, which follow from the lengths of a step. These are decode steps of the
slowest engine, response tokens per engine, and requests per engine if steps differ in them. The rest of a step is
linear in its response tokens. The fit minimises the sum of relative deviations with coefficients of at least 0. It uses
synchronous runs, in which one side waits for the other.

Runs that sample ahead show the slowdown of each side while the other side computes. Their training and decode times are divided by the
times of the fit. The ratio is then extrapolated from the share of time in which both sides computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlhf_mcore.config.choices import run_kind
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.resolve import default_world_size
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import Fields
from rlhf_mcore.observability.files import read_lines
from rlhf_mcore.observability.run_directory import METRICS, ROLLOUTS
from rlhf_mcore.planning.inputs import num_engines
from rlhf_mcore_contrib.simulate.lengths import ENOUGH, Lengths, rollout_lengths
from rlhf_mcore_contrib.simulate.schedule import Contention

_REMEDY = "name the directory of another run"
_NOT_TRAINING = (
    "generate",
    "exchange",
    "sync",
    "drain",
    "evaluate",
    "save",
    "step",
    "load_data",
    "build_model",
    "start_engine",
)
_WORK = tuple(f"throughput/engine_{name}" for name in ("steps", "tokens", "busy_s"))
_ENOUGH_OF_BOTH, _MOST = 0.2, 10.0  # least share of time in which both sides compute; largest slowdown
_REWEIGHTED = 20  # iterations, after which least squares has become least absolute deviations
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PhaseFit:
    """Fitted times in seconds. ``train_token_s`` is for one device. ``error``: median relative deviation of steps from the fit.

    ``source``: directory of the first synchronous run. ``contention``: None if no run sampled ahead.
    """

    step_s: float
    sequence_s: float
    prompt_s: float
    train_step_s: float
    train_token_s: float
    sync_s: float
    error: float
    steps: int
    source: str
    contention: Contention | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A recorded step and the numbers that determine its times. ``work``: total of all engines, if it was recorded."""

    decode_steps: int
    engine_tokens: float
    engine_requests: float
    device_tokens: float  # response tokens per training device
    generate_s: float
    exchange_s: float
    train_s: float
    sync_s: float
    waiting_s: float  # time in which the trainer waited for engines
    work: tuple[float, ...]  # decode steps, tokens, seconds


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    num_engines: int
    is_ahead: bool
    steps: list[_Step]


def fit_runs(directories: Sequence[Path]) -> PhaseFit:
    """Fit the times of synchronous runs, and the slowdown in runs that sample ahead.

    Raises:
        ConfigError: a directory is not a run directory, contains no steps with rollouts, or no run is synchronous.
    """
    runs = [_read_run(directory) for directory in directories]
    alone = [run for run in runs if not run.is_ahead]
    if not alone:
        raise ConfigError(
            f"--run {', '.join(map(str, directories))}: with trainer.max_staleness above 0, generation times include waiting; "
            "add --run with the directory of a synchronous run"
        )
    fit = _fit([step for run in alone for step in run.steps], alone[0].name)
    factors = [_contention(fit, run) for run in runs if run.is_ahead]
    if not factors:
        return fit
    train, decode = (float(np.mean(column)) for column in zip(*factors, strict=True))
    return replace(fit, contention=Contention(train, decode))


def _fit(steps: list[_Step], source: str) -> PhaseFit:
    # When engines exchange rows, they wait for the slowest engine. Time beyond the shortest exchange is therefore generation.
    exchange_s = min(step.exchange_s for step in steps)
    generate = np.array([step.generate_s + step.exchange_s - exchange_s for step in steps])
    work = np.array([(step.decode_steps, step.engine_tokens, step.engine_requests) for step in steps], dtype=float)
    train = np.array([step.train_s + exchange_s for step in steps])
    tokens = np.array([(1.0, step.device_tokens) for step in steps])
    if not np.ptp(work[:, 2]):  # every step has the same number of requests, so their cost cannot be separated
        work = work[:, :2]
    (step_s, sequence_s, *prompt_s), engine_error = nonnegative_fit(work, generate)
    (train_step_s, train_token_s), train_error = nonnegative_fit(tokens, train)
    sync_s, error = float(np.median([step.sync_s for step in steps])), max(engine_error, train_error)
    return PhaseFit(step_s, sequence_s, sum(prompt_s), train_step_s, train_token_s, sync_s, error, len(steps), source)


def _contention(fit: PhaseFit, run: _Run) -> tuple[float, float]:
    """Measure the slowdown of training and of decoding while both compute, in a run that samples ahead."""
    if not all(len(step.work) == len(_WORK) for step in run.steps):
        raise ConfigError(
            f"--run {run.name}: {METRICS} does not contain the engines' work, which runs of this release record; {_REMEDY}"
        )
    engine_s = np.array([step.work[2] / run.num_engines for step in run.steps])
    request_s = [fit.prompt_s * step.engine_requests / step.engine_tokens for step in run.steps]
    decode = [
        seconds * run.num_engines / max(step.work[0] * fit.step_s + step.work[1] * (fit.sequence_s + prompt_s), 1e-9)
        for seconds, step, prompt_s in zip(engine_s, run.steps, request_s, strict=True)
        if step.work[0]
    ]
    train_s = np.array([step.train_s + step.exchange_s for step in run.steps])
    alone_s = [fit.train_step_s + fit.train_token_s * step.device_tokens for step in run.steps]
    both_s = float(np.clip(engine_s.sum() - sum(step.waiting_s for step in run.steps), 0.0, train_s.sum()))
    if both_s < _ENOUGH_OF_BOTH * max(train_s.sum(), engine_s.sum()) or not decode:
        raise ConfigError(f"--run {run.name}: trainer and engines hardly ever computed at the same time; {_REMEDY}")
    train, together = float(np.median(train_s / alone_s)), both_s / train_s.sum()
    return _while_both(train, together), _while_both(float(np.median(decode)), both_s / engine_s.sum())


def _while_both(longer: float, together: float) -> float:
    """Extrapolate the slowdown during common computation from ``longer``, the slowdown over the whole time.

    ``together``: share of the time in which both sides compute.
    """
    return together / max(1 / longer - (1 - together), together / _MOST)


def _read_run(directory: Path) -> _Run:
    """Read the steps of a run that have times and rollouts. The first steps are skipped as warm-up."""
    if not (directory / METRICS).is_file():
        raise ConfigError(f"--run {directory}: not a run directory, because it contains no {METRICS}; {_REMEDY}")
    try:
        cfg = load_config(directory / "config.yaml", [])
    except ConfigError as error:
        raise ConfigError(f"--run {directory}: {error}") from error
    if not run_kind(cfg).generates:
        raise ConfigError(
            f"--run {directory}: a run of algorithm.kind={cfg.algorithm.kind} generates nothing; {_REMEDY}"
        )
    bound = cfg.trainer.max_staleness
    warms_up = 2 * bound + 2 if bound else 1
    lines = {line.integer("step"): line for line in read_lines(directory / METRICS, _REMEDY)}
    steps: list[_Step] = []
    responses = 0
    for number in sorted(lines, reverse=True):
        file = directory / ROLLOUTS / f"step-{number:06d}.jsonl"
        if number > warms_up and "timing/generate_s" in lines[number] and file.is_file() and responses < ENOUGH:
            lengths = np.array(rollout_lengths(read_lines(file, _REMEDY)), np.int64)
            responses += len(lengths)
            steps.append(_step(cfg, lines[number], lengths))
    if not steps:
        raise ConfigError(
            f"--run {directory}: no step after number {warms_up} has both its times in {METRICS} and its lengths in {ROLLOUTS}; make "
            "more steps with logging.rollouts_every=1, or name another run"
        )
    return _Run(str(directory), num_engines(cfg, default_world_size(cfg)), bound > 0, steps)


def _step(cfg: Config, line: Fields, lengths: Lengths) -> _Step:
    world_size = default_world_size(cfg)
    engines, samples = num_engines(cfg, world_size), cfg.rollout.sampling.n
    groups = [lengths[start : start + samples] for start in range(0, len(lengths), samples)]
    dealt = [np.concatenate(groups[number::engines]) for number in range(min(engines, len(groups)))]
    seconds = {
        name.removeprefix("timing/").removesuffix("_s"): line.number(name, 0.0)
        for name in line
        if name.startswith("timing/") and name.endswith("_s") and name != "timing/tokens_per_s"
    }
    return _Step(
        decode_steps=max(decode_steps(lengths.tolist(), cfg.rollout.slots) for lengths in dealt),
        engine_tokens=float(lengths.sum()) / engines,
        engine_requests=len(lengths) / engines,
        device_tokens=float(lengths.sum()) / world_size,
        generate_s=seconds["generate"],
        exchange_s=seconds.get("exchange", 0.0),
        train_s=sum(spent for name, spent in seconds.items() if name not in _NOT_TRAINING),
        sync_s=seconds.get("sync", 0.0),
        waiting_s=sum(seconds.get(name, 0.0) for name in ("generate", "drain", "evaluate")),
        work=tuple(line.number(name, 0.0) for name in _WORK if name in line),
    )


def decode_steps(lengths: Sequence[int], slots: int) -> int:
    """Return the number of decode steps for requests that an engine starts in order, at most ``slots`` concurrently."""
    ends: list[int] = []
    for length in lengths:
        begin = heapq.heappop(ends) if len(ends) == slots else 0
        heapq.heappush(ends, begin + length)
    return max(ends)


def nonnegative_fit(work: Matrix, seconds: Matrix) -> tuple[list[float], float]:
    """Fit coefficients c >= 0 that minimise the sum of relative deviations of work @ c from ``seconds``.

    Returns c and the median deviation. Steps that other load has disturbed count little, if most steps are undisturbed.

    Args:
        work: [steps, columns].
        seconds: [steps].
    """
    relative, closeness = work / np.maximum(seconds, 1e-9)[:, None], np.ones(len(seconds))
    for _ in range(_REWEIGHTED):
        coefficients = _least_squares(relative, closeness)
        distance = np.abs(relative @ coefficients - 1)
        closeness = 1 / np.sqrt(np.maximum(distance, 1e-4))
    return coefficients.tolist(), float(np.median(distance))


def _least_squares(relative: Matrix, weights: Matrix) -> Matrix:
    """Fit the constant 1 by every subset of the columns, and return the best fit without negative coefficients."""
    best, least = np.zeros(relative.shape[1]), np.inf
    columns = range(relative.shape[1])
    for chosen in (list(some) for count in columns for some in combinations(columns, count + 1)):
        solution = np.linalg.lstsq(relative[:, chosen] * weights[:, None], weights, rcond=None)[0]
        residual = float((((relative[:, chosen] @ solution - 1) * weights) ** 2).sum())
        if (solution >= 0).all() and residual < least * (1 - 1e-6):
            best, least = np.zeros(relative.shape[1]), residual
            best[chosen] = solution
    return best
