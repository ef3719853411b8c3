"""Data files that are damaged, odd or hostile: each ends in one message that names its place, or in rows of plain values."""

from __future__ import annotations

import json
import os
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import DataConfig
from rlhf_mcore.readers.data_rows import checked_prompt, mapping, read_rows
from tests.messages import expect_error


class _Limits(DataConfig):
    @property
    def max_rows(self) -> int:
        return 50


SMALL = _Limits(max_row_bytes=1000, max_bytes=20_000)
ROW = b'{"prompt": "x"}\n'


def rows(path: Path, limits: DataConfig = SMALL) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path, limits)]


def test_jsonl(tmp_path: Path) -> None:
    for number, (data, message) in enumerate(
        [
            (b"", "it has no rows"),
            (b"{", "line 1: not valid JSON"),
            (ROW + b"nope\n", "line 2: not valid JSON"),
            (ROW + b'{"prompt": "cut\n', "line 2: not valid JSON (Unterminated string starting at, column 12)"),
            (b"[1]\n", "line 1: expected a JSON object, found list"),
            (b'{"a": 1, "a": 2}\n', "line 1: a appears more than once"),
            (b'{"a": {"b": 1, "b": 2}}\n', "line 1: b appears more than once"),
            (b'{"a": ' + b"9" * 990 + b"9" * 20 + b"}\n", "line 1: more than data.max_row_bytes=1000 bytes"),
            (ROW * 51, "more than 50 rows, one per 4096 bytes of data.max_bytes"),
            (b" " * 20_001, "more than data.max_bytes=20000 bytes"),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        (here / "a.jsonl").write_bytes(data)
        with pytest.raises(ConfigError) as caught:
            rows(here / "a.jsonl")
        assert message in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_many_keys_take_no_quadratic_time(tmp_path: Path) -> None:
    count = 200_000  # comparing each with each would take minutes
    (tmp_path / "a.jsonl").write_text(json.dumps({f"key{number}": 0 for number in range(count)}) + "\n")
    (row,) = rows(tmp_path / "a.jsonl", DataConfig())
    assert len(row) == count


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    for make in [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero")]:
        for number, name in enumerate(["a.jsonl", "a.parquet"]):
            here = tmp_path / f"{make}-{number}"
            here.mkdir()
            make(here / name)
            with pytest.raises(ConfigError, match=name):
                rows(here / name)


def repeat_text(text: str, count: int, *, nested: bool) -> pyarrow.Table:
    """A column that stores its one text once, whatever the number of rows."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))
    if nested:
        struct = pyarrow.StructArray.from_arrays([column], ["content"])
        column = pyarrow.ListArray.from_arrays(pyarrow.array(list(range(count + 1)), pyarrow.int32()), struct)
    return pyarrow.table({"prompt": column})


def test_parquet_beyond_the_bounds(tmp_path: Path) -> None:
    for nested in [False, True]:
        for number, (text, count, message) in enumerate(
            [
                ("x" * 2000, 1, "more than data.max_row_bytes=1000 bytes"),
                ("x" * 900, 40, "more than data.max_bytes=20000 bytes"),
                ("x", 3_000_000, "more than 50 rows, one per 4096 bytes of data.max_bytes"),
            ]
        ):
            here = tmp_path / f"{nested}-{number}"
            here.mkdir()
            parquet.write_table(repeat_text(text, count, nested=nested), here / "a.parquet")
            assert (here / "a.parquet").stat().st_size < 50_000
            with pytest.raises(ConfigError) as caught:
                rows(here / "a.parquet")
            assert message in str(caught.value)


def test_a_long_cell_among_short_ones_is_named(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"prompt": ["y", "x" * 2000, *"z" * 20]}), tmp_path / "a.parquet")
    with expect_error(ConfigError, field=("row 1", "column 'prompt'", "data.max_row_bytes"), value=1000):
        rows(tmp_path / "a.parquet")


MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def test_types_of_columns(tmp_path: Path) -> None:
    for number, (values, expected) in enumerate(
        [
            (pyarrow.array([1], pyarrow.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
            (pyarrow.array([MOMENT], pyarrow.timestamp("us", "UTC")), "2026-01-02 03:04:05.000000Z"),
            (pyarrow.array([date(2026, 1, 2)]), "2026-01-02"),
            (pyarrow.array([Decimal("1.50")]), "1.50"),
            (pyarrow.array([timedelta(seconds=2)], pyarrow.duration("ns")), 2_000_000_000),
            (pyarrow.array([{"when": date(2026, 1, 2), "n": 1}]), {"when": "2026-01-02", "n": 1}),
            (pyarrow.array([[date(2026, 1, 2)]]), ["2026-01-02"]),
            (pyarrow.array([None]), None),
            (pyarrow.array(["a"]).dictionary_encode(), "a"),
            (pyarrow.array([[1, 2]], pyarrow.list_(pyarrow.int8(), 2)), [1, 2]),
            (pyarrow.array([True]), True),
            (pyarrow.array([2.5], pyarrow.float16()), 2.5),
        ]
    ):
        here = tmp_path / str(number)
        here.mkdir()
        parquet.write_table(pyarrow.table({"prompt": ["x"], "odd": values}), here / "a.parquet")
        (row,) = rows(here / "a.parquet")
        assert row == {"prompt": "x", "odd": expected}
        json.dumps(row)


def test_types_that_json_does_not_have_are_refused_where_they_are_used(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": [b"\xff"], "extra_info": [{"image": b"\xff"}]})
    parquet.write_table(table, tmp_path / "a.parquet")
    (row,) = rows(tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a prompt is a string or a list of .*, found bytes"):
        checked_prompt(row["prompt"], "here")
    with expect_error(ConfigError, field=("here", "column 'extra_info'"), value="bytes"):
        mapping(row, "extra_info", "here")


def test_parquet_that_is_cut(tmp_path: Path) -> None:
    for number, cut in enumerate([0, 4, 40, 150, -1, -9]):
        here = tmp_path / str(number)
        here.mkdir()
        parquet.write_table(pyarrow.table({"prompt": ["x"] * 5}), here / "a.parquet")
        (here / "a.parquet").write_bytes((here / "a.parquet").read_bytes()[:cut])
        with pytest.raises(ConfigError, match=r"a\.parquet"):
            rows(here / "a.parquet")
