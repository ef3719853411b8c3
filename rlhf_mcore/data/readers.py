"""Rows out of parquet and jsonl files, with errors that say which file and which line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError

ROWS_PER_READ = 1024


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) for every row of a file; ``place`` is for error messages ("train.jsonl, line 7").

    Raises:
        ConfigError: the file is missing, of an unknown kind, broken, has two columns of one name, or has no rows.
    """
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"data file {path}: unknown kind {path.suffix!r}; convert it to .parquet or .jsonl")
    if not path.is_file():
        raise ConfigError(f"data file {path}: no such file; correct data.train or data.eval")
    empty = True
    try:
        for place, row in reader(path):
            empty = False
            yield place, row
    except OSError as error:
        raise ConfigError(f"data file {path}: cannot be read ({error})") from error
    if empty:
        raise ConfigError(f"data file {path}: it has no rows; remove it from data.train or data.eval")


def require_column(row: dict[str, Any], key: str, place: str, *, setting: str) -> Any:
    """The value of a column; ``setting`` is the config key that names it.

    Raises:
        ConfigError: the column is absent. The message lists those that are there.
    """
    if key not in row:
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise ConfigError(f"{place}: no column {key!r}; there are: {columns}. Set {setting} to one of them")
    return row[key]


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _refuse_twins(file.schema_arrow.names, f"data file {path}")
            number = 0
            for batch in file.iter_batches(batch_size=ROWS_PER_READ):
                for row in batch.to_pylist():
                    yield f"{path}, row {number}", row
                    number += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"data file {path}: not a readable parquet file ({error})") from error


def _read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield place, _parse_line(line, place)


def _parse_line(line: bytes, place: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twins([key for key, _ in pairs], place)
        return dict(pairs)

    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not valid JSON ({error}); every line must be one JSON object") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place}: expected a JSON object, found {type(row).__name__}")
    return row


def _refuse_twins(names: Sequence[str], place: str) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise ConfigError(f"{place}: {', '.join(twins)} appears more than once; keep one column of each name")
