"""Atomic file writes, JSON that every reader accepts, and digests that identify contents (not cryptographic protection)."""

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

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})  # errors for a full disk and a used-up quota
MAX_LINE_BYTES = 16 * 2**20  # per record that is read back
_BLOCK_BYTES = 1 << 16
LONE_SURROGATES = re.compile("[\ud800-\udfff]")
DIGEST_BYTES = 8
READ_BYTES = 1 << 20
SKETCH_BLOCKS = 256
SKETCH_BLOCK_BYTES = 4096


# A disk with fewer free bytes counts as full, because a log, a rollout file or a pipe buffer no longer fits.
ROOM_BYTES = 1 << 16


class FullDiskError(OSError):
    """A file does not fit on its disk. The message contains its path, its size and the free bytes."""


def free_bytes(directory: Path) -> int | None:
    """Return the free bytes of a directory's file system, or None if it does not report them. Quotas are not considered."""
    try:
        usage = os.statvfs(directory)
    except OSError:
        return None
    return usage.f_bavail * usage.f_frsize if usage.f_blocks else None


@contextmanager
def full_disk_named(path: Path, num_bytes: int | None = None) -> Iterator[None]:
    """Add the path and size of a file, and the free bytes, to the error of a full disk.

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
    """Return the full disks that contain ``places``, as the end of a message; "" if no disk is full.

    Library errors on a full disk often do not mention it, and the written file is often gone.
    """
    full: dict[int, str] = {}
    for place in places:
        with suppress(OSError):
            free, disk = free_bytes(Path(place)), os.stat(place).st_dev
            if free is not None and free < ROOM_BYTES:
                full.setdefault(disk, f"the disk of {place} is full ({free:,} bytes are free)")
    return "".join(f"; {each}" for each in full.values())


def write_atomically(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace ``path`` by ``content`` atomically. A reader, or a crash at any time, sees either the old or the new file.

    ``mode`` sets the permissions; None: as the umask allows.

    Raises:
        FullDiskError: the file does not fit.
        ConfigError: a device, a pipe or a socket has this name.
    """
    if os.path.lexists(path) and stat.S_IFMT(path.lstat().st_mode) not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
        raise ConfigError(f"{path} is not a regular file, but the run must write one here; move it away")
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
    """Encode one line of strict JSON in UTF-8, including the newline.

    NaN and infinities become null, because JSON has no such values and readers in other languages reject Python's. Lone
    surrogates become U+FFFD. Tensors and numpy scalars become numbers. Other values become their ``str``.
    """
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def pretty_json(content: Mapping[str, Any]) -> bytes:
    """Encode the same content as ``json_line``, indented for people."""
    return json.dumps(json.loads(json_line(content)), indent=2, ensure_ascii=False).encode("utf-8") + b"\n"


def cut_unfinished_line(file: int, name: Path) -> None:
    """Truncate an open file of JSON lines after its last newline. A crash has cut off the text after it.

    Raises:
        ConfigError: the text after the last newline is longer than a line may be.
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
    """Keep the lines of a metrics.jsonl up to and including ``last_step``. Drop lines that are not valid records."""
    return b"".join(line for line in lines.splitlines(keepends=True) if _is_until(line, last_step))


def read_lines(path: Path, remedy: str, *, is_growing: bool = False) -> Iterator[Fields]:
    """Yield the objects of a file of JSON lines, with one line in memory at a time. ``remedy`` ends the error messages.

    ``is_growing``: the last line may be incomplete, because it is being written or a crash has cut it off. It is then skipped.

    Raises:
        ConfigError: the path is not a regular file, or a line is too long or not an object of plain values. The message names
        the line.
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
    """Return the digest of a JSON-serialisable value."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def digest_of_file(file: Path) -> str:
    """Return the digest of all bytes of a file."""
    state = blake2b(digest_size=DIGEST_BYTES)
    with file.expanduser().open("rb") as content:
        while block := content.read(READ_BYTES):
            state.update(block)
    return state.hexdigest()


def sketch_of_file(file: Path) -> str:
    """Return a digest of a weight file's size and evenly spaced blocks. Training changes all tensors, so a megabyte is enough."""
    size = file.stat().st_size
    state = blake2b(str(size).encode(), digest_size=DIGEST_BYTES)
    with file.open("rb") as content:
        last = max(size - SKETCH_BLOCK_BYTES, 0)
        for block in range(SKETCH_BLOCKS + 1):
            content.seek(last * block // SKETCH_BLOCKS)
            state.update(content.read(SKETCH_BLOCK_BYTES))
    return state.hexdigest()
