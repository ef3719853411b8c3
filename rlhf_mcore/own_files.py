"""Create files and directories under fixed names without following existing links.

If such a name were a link, this program would truncate or overwrite a file at another place.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError


def shown_path(path: str | Path) -> str:
    """Return a path for messages: relative to the working directory, or unchanged if that directory was removed."""
    try:
        return os.path.relpath(path)
    except OSError:
        return os.fspath(path)


def check_output(option: str, path: Path) -> None:
    """Check a user's output path. Writing replaces the file, which would destroy a link or a device such as ``/dev/stdout``.

    Raises:
        ConfigError: the path exists and is not a regular file, or its directory is not writable.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigError(f"{option} {path} is not a regular file, so it is not replaced; give another path")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise ConfigError(
            f"{option} {path}: {path.parent} is not a writable directory; give a path in another directory"
        )


def own_directory(path: Path) -> Path:
    """Create a directory, unless it exists, and return it. Its parents may be links, but not the directory itself.

    Raises:
        ConfigError: the name exists and is a link, or not a directory.
        OSError: the directory cannot be created.
    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileExistsError):
            os.mkdir(path.name, dir_fd=parent)
        os.close(os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            refuse_link(path)
            raise ConfigError(f"{path} is not a directory, but a directory is needed here; move it away") from error
        raise
    finally:
        os.close(parent)
    return path


def open_own(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a regular file with ``os.open`` without following links. Returns the file descriptor.

    Raises:
        ConfigError: the name is a link, or not a regular file.
        OSError: the file cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(f"{path} is not a regular file, but a file is written here; move it away")
    return file


def refuse_link(path: Path) -> None:
    """Reject a link.

    Raises:
        ConfigError: ``path`` is a link; the message names its target.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link to {path.readlink()}, and links are not followed here; remove the link, or mount its target instead"
        )
