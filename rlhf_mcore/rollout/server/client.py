"""Ask servers over HTTP, from a thread of its own: many requests are under way at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")
_SHOWN = 300  # characters of an answer that a message quotes


class ServerFailed(RuntimeError):
    """A server does not answer, or refuses."""


class Client:
    """Sessions to servers, in a thread with an event loop."""

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession = self.wait(self._open(headers, timeout_s))

    async def _open(self, headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
        # Who bounds the requests under way is the engine; the server closes connections that rest, so each is tried anew.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=30)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, trust_env=False)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Start a coroutine, and wait for its result."""
        return self.begin(work).result()

    async def ask(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON that a server answers; None where it answers nothing.

        Raises:
            ServerFailed: with what it answered, or why it did not.
        """
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise ServerFailed(f"{url} answers {answer.status}: {text[:_SHOWN]}")
                return await answer.json(content_type=None) if text else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ServerFailed(f"{url} does not answer: {type(error).__name__} {error}".strip()) from error

    def close(self) -> None:
        """End the requests under way, the sessions and the thread."""
        self.wait(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def token_of(variable: str | None) -> str | None:
    """Read the servers' key from an environment variable, which pre-flight has seen."""
    return None if variable is None else os.environ.get(variable)
