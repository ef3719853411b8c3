"""Environments of the package gymnasium, whose observations and actions are, or can be written as, text."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rlhf_mcore.config.errors import ConfigError

KEY = "environment.options"


class Gymnasium:
    """An environment as gymnasium.make knows it.

    Args:
        id: its name; importing ``module`` may register it.
        actions: names of the actions 0, 1, ...; a turn's first word is looked up among them. None: the text itself is the action.
        unknown: what is said to a turn that names none of them; the environment does not notice it.
        arguments: of gymnasium.make.

    Raises:
        ConfigError: gymnasium is not installed, or does not make the environment.
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
        """Return the first observation. ``options`` of the environment's reset is the row."""
        observation, _ = self._environment.reset(seed=seed % 2**31, options=dict(row))
        return str(observation)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Give the environment a turn, and return its answer."""
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
