"""Check data files before any process has started: files, columns, and the first rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.questions import needs_answer
from rlhf_mcore.config.run_kinds import run_kind
from rlhf_mcore.config.schema import Config, DataConfig
from rlhf_mcore.config.user_functions import function_problems
from rlhf_mcore.readers.data_columns import (
    MESSAGES,
    chosen_columns,
    example_contents,
    file_keys,
    row_limits,
    settings_of,
    wanted_columns,
)
from rlhf_mcore.readers.data_rows import (
    RowLimits,
    checked_prompt,
    ground_truth,
    has_column,
    mapping,
    read_rows,
    require_column,
)
from rlhf_mcore.readers.hub_ids import absent_hint

ANSWER_COLUMNS = ("reward_model", "answer")
# All rows of ordinary files (GSM8K's 7,473 take a tenth of a second); the ranks find what is wrong further on.
SCANNED_ROWS = 50_000
SCAN_S = 1.0


def prompt_problems(cfg: Config) -> Iterator[str]:
    """Check the files of prompts, and what else ``data`` asks of them."""
    yield from _common_problems(cfg)
    weights = cfg.data.weights
    if weights is not None and len(weights) != len(cfg.data.train):
        yield (
            f"data.weights={weights} has {len(weights)} numbers for the {len(cfg.data.train)} files of data.train; "
            "give one for each, or null"
        )
    if any(not math.isfinite(weight) or weight <= 0 for weight in weights or ()):
        yield f"data.weights={weights}: a share has to be a positive number; leave a file out of data.train instead"
    for field, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        yield from map(FileProblem, data_problems(cfg.data, files, field, needs_answer=needs_answer(cfg)))


def _common_problems(cfg: Config) -> Iterator[str]:
    pixels = cfg.data.image_pixels
    if pixels is not None and not (len(pixels) == 2 and 1 <= pixels[0] <= pixels[1]):
        yield f"data.image_pixels={pixels}: give the least and the most pixels of an image, as [3136, 1003520]; or null"
    if not cfg.data.train:
        yield "data.train=[] names no file; give a list of .parquet or .jsonl files"
    if cfg.evaluate.every > 0 and not cfg.data.eval:
        yield f"evaluate.every={cfg.evaluate.every} but data.eval=[]; name files in data.eval or set evaluate.every=0"
    if cfg.data.transform is not None:  # its file is parsed, never run
        yield from map(FileProblem, function_problems(cfg.data.transform, "data.transform"))


def data_problems(data: DataConfig, files: list[str], field: str, *, needs_answer: bool) -> Iterator[str]:
    """Check that every file is there, is of a known kind, and has the columns for training and usable rows.

    ``needs_answer``: a grader compares with a ground truth, so a column with one has to be there.
    """
    if problems := list(key_problems(data, files, field)):
        yield from problems
        return
    limits, deadline = row_limits(data), time.monotonic() + SCAN_S
    for file, (prompt_key, answer_key) in zip(files, file_keys(data, files, field), strict=True):
        required = _Required(prompt_key, answer_key, *settings_of(field), needs_answer)
        try:
            columns = read_columns(Path(file), field, limits)
        except ConfigError as error:
            yield str(error)
            continue
        missing = list(required.missing(columns, f"{field}: {file}")) if data.transform is None else []
        yield from missing or row_problems(
            file, field, required.check if data.transform is None else None, limits, deadline
        )


@dataclass(frozen=True, slots=True)
class _Required:
    """The fields that a row must have, and the keys that require them."""

    prompt_key: str
    answer_key: str | None
    prompt_setting: str
    answer_setting: str
    needs_answer: bool

    def missing(self, columns: Sequence[str], place: str) -> Iterator[str]:
        """List the problems with the columns of a file."""
        there = f"its columns are: {', '.join(columns) or 'none'}"
        if not has_column(columns, self.prompt_key):
            yield f"{place} has no prompt column {self.prompt_key!r}; {there}. Set {self.prompt_setting} to one"
        if self.answer_key is not None and not has_column(columns, self.answer_key):
            yield f"{place} has no answer column {self.answer_key!r}; {there}. Set {self.answer_setting} to one"
        elif self.answer_key is None and self.needs_answer and not any(name in columns for name in ANSWER_COLUMNS):
            names = " or ".join(map(repr, ANSWER_COLUMNS))
            yield f"{place} has no answer column ({names}); {there}. Set {self.answer_setting} to one"

    def check(self, row: dict[str, Any], place: str) -> None:
        """Raise ConfigError for a row that cannot be used."""
        content = require_column(row, self.prompt_key, place, setting=self.prompt_setting)
        checked_prompt(content, f"{place}, column {self.prompt_key!r}", parts=True)
        mapping(row, "extra_info", place)
        if ground_truth(row, self.answer_key, place, self.answer_setting) is None and self.needs_answer:
            raise ConfigError(
                f"{place}: no answer to compare a response with; remove the row or set {self.answer_setting}"
            )


def row_problems(
    file: str, field: str, check: Callable[[dict[str, Any], str], None] | None, limits: RowLimits, deadline: float
) -> Iterator[str]:
    """Report the first row of a file that cannot be used. Rows are read until ``deadline`` (of the monotonic clock)."""
    try:
        for place, row in islice(read_rows(Path(file), limits), SCANNED_ROWS):
            if check is not None:
                check(row, place)
            if time.monotonic() > deadline:
                return
    except ConfigError as error:
        yield f"{field}: {error}"


def check_fills_a_step(data: DataConfig, wanted: int) -> None:
    """Refuse a ``data.train`` of fewer rows than a step has prompts; a transform or a limit of the length only makes them fewer.

    Raises:
        ConfigError: there are too few, or a file cannot be read.
    """
    rows = (row for file in data.train for row in read_rows(Path(file), row_limits(data)))
    num_rows = sum(1 for _ in islice(rows, wanted))
    if num_rows < wanted:
        raise ConfigError(
            f"data.train has {num_rows} rows, fewer than trainer.prompts_per_step={wanted}: a step would hold a prompt twice; "
            "lower it, or add data"
        )


# ---------------------------------------------------------------------------------------------------------------- columns


def key_problems(data: DataConfig, files: Sequence[str], field: str) -> Iterator[str]:
    """List the problems with the keys that name the columns of ``files``."""
    if not files:
        return
    for key, value, nullable in zip(_deciding(data, field), chosen_columns(data, field), (False, True), strict=True):
        values = value if isinstance(value, list) else [value]
        if not all((isinstance(name, str) and name) or (nullable and name is None) for name in values):
            yield f"{key}={value!r} is not valid; give the name of a column, or a list with one for each file of {field}"
        elif isinstance(value, list) and len(value) != len(files):
            if field == "data.eval" and len(set(value)) == 1:
                continue  # a list for the files of train, with one value for all: it fits those of eval too
            unset = (
                f" (not set: {key.replace('eval_', '')}={value})"
                if value is not getattr(data, key[5:])
                else f"={value}"
            )
            number = "one file" if len(files) == 1 else f"{len(files)} files"
            yield f"{key}{unset} names {len(value)} columns for the {number} of {field}; give one for each, or a single one"


def _deciding(data: DataConfig, field: str) -> Iterator[str]:
    """List the keys whose values ``chosen_columns`` returns: of the files of eval, those of train unless their own are set."""
    for key in settings_of(field):
        value = getattr(data, key.removeprefix("data."))
        inherited = key.replace("eval_", "")
        yield inherited if value is None and not isinstance(getattr(data, inherited[5:]), list) else key


def read_columns(file: Path, field: str, limits: RowLimits | None = None) -> list[str]:
    """Read the names of a file's columns: from the footer of a parquet file, from the first line of a jsonl file.

    Raises:
        ConfigError: the file is not there, of an unknown kind, broken or empty.
    """
    if file.is_dir():
        raise ConfigError(f"{field}: {file} is a directory; name the .parquet or .jsonl files in it")
    if hint := absent_hint(str(file), is_data=True):
        raise ConfigError(f"{field}: {file} does not exist (looked from {Path.cwd()}){hint}")
    if file.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"{field}: {file} is of an unknown kind {file.suffix!r}; convert it to .parquet or .jsonl")
    if not isfile(file):
        raise ConfigError(f"{field}: {file} does not exist (looked from {Path.cwd()}); correct the path")
    if file.suffix == ".parquet":
        return _parquet_columns(file, field)
    try:
        _, row = next(read_rows(file, limits))
    except ConfigError as error:
        raise ConfigError(f"{field}: {error}") from error
    return list(row)


def _parquet_columns(file: Path, field: str) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        return [str(name) for name in parquet.read_schema(file).names]
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{field}: {file} is not a readable parquet file ({error}); write it again") from error


# -------------------------------------------------------------------------------------------- examples with their responses
def example_problems(cfg: Config) -> Iterator[str]:
    """Check that every file is there, is of a known kind, and has the columns of an example."""
    yield from _common_problems(cfg)
    for field, files in (("data.train", cfg.data.train), ("data.eval", cfg.data.eval)):
        if problems := list(key_problems(cfg.data, files, field)):
            yield from problems
            continue
        deadline = time.monotonic() + SCAN_S
        for file, (prompt_key, _) in zip(files, file_keys(cfg.data, files, field), strict=True):
            yield from map(FileProblem, _example_file_problems(cfg, file, field, prompt_key, deadline))


def _example_file_problems(cfg: Config, file: str, field: str, prompt_key: str, deadline: float) -> Iterator[str]:
    limits = row_limits(cfg.data)
    try:
        columns = read_columns(Path(file), field, limits)
    except ConfigError as error:
        yield str(error)
        return
    if cfg.data.transform is not None:
        yield from row_problems(file, field, None, limits, deadline)
        return
    columns_by_key = wanted_columns(cfg, prompt_key)
    missing = [key for key, column in columns_by_key.items() if column not in columns]
    if missing and not (run_kind(cfg).reads_conversations and MESSAGES in columns):
        named = " and ".join(f"{columns_by_key[key]!r}" for key in missing)
        remedy = f"Set {' and '.join(missing)}" + (
            f", or give a column {MESSAGES!r}" if len(columns_by_key) == 2 else ""
        )
        yield (
            f"{field}: {file} has no column {named}, which algorithm.kind={cfg.algorithm.kind} reads; "
            f"its columns are: {', '.join(columns) or 'none'}. {remedy}"
        )
        return

    def check(row: dict[str, Any], place: str) -> None:
        _, prompt, _ = example_contents(row, columns_by_key, place)
        checked_prompt(prompt, f"{place}, prompt", parts=True)

    yield from row_problems(file, field, check, limits, deadline)
