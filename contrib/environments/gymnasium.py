"""Environments of the package gymnasium. Observations and actions must be text or convertible to text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rlhf_mcore.config.errors import ConfigError

KEY = "environment.options"


class Gymnasium:
    """An environment that gymnasium.make builds.

    Args:
        id: id of the environment.
        module: a module whose import registers the environment.
        actions: names of the actions 0, 1, ...; the first word of a turn selects an action. None: the text itself is the action.
        unknown: reply to a turn that names no action; the environment is not called.
        arguments: keyword arguments of gymnasium.make.

    Raises:
        ConfigError: gymnasium is not installed or cannot build the environment.
    """

    def __init__(
        self,
        id: str,
        actions: Sequence[str] | None = None,
        module: str | None = None,
        unknown: str = "",
        arguments: dict[str, Any] | None = None,
    ) -> None:
        try:
            if module is not None:
                import_module(module)
            self._environment = import_module("gymnasium").make(id, **(arguments or {}))
        except ImportError as error:
            raise ConfigError(f"environment.function=gymnasium: {error}; install it (pip install gymnasium)") from error
        except Exception as error:
            raise ConfigError(f"{KEY}.id={id}: gymnasium cannot make it ({type(error).__name__}: {error})") from error
        self._actions, self._unknown = actions, unknown or f"choose one of: {', '.join(actions or ())}"

    def reset(self, row: Any, seed: int) -> str:
        """Return the first observation. The environment's reset receives the row as ``options``."""
        observation, _ = self._environment.reset(seed=seed % 2**31, options=dict(row))
        return str(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Send a turn to the environment and return its answer."""
        chosen: Any = action
        if self._actions is not None:
            word = action.split()[0] if action.split() else ""
            if word not in self._actions:
                return self._unknown, 0.0, False
            chosen = self._actions.index(word)
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        return str(observation), float(reward), bool(terminated or truncated)

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()
