"""Environments of OpenEnv servers, through the package openenv-core."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rlhf_mcore.config.errors import ConfigError


class OpenEnv:
    """A session on an OpenEnv server, for one episode.

    Args:
        url: URL of the server.
        action: action field that receives the text of a turn.
        observation: observation field that the policy reads; None: the whole observation as JSON.
        arguments: arguments of reset, in addition to ``seed``.
        timeout_s: limit for one answer, in seconds.

    Raises:
        ConfigError: openenv-core is not installed.
    """

    def __init__(
        self,
        url: str,
        action: str = "message",
        observation: str | None = None,
        arguments: dict[str, Any] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        try:
            client = import_module("openenv.core.generic_client").GenericEnvClient
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"environment.function=openenv: {error}; install it (pip install openenv-core)"
            ) from error
        self._client = client(base_url=url, message_timeout_s=timeout_s)
        self._action, self._observation, self._arguments = action, observation, arguments or {}

    async def reset(self, row: Mapping[str, Any], seed: int) -> str:
        """Return the first observation."""
        answer = self._client.reset(seed=seed % 2**31, **self._arguments)
        return self._text((await answer if inspect.isawaitable(answer) else answer).observation)

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Send a turn to the server and return its answer."""
        answer = self._client.step({self._action: action})
        result = await answer if inspect.isawaitable(answer) else answer
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    async def close(self) -> None:
        """End the session."""
        closed = self._client.close()
        if inspect.isawaitable(closed):
            await closed

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self._observation is None:
            return json.dumps(observation)
        if self._observation not in observation:
            raise KeyError(
                f"environment.options.observation={self._observation} is not among the fields {', '.join(observation)}"
            )
        return str(observation[self._observation])
