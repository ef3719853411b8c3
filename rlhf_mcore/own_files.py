"""Files and directories that this program makes under names of its own: never through a link that is there already.

A link at such a name would have us empty, cut or overwrite what is somewhere else.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from rlhf_mcore.config.errors import ConfigError


def shown_path(path: str | Path) -> str:
    """Return a path as messages show it: relative to the working directory, or as it is where that has been removed."""
    try:
        return os.path.relpath(path)
    except OSError:
        return os.fspath(path)


def check_output(option: str, path: Path) -> None:
    """Before a file that a user has named is made or replaced: a device, such as ``/dev/stdout``, or a link would be gone then.

    Raises:
        ConfigError: it is something else than a regular file, or in no directory that can be written.
    """
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise ConfigError(f"{option} {path} is no regular file, and nothing else is replaced; name a file")
    if not os.access(path.parent, os.W_OK | os.X_OK) or not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: {path.parent} is no directory that can be written; name a file in another")


def own_directory(path: Path) -> Path:
    """Make a directory, unless it is there, and return it. The parent's names may be links, its own may not.

    Raises:
        ConfigError: the name is a link, or no directory.
        OSError: it cannot be made.
    """
    parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileExistsError):
            os.mkdir(path.name, dir_fd=parent)
        os.close(os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent))
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            refuse_link(path)
            raise ConfigError(f"{path} is no directory, and one is made here; move it away") from error
        raise
    finally:
        os.close(parent)
    return path


def open_own(path: Path, flags: int, mode: int = 0o644) -> int:
    """``os.open`` of a file of ours, a regular one that is no link. Returns the file descriptor.

    Raises:
        ConfigError: the name is a link, or no regular file.
        OSError: it cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(f"{path} is no regular file, and one is written here; move it away")
    return file


def refuse_link(path: Path) -> None:
    """Raise if a name of ours is a link.

    Raises:
        ConfigError: naming the link and where it leads.
    """
    if path.is_symlink():
        raise ConfigError(
            f"{path} is a link to {path.readlink()}, and links are not followed here; remove it, or mount what it names"
        )
