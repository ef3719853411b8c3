"""Read files from outside: kinds of files, sizes, and limits of JSON documents."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import Fields, MissingFile, ReadLimits, parse_json, read_bytes, read_json, read_text

TINY = ReadLimits(num_bytes=1000, num_values=50, depth=4)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # a socket's path has at most 108 bytes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "a directory, not a regular file"),
        (os.mkfifo, "a FIFO, not a regular file"),
        (_socket, "a socket, not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "a device, not a regular file"),
        (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
        (lambda path: path.write_bytes(b"x" * 11), "11 bytes, but at most 10 are read"),
        (
            lambda path: (path.touch(), os.truncate(path, 2**40)),
            "1,099,511,627,776 bytes, but at most 10",
        ),
        (lambda path: path.symlink_to("/proc/self/status"), "more than 10 bytes"),  # its reported size is 0
    ],
)
def test_only_regular_files_within_a_bound_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with pytest.raises(ConfigError) as caught:
        read_bytes(tmp_path / "file", limit=10, remedy="take another")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: ")
    assert str(caught.value).endswith("; take another")


def test_a_file_of_the_largest_size_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_bytes(tmp_path / "file", limit=10) == b"0123456789"
    assert read_text(tmp_path / "file", limit=10) == "0123456789"


def test_an_absent_file_has_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="no such file"):
        read_bytes(tmp_path / "gone", limit=10)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_paths_that_no_file_can_have(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_bytes(name, limit=10)


def test_documents_that_are_refused() -> None:
    for data, message in [
        (b"", "not valid JSON"),
        (b"[]", "is not a JSON object"),
        (b"\xff{}", "not UTF-8 at byte 0"),
        (b'{"a": "\xc3"}', "not UTF-8 at byte 7"),
        ("{}".encode("utf-16"), "a NUL at byte"),
        (b'{"a":\0 1}', "a NUL at byte 5"),
        (b'{"a": "b\\u0000"}', "a holds a NUL"),
        (b'{"a": ["\\ud834x"]}', "a[0] holds a NUL or a lone surrogate"),
        (b'{"\\udc00": 1}', "holds a NUL or a lone surrogate"),
        (b'{"a": NaN}', "a is nan, not a finite number"),
        (b'{"a": {"b": [0, -Infinity]}}', "a.b[1] is -inf"),
        (b'{"a": 1e999}', "a is inf"),
        (b'{"a": ' + b"9" * 100 + b"}", "a is an integer of 333 bits"),
        (b'{"a": ' + b"9" * 900 + b"}", "a is an integer of 2990 bits"),
        (b'{"a": 1, "b": 2, "a": 3}', "key 'a' appears twice"),
        (b'{"a": [[[[]]]]}', "nested deeper than 4"),
        (b'{"a": [' + b"0," * 60 + b"0]}", "more than 50 values"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "1,009 bytes, but at most 1,000"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parse_json(data, limits=TINY, where="x.json", remedy="make it again")
        assert message in str(caught.value)
        assert str(caught.value).startswith("x.json: ")
        assert str(caught.value).endswith("; make it again")


def test_depth_beyond_the_parser(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"[" * 1_000_000)
    with pytest.raises(ConfigError, match="nested deeper than"):
        read_json(tmp_path / "x.json", limits=ReadLimits(num_values=2_000_000))


def test_integers_of_thousands_of_digits_are_refused() -> None:
    with pytest.raises(ConfigError, match="Exceeds the limit"):
        parse_json(b'{"a": ' + b"9" * 5000 + b"}", where="x.json", remedy="")


def test_a_document_at_its_limits_is_read() -> None:
    content = {"a": [[["é"]]], "b": {"c": {"d": [1.5, -2, True, None]}}, "\N{SNOWMAN}": 2**63}
    assert parse_json(json.dumps(content).encode(), limits=TINY, where="x", remedy="").content == content


FIELDS = Fields(
    {"n": 3, "x": 0.5, "t": "mean", "f": True, "l": ["a"], "i": [1, 2], "o": {"n": "3"}, "z": None, "big": "y" * 9999},
    "x.json",
    "export it again",
)


def test_typed_access() -> None:
    assert (FIELDS.integer("n", 1, 3), FIELDS.number("x", 0, 1), FIELDS.text("t", ("mean",)), FIELDS.flag("f")) == (
        3,
        0.5,
        "mean",
        True,
    )
    assert (FIELDS.texts("l"), FIELDS.integers("i", 1, 2), FIELDS.items("l"), FIELDS.number("n")) == (
        ["a"],
        [1, 2],
        ["a"],
        3,
    )
    assert (FIELDS.object("o").text("n"), FIELDS.integer("z", default=7), FIELDS.object("none", default=None)) == (
        "3",
        7,
        None,
    )
    assert ("n" in FIELDS, "z" in FIELDS, "none" in FIELDS) == (True, False, False)


def test_fields_of_another_type() -> None:
    for read, message in [
        (lambda f: f.integer("n", 4, 9), "x.json has n=3, not an integer from 4 to 9; export it again"),
        (lambda f: f.integer("x"), "x.json has x=0.5, not an integer of at least 0"),
        (lambda f: f.integer("f"), "has f=True, not an integer"),
        (lambda f: f.integer("t"), "has t='mean', not an integer"),
        (lambda f: f.integer("z"), "has no z, which is an integer"),
        (lambda f: f.number("x", 1, 2), "has x=0.5, not a number from 1 to 2"),
        (lambda f: f.number("f"), "has f=True, not a number"),
        (lambda f: f.number("l"), "has l=['a'], not a number"),
        (lambda f: f.text("n"), "has n=3, not a text"),
        (lambda f: f.text("t", ("sum", "max")), "has t='mean', not one of sum, max"),
        (lambda f: f.flag("n"), "has n=3, not true or false"),
        (lambda f: f.texts("i"), "has i=[1, 2], not a list of texts"),
        (lambda f: f.texts("t"), "has t='mean', not a list of texts"),
        (lambda f: f.integers("l"), "has l=['a'], not a list of integers"),
        (lambda f: f.integers("i", 2, 3), "has i=[1, 2], not a list of integers from 2 to 3"),
        (lambda f: f.items("o"), "has o={'n': '3'}, not a list"),
        (lambda f: f.object("l"), "has l=['a'], not an object"),
        (lambda f: f.object("o").integer("n"), "has o.n='3', not an integer"),
        (lambda f: f.object("gone"), "has no gone, which is an object"),
    ]:
        with pytest.raises(ConfigError) as caught:
            read(FIELDS)
        assert message in str(caught.value)


def test_a_message_holds_only_the_beginning_of_a_long_value() -> None:
    with pytest.raises(ConfigError) as caught:
        FIELDS.integer("big")
    assert len(str(caught.value)) < 300
