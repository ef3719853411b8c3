"""Times of engines and trainer from the records of runs: metrics.jsonl and rollouts/.

A step's generation is linear in what its lengths determine: decode steps of the engine that takes most, response tokens of an
engine, and requests of an engine where these differ. The rest of a step is linear in its response tokens. Coefficients are fitted by
the least sum of relative distances and are not negative.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlhf_mcore.config.derive import default_world_size
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.load import load_config
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.foreign import Fields
from rlhf_mcore.observability.files import read_lines
from rlhf_mcore.observability.run_directory import METRICS, ROLLOUTS
from rlhf_mcore.planning.inputs import num_engines
from rlhf_mcore.planning.simulate.lengths import ENOUGH, Lengths, rollout_lengths

_REMEDY = "name the directory of another run"
_NOT_TRAINING = (
    "generate",
    "exchange",
    "sync",
    "drain",
    "evaluate",
    "step",
    "load_data",
    "build_model",
    "start_engine",
)
_REWEIGHTED = 20  # times, until the sum of squares is one of distances
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PhaseFit:
    """Seconds. ``train_token_s`` is of one device. ``error``: median relative distance of a step's time from the fit."""

    step_s: float
    sequence_s: float
    prompt_s: float
    train_step_s: float
    train_token_s: float
    sync_s: float
    error: float
    steps: int


@dataclass(frozen=True, slots=True)
class _Step:
    """One recorded step, and what its times depend on."""

    decode_steps: int
    engine_tokens: float
    engine_requests: float
    device_tokens: float  # that a training device has its share of
    generate_s: float
    exchange_s: float
    train_s: float
    sync_s: float


def fit_runs(directories: Sequence[Path]) -> PhaseFit:
    """Times of synchronous runs.

    Raises:
        ConfigError: a directory is not that of a run, has no steps with their rollouts, or its generation was not timed alone.
    """
    steps = [step for directory in directories for step in _recorded(directory)]
    # Engines wait for the slowest of them when they exchange rows: what is beyond the shortest exchange is generation.
    exchange_s = min(step.exchange_s for step in steps)
    generate = np.array([step.generate_s + step.exchange_s - exchange_s for step in steps])
    work = np.array([(step.decode_steps, step.engine_tokens, step.engine_requests) for step in steps], dtype=float)
    train = np.array([step.train_s + exchange_s for step in steps])
    tokens = np.array([(1.0, step.device_tokens) for step in steps])
    if not np.ptp(work[:, 2]):  # requests are as many in every step: what they cost by themselves cannot be told apart
        work = work[:, :2]
    (step_s, sequence_s, *prompt_s), engine_error = nonnegative_fit(work, generate)
    (train_step_s, train_token_s), train_error = nonnegative_fit(tokens, train)
    sync_s, error = float(np.median([step.sync_s for step in steps])), max(engine_error, train_error)
    return PhaseFit(step_s, sequence_s, sum(prompt_s), train_step_s, train_token_s, sync_s, error, len(steps))


def _recorded(directory: Path) -> Iterator[_Step]:
    """Steps of a run that have times and rollouts, without the first, which warms up."""
    if not (directory / METRICS).is_file():
        raise ConfigError(f"--run {directory}: no directory of a run, there is no {METRICS} in it; {_REMEDY}")
    try:
        cfg = load_config(directory / "config.yaml", [])
    except ConfigError as error:
        raise ConfigError(f"--run {directory}: {error}") from error
    if not run_kind(cfg).generates:
        raise ConfigError(
            f"--run {directory}: a run of algorithm.kind={cfg.algorithm.kind} generates nothing; {_REMEDY}"
        )
    if cfg.trainer.max_staleness:
        raise ConfigError(
            f"--run {directory}: it ran with trainer.max_staleness={cfg.trainer.max_staleness}, so its times of generation are times "
            "of waiting; name a synchronous run"
        )
    lines = {line.integer("step"): line for line in read_lines(directory / METRICS, _REMEDY)}
    found: list[_Step] = []
    responses = 0
    for number in sorted(lines, reverse=True):
        file = directory / ROLLOUTS / f"step-{number:06d}.jsonl"
        if number > 1 and "timing/generate_s" in lines[number] and file.is_file() and responses < ENOUGH:
            lengths = np.array(rollout_lengths(read_lines(file, _REMEDY)), np.int64)
            responses += len(lengths)
            found.append(_step(cfg, lines[number], lengths))
    if not found:
        raise ConfigError(
            f"--run {directory}: no step after the first has both its times in {METRICS} and its lengths in {ROLLOUTS}; make more "
            "steps with logging.rollouts_every=1, or name another run"
        )
    return iter(found)


def _step(cfg: Config, line: Fields, lengths: Lengths) -> _Step:
    world_size = default_world_size(cfg)
    engines, samples = num_engines(cfg, world_size), cfg.rollout.sampling.n
    dealt = [
        np.concatenate(groups) for number in range(engines) if (groups := _groups(lengths, samples)[number::engines])
    ]
    seconds = {
        name.removeprefix("timing/").removesuffix("_s"): line.number(name, 0.0)
        for name in line
        if name.startswith("timing/") and name.endswith("_s") and name != "timing/tokens_per_s"
    }
    return _Step(
        decode_steps=max(decode_steps(lengths.tolist(), cfg.rollout.max_num_seqs) for lengths in dealt),
        engine_tokens=float(lengths.sum()) / engines,
        engine_requests=len(lengths) / engines,
        device_tokens=float(lengths.sum()) / world_size,
        generate_s=seconds["generate"],
        exchange_s=seconds.get("exchange", 0.0),
        train_s=sum(spent for name, spent in seconds.items() if name not in _NOT_TRAINING),
        sync_s=seconds.get("sync", 0.0),
    )


def _groups(lengths: Lengths, samples: int) -> list[Lengths]:
    return [lengths[start : start + samples] for start in range(0, len(lengths), samples)]


def decode_steps(lengths: Sequence[int], slots: int) -> int:
    """Decode steps that an engine takes for requests that it begins in their order, ``slots`` at a time."""
    ends: list[int] = []
    for length in lengths:
        begin = heapq.heappop(ends) if len(ends) == slots else 0
        heapq.heappush(ends, begin + length)
    return max(ends)


def nonnegative_fit(work: Matrix, seconds: Matrix) -> tuple[list[float], float]:
    """Coefficients c >= 0 with the least sum of relative distances of work @ c from ``seconds``, and the median distance.

    Steps that something else on the machine has disturbed count little, as long as most are undisturbed.

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
    """The best of the fits to 1 of all subsets of the columns that have no negative coefficient."""
    best, least = np.zeros(relative.shape[1]), np.inf
    columns = range(relative.shape[1])
    for chosen in (list(some) for count in columns for some in combinations(columns, count + 1)):
        found = np.linalg.lstsq(relative[:, chosen] * weights[:, None], weights, rcond=None)[0]
        residual = float((((relative[:, chosen] @ found - 1) * weights) ** 2).sum())
        if (found >= 0).all() and residual < least * (1 - 1e-6):
            best, least = np.zeros(relative.shape[1]), residual
            best[chosen] = found
    return best
