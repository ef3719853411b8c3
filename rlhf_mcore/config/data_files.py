"""What can be said about data files before any process has started: files, columns, and the first rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from os.path import isfile
from pathlib import Path
from typing import Any

from rlhf_mcore.config.data_rows import RowLimits, checked_prompt, ground_truth, mapping, read_rows, require_column
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.config.user_functions import function_problems

ANSWER_COLUMNS = ("reward_model", "answer")
# All rows of ordinary files (GSM8K's 7,473 take a tenth of a second); the ranks find what is wrong further on.
SCANNED_ROWS = 50_000
SCAN_S = 1.0


def data_problems(data: DataConfig, files: list[str], field: str, *, needs_answer: bool) -> Iterator[str]:
    """Check that every file is there, is of a known kind, has the columns that training reads, and rows that can be used.

    ``needs_answer``: a grader compares with a ground truth, so a column with one has to be there.
    """
    if problems := list(key_problems(data, files, field)):
        yield from problems
        return
    limits, deadline = row_limits(data), time.monotonic() + SCAN_S
    for file, (prompt_key, answer_key) in zip(files, file_keys(data, files, field), strict=True):
        wanted = _Wanted(prompt_key, answer_key, *settings_of(data, field), needs_answer)
        try:
            columns = read_columns(Path(file), field, limits)
        except ConfigError as error:
            yield str(error)
            continue
        missing = list(wanted.missing(columns, f"{field}: {file}")) if data.transform is None else []
        yield from missing or row_problems(
            file, field, wanted.check if data.transform is None else None, limits, deadline
        )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a row has to have, and the keys that require it."""

    prompt_key: str
    answer_key: str | None
    prompt_setting: str
    answer_setting: str
    needs_answer: bool

    def missing(self, columns: Sequence[str], place: str) -> Iterator[str]:
        """What is wrong with the columns of a file."""
        there = f"its columns are: {', '.join(columns) or 'none'}"
        if self.prompt_key not in columns:
            yield f"{place} has no prompt column {self.prompt_key!r}; {there}. Set {self.prompt_setting} to one"
        if self.answer_key is not None and self.answer_key not in columns:
            yield f"{place} has no answer column {self.answer_key!r}; {there}. Set {self.answer_setting} to one"
        elif self.answer_key is None and self.needs_answer and not any(name in columns for name in ANSWER_COLUMNS):
            wanted = " or ".join(map(repr, ANSWER_COLUMNS))
            yield f"{place} has no answer column ({wanted}); {there}. Set {self.answer_setting} to one"

    def check(self, row: dict[str, Any], place: str) -> None:
        """Raises ConfigError for a row that cannot be used."""
        content = require_column(row, self.prompt_key, place, setting=self.prompt_setting)
        checked_prompt(content, f"{place}, column {self.prompt_key!r}")
        mapping(row, "extra_info", place)
        if ground_truth(row, self.answer_key, place, self.answer_setting) is None and self.needs_answer:
            raise ConfigError(
                f"{place}: no answer to compare a response with; remove the row or set {self.answer_setting}"
            )


def row_problems(
    file: str, field: str, check: Callable[[dict[str, Any], str], None] | None, limits: RowLimits, deadline: float
) -> Iterator[str]:
    """The first row of a file that cannot be used, among those that are looked at until ``deadline`` (of the monotonic clock)."""
    try:
        for place, row in islice(read_rows(Path(file), limits), SCANNED_ROWS):
            if check is not None:
                check(row, place)
            if time.monotonic() > deadline:
                return
    except ConfigError as error:
        yield f"{field}: {error}"


def transform_problems(data: DataConfig) -> Iterator[str]:
    """Whether ``data.transform`` names a function. Its file is parsed, never run."""
    if data.transform is not None:
        yield from function_problems(data.transform, "data.transform")


def check_fills_a_step(data: DataConfig, wanted: int) -> None:
    """Refuse a ``data.train`` of fewer rows than a step has prompts; a transform or a limit of the length only makes them fewer.

    Raises:
        ConfigError: there are too few, or a file cannot be read.
    """
    rows = (row for file in data.train for row in read_rows(Path(file), row_limits(data)))
    found = sum(1 for _ in islice(rows, wanted))
    if found < wanted:
        raise ConfigError(
            f"data.train has {found} rows, fewer than trainer.prompts_per_step={wanted}: a step would hold a prompt twice; "
            "lower it, or add data"
        )


def row_limits(data: DataConfig) -> RowLimits:
    """The bounds of what is read."""
    return RowLimits(data.max_row_bytes, data.max_rows, data.max_bytes)


# ---------------------------------------------------------------------------------------------------------------- columns
def file_keys(data: DataConfig, files: Sequence[str], field: str) -> list[tuple[str, str | None]]:
    """The columns of prompt and answer of each file of ``field``, data.train or data.eval."""
    prompts, answers = (_spread(key, len(files)) for key in _chosen(data, field))
    return list(zip(prompts, answers, strict=True))


def key_problems(data: DataConfig, files: Sequence[str], field: str) -> Iterator[str]:
    """What is wrong with the keys that name the columns of ``files``."""
    if not files:
        return
    for key, value, nullable in zip(settings_of(data, field), _chosen(data, field), (False, True), strict=True):
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


def _chosen(data: DataConfig, field: str) -> tuple[Any, Any]:
    if field != "data.eval":
        return data.prompt_key, data.answer_key
    prompt = data.prompt_key if data.eval_prompt_key is None else data.eval_prompt_key
    return prompt, data.answer_key if data.eval_answer_key is None else data.eval_answer_key


def settings_of(data: DataConfig, field: str) -> tuple[str, str]:
    """The keys that decide, for messages: of the files of eval, those of train unless their own are set."""
    if field != "data.eval":
        return "data.prompt_key", "data.answer_key"
    prompt = (
        "data.eval_prompt_key"
        if data.eval_prompt_key is not None or isinstance(data.prompt_key, list)
        else "data.prompt_key"
    )
    answer = (
        "data.eval_answer_key"
        if data.eval_answer_key is not None or isinstance(data.answer_key, list)
        else "data.answer_key"
    )
    return prompt, answer


def _spread(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * count
    return value if len(value) == count else value[:1] * count


def read_columns(file: Path, field: str, limits: RowLimits | None = None) -> list[str]:
    """Names of a file's columns: from the footer of a parquet file, from the first line of a jsonl file.

    Raises:
        ConfigError: the file is not there, of an unknown kind, broken or empty.
    """
    if file.is_dir():
        raise ConfigError(f"{field}: {file} is a directory; name the .parquet or .jsonl files in it")
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
