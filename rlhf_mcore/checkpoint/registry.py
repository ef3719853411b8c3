"""Register a run's objects with state, so that saving forgets no object and loading ignores no saved state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from rlhf_mcore.config.errors import ConfigError

_REMEDY = "It was written by another version or another configuration of the trainer; start a new experiment instead"


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Every key must be read by ``state[key]``."""
        ...


class Registry:
    """Objects with state by name. Each name is registered once."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._added_later: set[str] = set()

    def register(self, name: str, holder: Stateful, *, added_later: bool = False) -> None:
        """Save and load the state of ``holder`` under ``name``.

        ``added_later``: earlier releases' checkpoints lack it.
        """
        assert name not in self._objects, f"{name} is registered already"
        self._objects[name] = holder
        if added_later:
            self._added_later.add(name)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of all objects by name."""
        return {name: holder.state_dict() for name, holder in self._objects.items()}

    def load_state_dict(self, states: Mapping[str, Any], source: str = "the saved state") -> None:
        """Restore the state of every object.

        Raises:
            ConfigError: a registered name has no state, a state has no registered name, or an object did not read
                all keys of its state or read a missing key. The message lists the names. ``source`` names the
                origin of the states.
        """
        if unknown := sorted(states.keys() - self._objects.keys()):
            raise ConfigError(f"{source} holds the state of {unknown}, which this run does not have. {_REMEDY}")
        if missing := sorted(self._objects.keys() - states.keys() - self._added_later):
            raise ConfigError(f"{source} does not hold the state of {missing}. {_REMEDY}")
        for name, holder in self._objects.items():
            if name not in states:
                continue
            if not isinstance(states[name], Mapping):
                raise ConfigError(f"{source}: the state of {name!r} is not a mapping. {_REMEDY}")
            watched = _Watched(states[name])
            try:
                holder.load_state_dict(watched)
            except _Absent as error:
                raise ConfigError(f"{source}: the state of {name!r} has no {error.args[0]!r}. {_REMEDY}") from error
            if watched.unread:
                raise ConfigError(
                    f"{source}: the keys {sorted(watched.unread)} in the state of {name!r} are unknown. {_REMEDY}"
                )


class _Absent(KeyError):
    """A key is missing in a state."""


class _Watched(Mapping[str, Any]):
    """A mapping that records its unread keys."""

    def __init__(self, content: Mapping[str, Any]):
        self._content = content
        self.unread = set(content)

    def __getitem__(self, key: str) -> Any:
        if key not in self._content:
            raise _Absent(key)
        self.unread.discard(key)
        return self._content[key]

    def __contains__(self, key: object) -> bool:
        return key in self._content

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)
