"""What can be said about data files without reading their rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from os.path import isfile
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig

ANSWER_COLUMNS = ("reward_model", "answer")


def data_problems(data: DataConfig, files: list[str], field: str, *, needs_answer: bool) -> Iterator[str]:
    """Check that every file is there, is of a known kind, and has the columns that training reads.

    ``needs_answer``: a grader compares with a ground truth, so a column with one has to be there.
    """
    for file in files:
        try:
            columns = read_columns(Path(file), field)
        except ConfigError as error:
            yield str(error)
            continue
        there = f"its columns are: {', '.join(columns) or 'none'}"
        if data.prompt_key not in columns:
            yield f"{field}: {file} has no prompt column {data.prompt_key!r}; {there}. Set data.prompt_key to one"
        if data.answer_key is not None and data.answer_key not in columns:
            yield f"{field}: {file} has no answer column {data.answer_key!r}; {there}. Set data.answer_key to one"
        elif data.answer_key is None and needs_answer and not any(name in columns for name in ANSWER_COLUMNS):
            wanted = " or ".join(map(repr, ANSWER_COLUMNS))
            yield f"{field}: {file} has no answer column ({wanted}); {there}. Set data.answer_key to one"


def read_columns(file: Path, field: str) -> list[str]:
    """Names of a file's columns: from the footer of a parquet file, from the first line of a jsonl file.

    Raises:
        ConfigError: the file is not there, of an unknown kind, broken or empty.
    """
    readers = {".parquet": _parquet_columns, ".jsonl": _jsonl_columns}
    if file.suffix not in readers:
        raise ConfigError(f"{field}: {file} is of an unknown kind {file.suffix!r}; convert it to .parquet or .jsonl")
    if not isfile(file):
        raise ConfigError(f"{field}: {file} does not exist (looked from {Path.cwd()}); correct the path")
    try:
        return readers[file.suffix](file, field)
    except OSError as error:
        raise ConfigError(f"{field}: {file} cannot be read ({error})") from error


def _parquet_columns(file: Path, field: str) -> list[str]:
    import pyarrow
    from pyarrow import parquet

    try:
        return [str(name) for name in parquet.read_schema(file).names]
    except pyarrow.ArrowException as error:
        raise ConfigError(f"{field}: {file} is not a readable parquet file ({error}); write it again") from error


def _jsonl_columns(file: Path, field: str) -> list[str]:
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                return _line_columns(line, f"{field}: {file}, line {number}")
    raise ConfigError(f"{field}: {file} is empty; remove it or fill it")


def _line_columns(line: str, place: str) -> list[str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is not valid JSON ({error}); every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is not a JSON object; every line must be one")
    return list(row)
