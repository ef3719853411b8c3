"""The only reader of files from others: configs, indexes, manifests, and other files that may be damaged or hostile.

``read_bytes`` opens only regular files, and checks the size before it allocates memory. ``read_json`` limits size, number of values
and depth. It rejects values that no valid file contains: NaN, infinities, integers of hundreds of digits, duplicate keys, and NUL or
lone surrogates in texts (which break paths, terminals and UTF-8 later). ``Fields`` gives typed access; each error names file, key,
value and remedy. This module raises only ``ConfigError``.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from rlhf_mcore.config.errors import ConfigError

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_BLOCK_BYTES = 2**20
MAX_INTEGER = 2**63 - 1  # no size, count, seed or offset is larger
_MAX_BITS = 128  # limit for any integer; transformers writes 1e30 as an integer for an unlimited length
_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxstring, _SHOWN.maxother = 2, 80, 80

T = TypeVar("T")


_REQUIRED: Any = object()  # marks a field without a default, which must exist


class MissingFile(ConfigError):
    """A file does not exist. This is a separate type, because some files may be missing, but no file may be malformed."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits of a JSON document. The defaults are for a model's small files: ten times the largest published file."""

    num_bytes: int = 16 * 2**20
    num_values: int = 500_000
    depth: int = 32


SMALL = ReadLimits()
# For indexes of weights and states, headers and manifests, which contain an entry for every tensor or file and every rank.
INDEX = ReadLimits(num_bytes=128 * 2**20, num_values=4_000_000)


def open_file(path: str | Path, *, where: str = "", remedy: str = "correct the path") -> BinaryIO:
    """Open a regular file for reading. Never waits for a writer, and never opens a device.

    ``where`` names the file in messages (default: its path). Messages end with ``remedy``.

    Raises:
        MissingFile: there is no such file.
        ConfigError: it is not a regular file, or cannot be opened.
    """
    where = where or str(path)
    try:
        _check_kind(os.stat(path).st_mode, where, remedy)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check_kind(os.fstat(handle).st_mode, where, remedy)  # the file may have been replaced in the meantime
            return os.fdopen(handle, "rb", buffering=0)
        except BaseException:
            os.close(handle)
            raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise MissingFile(f"{where}: no such file (looked from {_here()}); {remedy}") from error
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path
        raise _wrap(error, where, remedy) from error


def read_bytes(path: str | Path, *, limit: int, where: str = "", remedy: str = "correct the path") -> bytes:
    """Read a regular file of at most ``limit`` bytes. The size is checked before memory is allocated.

    Raises:
        MissingFile, ConfigError: as in ``open_file``, or the file is larger.
    """
    where = where or str(path)
    with open_file(path, where=where, remedy=remedy) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            if size > limit:
                raise ConfigError(f"{where}: {size:,} bytes, but at most {limit:,} are read of such a file; {remedy}")
            parts, total = [], 0
            while part := file.read(min(_BLOCK_BYTES, limit + 1 - total)):
                parts.append(part)
                total += len(part)
        except OSError as error:
            raise _wrap(error, where, remedy) from error
    if total > limit:  # files below /proc have no size
        raise ConfigError(f"{where}: more than {limit:,} bytes, the most that is read of such a file; {remedy}")
    return b"".join(parts)


def read_text(path: str | Path, *, limit: int, where: str = "", remedy: str = "correct the path") -> str:
    """Read a file with ``read_bytes``, and decode it as UTF-8.

    Raises:
        MissingFile, ConfigError: as in ``read_bytes``, or the file contains NUL or invalid UTF-8.
    """
    data = read_bytes(path, limit=limit, where=where, remedy=remedy)
    return _decode(data, where or str(path), remedy)


def read_json(
    path: str | Path,
    *,
    limits: ReadLimits = SMALL,
    where: str = "",
    remedy: str = "download or export it again",
) -> Fields:
    """Read a JSON file that contains an object.

    Raises:
        MissingFile: there is no such file.
        ConfigError: the file cannot be read, exceeds ``limits``, or is not an object of plain JSON values.
    """
    data = read_bytes(path, limit=limits.num_bytes, where=where, remedy=remedy)
    return parse_json(data, limits=limits, where=where or str(path), remedy=remedy)


def parse_json(data: bytes, *, limits: ReadLimits = SMALL, where: str, remedy: str) -> Fields:
    """Parse the bytes of a JSON file that contains an object.

    Raises:
        ConfigError: as in ``read_json``.
    """
    if len(data) > limits.num_bytes:
        raise ConfigError(f"{where}: {len(data):,} bytes, but at most {limits.num_bytes:,} are read; {remedy}")
    values = data.count(b",") + data.count(b"[") + data.count(b"{")  # an upper bound
    if values > limits.num_values:
        raise ConfigError(f"{where}: more than {limits.num_values:,} values, the most that are read; {remedy}")
    text = _decode(data, where, remedy)
    try:
        content = json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ConfigError(f"{where}: nested deeper than {limits.depth}; {remedy}") from error
    except ValueError as error:
        raise ConfigError(
            f"{where}: cannot be read, not valid JSON ({_first_line(error).partition(';')[0]}); {remedy}"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: is not a JSON object; {remedy}")
    try:
        _check_values(content, [], limits.depth)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; {remedy}") from None
    return Fields(content, where, remedy)


class Fields:
    """A JSON object with typed access. A null counts as missing.

    Every method raises ``ConfigError`` if the value has another type or range, or if it is missing and has no default.
    """

    __slots__ = ("_inside", "content", "remedy", "where")

    def __init__(self, content: Mapping[str, Any], where: str, remedy: str, inside: str = "") -> None:
        self.content, self.where, self.remedy, self._inside = content, where, remedy, inside

    def __contains__(self, key: str) -> bool:
        return self.content.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)

    def integer(self, key: str, minimum: int = 0, maximum: int = MAX_INTEGER, default: T = _REQUIRED) -> int | T:
        """Return an integer from ``minimum`` to ``maximum``."""
        expected = f"an integer {_span(minimum, maximum)}"
        return self._take(key, expected, lambda value: _is_integer(value, minimum, maximum), default)

    def number(
        self, key: str, minimum: float = -math.inf, maximum: float = math.inf, default: T = _REQUIRED
    ) -> float | T:
        """Return a number from ``minimum`` to ``maximum``."""
        bounds = "" if math.isinf(minimum) and math.isinf(maximum) else f" from {minimum:g} to {maximum:g}"

        def is_number(value: object) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum

        return self._take(key, f"a number{bounds}", is_number, default)

    def text(self, key: str, choices: Collection[str] = (), default: T = _REQUIRED) -> str | T:
        """Return a text, one of ``choices`` if they are given."""
        expected = f"one of {', '.join(choices)}" if choices else "a text"
        return self._take(
            key, expected, lambda value: isinstance(value, str) and (not choices or value in choices), default
        )

    def flag(self, key: str, default: T = _REQUIRED) -> bool | T:
        """Return true or false."""
        return self._take(key, "true or false", lambda value: isinstance(value, bool), default)

    def texts(self, key: str, default: T = _REQUIRED) -> list[str] | T:
        """Return a list of texts."""
        return self._take(
            key, "a list of texts", lambda value: _is_list(value, lambda item: isinstance(item, str)), default
        )

    def table(self, key: str) -> dict[str, str]:
        """Return an object whose values are texts."""
        fields = self.object(key)
        return {name: fields.text(name) for name in fields}

    def integers(self, key: str, minimum: int = 0, maximum: int = MAX_INTEGER, default: T = _REQUIRED) -> list[int] | T:
        """Return a list of integers from ``minimum`` to ``maximum``."""
        expected = f"a list of integers {_span(minimum, maximum)}"
        return self._take(
            key, expected, lambda value: _is_list(value, lambda item: _is_integer(item, minimum, maximum)), default
        )

    def items(self, key: str, default: T = _REQUIRED) -> list[Any] | T:
        """Return a list of any values."""
        return self._take(key, "a list", lambda value: isinstance(value, list), default)

    def objects(self, key: str) -> list[Fields]:
        """Return a list of objects, each with typed access to its own fields."""
        items = self._take(
            key, "a list of objects", lambda value: _is_list(value, lambda item: isinstance(item, dict)), _REQUIRED
        )
        return [
            Fields(item, self.where, self.remedy, f"{self._inside}{key}[{number}].")
            for number, item in enumerate(items)
        ]

    def object(self, key: str, default: T = _REQUIRED) -> Fields | T:
        """Return an object, with typed access to its own fields."""
        table = self._take(key, "an object", lambda value: isinstance(value, dict), default)
        return Fields(table, self.where, self.remedy, f"{self._inside}{key}.") if isinstance(table, dict) else table

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Return the error for a field that is not ``expected``."""
        value = self.content.get(key)
        name = shorten(f"{self._inside}{key}", 200)
        if value is None:
            return ConfigError(f"{self.where} has no {name}, which is {expected}; {self.remedy}")
        return ConfigError(f"{self.where} has {name}={_SHOWN.repr(value)}, not {expected}; {self.remedy}")

    def _take(self, key: str, expected: str, fits: Callable[[Any], bool], default: Any) -> Any:
        value = self.content.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if value is None or not fits(value):
            raise self.wrong(key, expected)
        return value


def shorten(value: object, length: int = 80) -> str:
    """Shorten a foreign value for a message: one line without control characters, at most ``length`` characters."""
    text = value if isinstance(value, str) else _SHOWN.repr(value)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: length + 1])
    return text if len(text) <= length else f"{text[: length - 3]}..."


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects of a JSON value are nested deeper than ``depth``, without recursion."""
    level = [value]
    for _ in range(depth + 1):
        inside = [item for item in level if isinstance(item, dict | list)]
        if not inside:
            return False
        level = [child for item in inside for child in (item.values() if isinstance(item, dict) else item)]
    return True


def is_plain(text: str) -> bool:
    """Return whether a text contains no NUL and no lone surrogate, so that it can be printed, stored and used in a path."""
    if "\0" in text:
        return False
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _is_integer(value: object, minimum: int, maximum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _span(minimum: int, maximum: int) -> str:
    return f"from {minimum} to {maximum}" if maximum < MAX_INTEGER else f"of at least {minimum}"


def _check_kind(mode: int, where: str, remedy: str) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise ConfigError(f"{where}: {kind}, not a regular file; {remedy}")


def _decode(data: bytes, where: str, remedy: str) -> str:
    if b"\0" in data:
        raise ConfigError(f"{where}: cannot be read, it has a NUL at byte {data.index(0)}; {remedy}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: cannot be read, not UTF-8 at byte {error.start}; {remedy}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    known = dict(pairs)
    if len(known) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {shorten(key)!r} appears twice")
            seen.add(key)
    return known


def _check_values(value: dict[str, Any] | list[Any], path: list[str | int], depth: int) -> None:
    """Raise ValueError, which names the key, if a value is not plain or is nested deeper than ``depth``."""
    if len(path) >= depth:
        raise ValueError(f"nested deeper than {depth}")
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        path.append(key)
        if isinstance(child, dict | list):
            _check_values(child, path, depth)
        elif isinstance(child, float) and not math.isfinite(child):
            raise ValueError(f"{_place(path)} is {child}, not a finite number")
        elif isinstance(child, int) and abs(child) >= 2**_MAX_BITS:
            raise ValueError(f"{_place(path)} is an integer of {child.bit_length()} bits, beyond {_MAX_BITS}")
        if not all(is_plain(text) for text in (key, child) if isinstance(text, str)):
            raise ValueError(f"{_place(path)} holds a NUL or a lone surrogate")
        path.pop()


def _place(path: Sequence[str | int]) -> str:
    """Return the path of a value, such as ``a.b[3]``."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{key}" for key in path]
    return shorten("".join(parts).removeprefix("."), 200)


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a directory that is gone"


def _wrap(error: OSError | ValueError, where: str, remedy: str) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    reason = error.strerror if isinstance(error, OSError) and error.strerror else _first_line(error)
    return ConfigError(f"{shorten(where, 4096)}: cannot be read ({reason}); {remedy}")


def _first_line(error: Exception) -> str:
    return shorten((str(error) or type(error).__name__).splitlines()[0], 200)
