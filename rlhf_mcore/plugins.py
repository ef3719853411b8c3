"""Find and load plug-ins, which installed packages register under the entry points ``rlhf_mcore.<kind>``.

``contrib/`` contains our own plug-ins (import name ``rlhf_mcore_contrib``). ``setup.py`` registers them in the same way as a user's
package would. A plug-in is imported only if a run or a command names it. The core imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from rlhf_mcore.config.errors import ConfigError

F = TypeVar("F")


def find_plugins(kind: str) -> Mapping[str, EntryPoint]:
    """Return the plug-ins of the group ``rlhf_mcore.<kind>`` by name. Nothing is imported."""
    return _read_group(entry_points, kind)


@cache
def _read_group(read: Callable[..., Iterable[EntryPoint]], kind: str) -> Mapping[str, EntryPoint]:
    """Read a group and cache it, because reading opens files of all installed packages. Tests replace ``read``."""
    return {point.name: point for point in read(group=f"rlhf_mcore.{kind}")}


def missing_plugin(kind: str, name: str, needed_by: str, package: str | None = None) -> str | None:
    """Return a message if no installed package registers a plug-in, else None. The arguments are the same as for ``load_plugin``."""
    if name in find_plugins(kind):
        return None
    folder = (package or name).replace("-", "_")
    return f"{needed_by} needs rlhf_mcore_contrib.{folder}: pip install rlhf_mcore with its contrib folder"


def load_plugin(kind: str, name: str, needed_by: str, package: str | None = None) -> Any:
    """Import a plug-in and return its object.

    Args:
        kind: the group, for example ``trackers``.
        name: the name in this group.
        needed_by: the user's key with its value, or the command, for messages.
        package: the folder of ``contrib`` that registers it; None: its name is the name of the plug-in.

    Raises:
        ConfigError: no installed package registers it, or a package that it imports is missing.
    """
    problem = missing_plugin(kind, name, needed_by, package)
    if problem is not None:
        raise ConfigError(problem)
    point = find_plugins(kind)[name]
    try:
        return point.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(
            f"{needed_by} needs {point.module} and the package {missing}: pip install {missing}"
        ) from error


def registering(table: dict[str, F], declared: Collection[str]) -> Callable[[str], Callable[[F], F]]:
    """Return a decorator that adds objects to ``table``: ``@decorator("name")``."""

    def decorate(name: str) -> Callable[[F], F]:
        assert name in declared, f"{name!r} is not declared in rlhf_mcore/config, so no configuration can choose it"
        assert name not in table, f"{name!r} is registered twice"

        def register(made: F) -> F:
            table[name] = made
            return made

        return register

    return decorate
