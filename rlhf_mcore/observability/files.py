"""Files that are whole or not there, JSON that every reader accepts, and digests: they tell contents apart and protect nothing."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.foreign import Fields, open_file, parse_json
from rlhf_mcore.own_files import open_own

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # of a disk, of a quota
MAX_LINE_BYTES = 16 * 2**20  # of a record that is read back
_BLOCK_BYTES = 1 << 16
LONE_SURROGATES = re.compile("[\ud800-\udfff]")
DIGEST_BYTES = 8
READ_BYTES = 1 << 20
SKETCH_BLOCKS = 256
SKETCH_BLOCK_BYTES = 4096


ROOM_BYTES = 1 << 16  # a disk with less is full: a log, a rollout file or a pipe's buffer no longer fits


class FullDiskError(OSError):
    """A file does not fit: its path, what it needs and what is free."""


def free_bytes(directory: Path) -> int | None:
    """Return how many bytes may still be written below a directory; None where nobody tells. Quotas are not known here."""
    try:
        usage = os.statvfs(directory)
    except OSError:
        return None
    return usage.f_bavail * usage.f_frsize if usage.f_blocks else None


@contextmanager
def full_disk_named(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Let the error of a full disk tell which file was to be written, of how many bytes, and how many are free.

    Raises:
        FullDiskError: instead of the system's error.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        needed = f"{path} needs {num_bytes:,} bytes" if num_bytes is not None else f"{path} cannot be written"
        free = free_bytes(path.parent)
        room = f", {free:,} bytes are free" if free is not None else ""
        raise FullDiskError(error.errno, f"{os.strerror(error.errno or 0)}: {needed}{room}") from error


def full_disks(places: Iterable[str | Path]) -> str:
    """Name the places whose disks are full, one of each disk, as the end of a message; "" where all have room.

    What a library raises on a full disk rarely says so, and what it was writing is often gone.
    """
    full: dict[int, str] = {}
    for place in places:
        with suppress(OSError):
            free, disk = free_bytes(Path(place)), os.stat(place).st_dev
            if free is not None and free < ROOM_BYTES:
                full.setdefault(disk, f"the disk of {place} is full ({free:,} bytes are free)")
    return "".join(f"; {each}" for each in full.values())


def write_atomically(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace ``path`` by ``content``. A reader, or a crash at any instant, meets the old file or the new one.

    ``mode``: who may read it, None: what the umask leaves.

    Raises:
        FullDiskError: it does not fit.
        ConfigError: there is a device, a pipe or a socket of that name.
    """
    if os.path.lexists(path) and stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
        raise ConfigError(f"{path} is no regular file, and one is written here; move it away")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with full_disk_named(path, len(content)), os.fdopen(open_own(temporary, flags, 0o666), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def json_line(record: Mapping[str, Any]) -> bytes:
    """Write one line of strict JSON in UTF-8, newline included.

    NaN and infinities become null, since JSON has no name for them and readers of other languages refuse Python's. Lone
    surrogates become U+FFFD. Tensors and numpy scalars become numbers, what JSON does not know becomes its ``str``.
    """
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def pretty_json(content: Mapping[str, Any]) -> bytes:
    """Write what ``json_line`` writes for people: indented."""
    return json.dumps(json.loads(json_line(content)), indent=2, ensure_ascii=False).encode("utf-8") + b"\n"


def cut_unfinished_line(file: int, name: Path) -> None:
    """Cut an open file of JSON lines after its last newline: what is behind it, a crash has cut short.

    Raises:
        ConfigError: there are more bytes behind it than a line has.
    """
    size = end = os.fstat(file).st_size
    while end > 0:
        start = max(end - _BLOCK_BYTES, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        end = start + newline + 1 if newline >= 0 else start
        if newline >= 0:
            break
        if size - end > MAX_LINE_BYTES:
            raise ConfigError(f"{name}: its last line has more than {MAX_LINE_BYTES:,} bytes; move the file away")
    os.ftruncate(file, end)


def keep_steps(lines: bytes, last_step: int) -> bytes:
    """Keep the lines of a metrics.jsonl up to and including those of ``last_step``. What is no record is dropped."""
    return b"".join(line for line in lines.splitlines(keepends=True) if _is_until(line, last_step))


def read_lines(path: Path, remedy: str, *, is_growing: bool = False) -> Iterator[Fields]:
    """Yield the objects of a file of JSON lines, one line in memory at a time. ``remedy`` closes the messages.

    ``is_growing``: the last line may be one that is being written, or that a crash has cut short; it is left out then.

    Raises:
        ConfigError: it is not a regular file, or a line, which is named, is too long or no object of plain values.
    """
    with io.BufferedReader(open_file(path, remedy=remedy)) as file:  # type: ignore[type-var]
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ConfigError(f"{place}: more than {MAX_LINE_BYTES:,} bytes; {remedy}")
            try:
                record = parse_json(line, where=place, remedy=remedy)
            except ConfigError:
                if is_growing and not line.endswith(b"\n"):
                    return
                raise
            yield record


def _is_until(line: bytes, last_step: int) -> bool:
    try:
        return line.endswith(b"\n") and parse_json(line, where="", remedy="").integer("step") <= last_step
    except ConfigError:
        return False


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return LONE_SURROGATES.sub("�", value)
    if isinstance(value, Mapping):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and numpy values of any shape
        return _plain(value.tolist())
    return _plain(str(value))


def digest_of_json(content: Any) -> str:
    """Hash a JSON-able value."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def digest_of_file(file: Path) -> str:
    """Hash all bytes of a file."""
    state = blake2b(digest_size=DIGEST_BYTES)
    with file.expanduser().open("rb") as content:
        while block := content.read(READ_BYTES):
            state.update(block)
    return state.hexdigest()


def sketch_of_file(file: Path) -> str:
    """Hash the size of a file of weights and blocks spread over it: training changes every tensor, so a megabyte is enough."""
    size = file.stat().st_size
    state = blake2b(str(size).encode(), digest_size=DIGEST_BYTES)
    with file.open("rb") as content:
        last = max(size - SKETCH_BLOCK_BYTES, 0)
        for block in range(SKETCH_BLOCKS + 1):
            content.seek(last * block // SKETCH_BLOCKS)
            state.update(content.read(SKETCH_BLOCK_BYTES))
    return state.hexdigest()
