"""Read response lengths for a simulation, from a distribution, a file of numbers, or the rollouts of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import Fields, open_file, read_text, shorten
from rlhf_mcore.observability.files import read_lines
from rlhf_mcore.observability.run_directory import ROLLOUTS

Lengths = npt.NDArray[np.int64]
COLUMNS = ("num_tokens", "response_length", "length")
FORMS = "FILE, lognormal(mu,sigma,max) or geometric(mean,max)"
MAX_LENGTH = 1 << 24  # tokens per response
ENOUGH = 200_000  # number of responses, the last ones of a run
_MAX_BYTES = 1 << 28
_MAX_COUNT = 20_000_000
_DRAWN = 1 << 16  # number of quantiles that represent a distribution; quantiles make the mean exact
_CALL = re.compile(r"\s*(\w+)\s*\(([^()]*)\)\s*")
_REMEDY = "give " + FORMS


@dataclass(frozen=True, slots=True)
class ResponseLengths:
    """Equally likely response lengths.

    ``values``: [M] int64, in tokens. ``cut``: share of the values at the limit. ``per_prompt``: number of consecutive values that
    belong to one prompt, and may be similar; 1: unknown.
    """

    name: str
    values: Lengths
    cut: float
    per_prompt: int = 1

    @property
    def mean(self) -> float:
        """Mean tokens per response."""
        return float(self.values.mean())

    def draw(self, samples: int, seed: int) -> Callable[[int], list[int]]:
        """Return a function from a group number to the lengths of its responses. Every schedule gets the same lengths.

        If ``per_prompt`` equals ``samples``, a group gets the lengths of one prompt.
        """
        blocks: dict[int, list[list[int]]] = {}
        known = self.values.reshape(-1, samples if self.per_prompt == samples else 1)
        drawn = samples // known.shape[1]

        def group(number: int) -> list[int]:
            block, place = divmod(number, 512)
            if block not in blocks:
                rng = np.random.default_rng((seed, block))
                blocks[block] = known[rng.integers(len(known), size=(512, drawn))].reshape(512, samples).tolist()
            return blocks[block][place]

        return group


def read_lengths(source: str, limit: int) -> ResponseLengths:
    """Read lengths from a distribution, a file or the rollouts of a run, and cut them at ``limit`` tokens.

    A file contains one number per line (text), numbers or objects (jsonl), or columns (parquet). A directory is a run directory or its
    rollouts.

    Raises:
        ConfigError: the file does not exist or contains no lengths, or the parameters of the distribution are impossible.
    """
    values, per_prompt = _distribution(source, limit), 1
    if values is None:
        values, per_prompt = _read_run(Path(source)) if Path(source).is_dir() else (_file(Path(source)), 1)
        if not len(values):
            raise ConfigError(f"--lengths {source}: there are no lengths in it; {_REMEDY}")
    return ResponseLengths(shorten(source), np.minimum(values, limit), float((values >= limit).mean()), per_prompt)


def _distribution(source: str, limit: int) -> Lengths | None:
    """Return the quantiles of a distribution, or None if ``source`` is not a distribution."""
    call = _CALL.fullmatch(source)
    if call is None:
        return None
    name, parameters = call[1], {"lognormal": ("mu", "sigma", "max"), "geometric": ("mean", "max")}.get(call[1])
    if parameters is None:
        raise ConfigError(f"--lengths {source}: there is no distribution {name!r}; {_REMEDY}")
    try:
        numbers = [float(text) for text in call[2].split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(parameters) or not all(map(math.isfinite, numbers)):
        raise ConfigError(f"--lengths {source}: not of the form {name}({','.join(parameters)}) with numbers")
    longest, at = numbers[-1], (np.arange(_DRAWN) + 0.5) / _DRAWN
    if not 1 <= longest <= limit:
        raise ConfigError(
            f"--lengths {source}: max={longest:g} must be from 1 to rollout.sampling.max_new_tokens={limit}; change one of them"
        )
    if name == "lognormal":
        mu, sigma, _ = numbers
        if sigma < 0 or not -20 <= mu <= math.log(MAX_LENGTH) or sigma > 20:
            raise ConfigError(
                f"--lengths {source}: mu is the mean of the logarithm of a length, at most {math.log(MAX_LENGTH):.1f}, and sigma "
                "its deviation, from 0 to 20; change them"
            )
        normal = np.array(list(map(NormalDist().inv_cdf, at)))
        drawn = np.exp(np.minimum(mu + sigma * normal, 60.0))
    else:
        if not 1 <= numbers[0] <= MAX_LENGTH:
            raise ConfigError(f"--lengths {source}: mean={numbers[0]:g} must be from 1 to {MAX_LENGTH}; change it")
        drawn = np.log1p(-at) / np.log1p(-1 / numbers[0]) if numbers[0] > 1 else np.ones(_DRAWN)
    return np.clip(np.ceil(drawn), 1, longest).astype(np.int64)


def _read_run(path: Path) -> tuple[Lengths, int]:
    """Read the lengths of a run's last responses, and their number per prompt (1 if prompts differ in it)."""
    folder = path / ROLLOUTS if (path / ROLLOUTS).is_dir() else path
    files = sorted(folder.glob("step-*.jsonl"), reverse=True)
    if not files:
        raise ConfigError(
            f"--lengths {path}: not a run directory, because it contains no {ROLLOUTS}/step-*.jsonl; {_REMEDY}"
        )
    values: list[int] = []
    responses: set[int] = set()
    for file in files:
        lines = list(read_lines(file, _REMEDY))
        values += rollout_lengths(lines)
        responses |= {len(list(group)) for _, group in groupby(lines, key=lambda line: line.content.get("prompt_id"))}
        if len(values) >= ENOUGH:
            break
    return np.array(values, np.int64), responses.pop() if len(responses) == 1 else 1


def rollout_lengths(lines: Iterable[Fields]) -> list[int]:
    """Read the lengths of the recorded responses of a run."""
    return [line.integer("num_tokens", 1, MAX_LENGTH) for line in lines]


def _file(path: Path) -> Lengths:
    """Read the numbers of a file: one per line, or the first existing column of COLUMNS in jsonl or parquet."""
    where = f"--lengths {path}"
    if path.suffix == ".parquet":
        open_file(path, where=where, remedy=_REMEDY).close()
        return _check(path, "row", _column(path, where))
    text = read_text(path, limit=_MAX_BYTES, where=where, remedy=_REMEDY)
    if path.suffix == ".jsonl" and text.lstrip().startswith("{"):
        return _check(path, "line", _fields(path))
    return _check(path, "line", ((n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()))


def _fields(path: Path) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(read_lines(path, _REMEDY), 1):
        name = next((name for name in COLUMNS if name in line), None)
        if name is None:
            raise ConfigError(f"--lengths {path}, line {number}: none of {', '.join(COLUMNS)} is in it; rename the key")
        yield number, line.content[name]


def _column(path: Path, where: str) -> Iterator[tuple[int, object]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            name = next((name for name in COLUMNS if name in columns), None)
            if name is not None:
                batches = file.iter_batches(columns=[name])
                yield from enumerate((length for batch in batches for length in batch[0].to_pylist()), 1)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{where}: no readable parquet file ({shorten(str(error), 200)}); {_REMEDY}") from error
    if name is None:
        shown = shorten(", ".join(columns), 200)
        raise ConfigError(f"{where}: none of {', '.join(COLUMNS)} is among its columns ({shown}); rename one")


def _check(path: Path, unit: str, numbers: Iterable[tuple[int, object]]) -> Lengths:
    values = []
    for place, given in numbers:
        try:
            value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else math.nan
        except (ValueError, OverflowError):
            value = math.nan
        if not value.is_integer() or not 1 <= value <= MAX_LENGTH:
            raise ConfigError(
                f"--lengths {path}, {unit} {place}: {shorten(given)} is not a length; lengths are whole numbers from 1 to {MAX_LENGTH}"
            )
        values.append(int(value))
        if len(values) > _MAX_COUNT:
            raise ConfigError(f"--lengths {path}: more than {_MAX_COUNT:,} lengths; give a random subset")
    return np.array(values, dtype=np.int64)
