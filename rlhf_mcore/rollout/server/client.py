"""Send HTTP requests to servers, from a separate thread and many concurrently."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import aiohttp

from rlhf_mcore.config.errors import printable
from rlhf_mcore.coroutines import Background
from rlhf_mcore.redaction import without_secrets

T = TypeVar("T")
MAX_BYTES = 2**20  # default limit for the size of an answer
_SHOWN = 300  # maximum characters of an answer in an error message


class ServerFailed(RuntimeError):
    """A server gave no valid answer. Credentials in the message are hidden."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(without_secrets(message))[:1000])


class Client:
    """An HTTP session to the servers, in a separate thread."""

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self._thread = Background("servers")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session: aiohttp.ClientSession = self.wait(self._open(headers, timeout_s))

    async def _open(self, headers: Mapping[str, str], timeout_s: float) -> aiohttp.ClientSession:
        # limit=0: the engine limits the concurrent requests. The server closes idle connections, so reuse them for 2 s at most.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=30)
        headers = {**headers, "Accept-Encoding": "identity"}  # a compressed answer could unpack to any size
        session = aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, trust_env=False, auto_decompress=False
        )
        return await self._thread.resources.enter_async_context(session)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the thread."""
        return self._thread.start(work)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Start a coroutine, and wait for its result."""
        return self.begin(work).result()

    async def ask(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, max_bytes: int = MAX_BYTES
    ) -> Any:
        """Send a request, and return the server's JSON answer; None if the answer is empty.

        Raises:
            ServerFailed: the server gave no answer, an error, or an answer that is not JSON or exceeds ``max_bytes``.
        """
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as answer:
                content = bytearray()
                async for part in answer.content.iter_any():
                    content += part
                    if len(content) > max_bytes:
                        raise ServerFailed(f"{url} answers with more than {max_bytes:,} bytes")
                if answer.status != 200:
                    shown = content[: 4 * _SHOWN].decode("utf-8", "replace")[:_SHOWN]
                    raise ServerFailed(f"{url} answers with status {answer.status}: {shown}")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ServerFailed(f"{url} does not answer: {type(error).__name__} {error}".strip()) from error
        try:
            return json.loads(content) if content else None
        except (ValueError, RecursionError) as error:
            raise ServerFailed(
                f"{url} answers with invalid JSON: {type(error).__name__} {str(error)[:_SHOWN]}"
            ) from error

    def close(self) -> None:
        """Cancel the requests in flight, and close the session and the thread."""
        self._thread.close()


def token_of(variable: str | None) -> str | None:
    """Return the servers' API key from an environment variable. Pre-flight checks that it is set."""
    return None if variable is None else os.environ.get(variable)
