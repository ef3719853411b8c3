"""The HTTP server from which agents request turns of the policy. It has one address, and a key for each episode."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import secrets
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from threading import Event, Thread
from typing import Any, Protocol, TypeVar

from aiohttp import web

from rlhf_mcore.config.errors import ConfigError, printable
from rlhf_mcore.environments.agents.anthropic_api import Messages
from rlhf_mcore.environments.agents.dialects import (
    MAX_DEPTH,
    MODEL,
    NO_PARSER,
    ClientRequest,
    Dialect,
    Part,
    RequestError,
    TurnInput,
    TurnOutput,
)
from rlhf_mcore.environments.agents.openai_api import ChatCompletions, Completions
from rlhf_mcore.foreign import is_deeper
from rlhf_mcore.plugins import find_plugins, load_plugin

KEY = "environment.agent.host"
BEGIN = "/v1/begin"  # restarts an episode and drops its turns
MAX_BYTES = 2**24  # limit for a request
MAX_VALUES = 2**20  # limit for the number of JSON values in a request; token prompts need the most
MAX_WAITING = 256  # limit for concurrent requests of an episode
_TOO_LONG = TurnInput(prompt=range(2**40))
_END_S = 2.0  # wait for clients when a run ends
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_CHAT = ChatCompletions()
DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": Completions(),
    "/v1/messages": Messages(),
}
ENDED = "the episode of this key has ended, or the key is unknown"


def served_paths() -> list[str]:
    """Return the paths of all APIs: built-in APIs, and ``/v1/<name>`` for plug-ins in the group ``rlhf_mcore.dialects``."""
    return [*DIALECTS, *(f"/v1/{name}" for name in sorted({"responses", *find_plugins("dialects")}))]


@cache
def dialect_at(path: str) -> Dialect:
    """Return the API at a path. A plug-in is loaded at its first request.

    Raises:
        RequestError: the plug-in is not installed.
    """
    if path in DIALECTS:
        return DIALECTS[path]
    try:
        dialect: Dialect = load_plugin("dialects", path.removeprefix("/v1/"), f"POST {path}")()
    except ConfigError as error:
        raise RequestError(404, str(error)) from error
    return dialect


T = TypeVar("T")
# Receives the number of a turn and its next text.
OnText = Callable[[int, str], None]


class ServedEpisode(Protocol):
    """An episode whose agent sends requests. Its methods run on the event loop of the engine."""

    async def ask(self, order: ClientRequest, asked_at: float, on_text: OnText | None = None) -> list[TurnOutput]:
        """Sample the turns of a request.

        Raises:
            RequestError: the request is rejected.
        """
        ...

    async def restart(self) -> None:
        """Drop all turns, because the agent starts over."""
        ...


class SilentEpisode:
    """An episode without a policy: its turns are empty. Without ``calls_tools``, requests with tools are rejected."""

    def __init__(self, calls_tools: bool = True) -> None:
        self.was_asked, self._calls_tools = False, calls_tools

    async def ask(self, order: ClientRequest, asked_at: float, on_text: OnText | None = None) -> list[TurnOutput]:
        """See :class:`ServedEpisode`."""
        self.was_asked = True
        if not self._calls_tools and any(asked.tools for asked in order.asked):
            raise RequestError(400, NO_PARSER)
        return [TurnOutput({"role": "assistant", "content": ""}, (), "stop", 0)] * order.n * len(order.asked)

    async def restart(self) -> None:
        """See :class:`ServedEpisode`."""


@dataclass(slots=True, eq=False)
class _Served:
    """``loop``: the event loop of the engine. ``num_waiting``: number of requests in progress."""

    episode: ServedEpisode
    loop: asyncio.AbstractEventLoop
    api_key: str
    num_waiting: int = 0


class Endpoint:
    """Serve the episodes of an engine in a separate thread. The engine's event loop answers the requests.

    Args:
        host: address to listen on; the port is a free one.
        max_bytes: limit for the size of a request.

    Raises:
        ConfigError: the address is not available.
    """

    def __init__(self, host: str, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_digest: dict[bytes, _Served] = {}
        self._loop = asyncio.new_event_loop()
        ready, problem, ended = Event(), list[OSError](), asyncio.Event()
        self.url = ""

        async def serve() -> None:
            application = web.Application(client_max_size=max_bytes)
            for path in served_paths():
                application.router.add_post(path, self._serve)
            application.router.add_post(BEGIN, self._begin)
            application.router.add_get("/v1/models", self._models)
            application.router.add_route("*", "/{path:.*}", _not_served)
            runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, host, 0)
            await site.start()
            port = runner.addresses[0][1]
            self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            ready.set()
            await ended.wait()
            await runner.cleanup()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            try:
                self._loop.run_until_complete(serve())
            except OSError as error:
                problem.append(error)
            finally:
                ready.set()

        thread = Thread(target=run, name="agents", daemon=True)
        thread.start()
        ready.wait()
        if problem:
            raise ConfigError(
                f"{KEY}={host}: the endpoint cannot listen there ({problem[0]}); give an address of this machine"
            )
        self.close_all = weakref.finalize(self, _end, self._loop, ended, thread)

    # ----------------------------------------------------------------------------------- of the engine's thread
    def open(self, episode: ServedEpisode) -> str:
        """Start to serve an episode on the running event loop. Returns its key."""
        api_key = secrets.token_urlsafe(32)
        self._by_digest[_digest(api_key)] = _Served(episode, asyncio.get_running_loop(), api_key)
        return api_key

    def close(self, api_key: str) -> None:
        """Stop serving an episode. Requests in progress end when their tasks are cancelled."""
        self._by_digest.pop(_digest(api_key), None)

    # ------------------------------------------------------------------------------------ of the server's thread
    def _episode_of(self, request: web.Request) -> _Served:
        """Find the episode of a request by its key.

        Raises:
            RequestError: the key is missing or belongs to no episode.
        """
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        served = self._by_digest.get(_digest(given))
        if served is None or not hmac.compare_digest(served.api_key.encode(), given.encode("utf-8", "replace")):
            raise RequestError(401, ENDED, "invalid_api_key")
        return served

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._episode_of(request)
        except RequestError as refusal:
            return _refusal(_CHAT, refusal)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhf_mcore", "type": "model"}
        return web.json_response({"object": "list", "data": [model]})

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        try:
            served = self._episode_of(request)
            await _run_on(served.loop, served.episode.restart())
        except RequestError as refusal:
            return _refusal(_CHAT, refusal)
        return web.json_response({})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        dialect: Dialect = _CHAT
        try:
            dialect = dialect_at(request.path)
            served = self._episode_of(request)
            body = _object(await request.read())
            order = dialect.read(body)
            if order.streams:
                return await self._stream(request, served, dialect, order, body)
            said = await self._ask(served, order)
            return web.json_response(dialect.write(body, said))
        except RequestError as refusal:
            return _refusal(dialect, refusal)
        except web.HTTPRequestEntityTooLarge:
            with suppress(RequestError):
                await self._ask(served, ClientRequest([_TOO_LONG]))  # the episode then ends at its length limit
            reason = f"the request has more than {self._max_bytes} bytes"
            return _refusal(dialect, RequestError(413, reason, "context_length_exceeded"))
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            return _refusal(dialect, _failure(error))

    async def _stream(
        self,
        request: web.Request,
        served: _Served,
        dialect: Dialect,
        order: ClientRequest,
        body: dict[str, Any],
    ) -> web.StreamResponse:
        """Answer a request as a stream.

        Raises:
            RequestError: the request failed before the first event. After it, the error is sent as the last event.
        """
        heard: asyncio.Queue[tuple[int, str] | None] = asyncio.Queue()
        parts, response = dialect.stream(body), web.StreamResponse(headers=_STREAM)
        asking = asyncio.create_task(self._ask(served, order, heard))
        asking.add_done_callback(lambda _: heard.put_nowait(None))
        try:
            try:
                while (words := await heard.get()) is not None:
                    await _write(request, response, parts.say(*words))
                await _write(request, response, list(parts.end(asking.result())))
            except ConnectionError:
                raise
            except Exception as error:
                if not response.prepared:
                    raise
                refusal = error if isinstance(error, RequestError) else _failure(error)
                await _write(request, response, [("error", dialect.refuse(refusal))])
            await response.write_eof()
            return response
        finally:
            asking.cancel()

    async def _ask(
        self, served: _Served, order: ClientRequest, heard: asyncio.Queue[tuple[int, str] | None] | None = None
    ) -> list[TurnOutput]:
        """Wait for the turns of a request. ``heard`` receives the number of a turn and its next text.

        Raises:
            RequestError: the request is rejected, or its episode ended.
        """
        count = len(order.asked)
        if served.num_waiting + count > MAX_WAITING:
            raise RequestError(
                429, f"the episode has {served.num_waiting} concurrent requests; the limit is {MAX_WAITING}"
            )
        loop = asyncio.get_running_loop()

        def send(number: int, text: str) -> None:
            with suppress(RuntimeError):  # the run ended, and closed the loop
                loop.call_soon_threadsafe(heard.put_nowait, (number, text))  # type: ignore[union-attr]

        on_text = None if heard is None else send
        served.num_waiting += count
        try:
            return await _run_on(served.loop, served.episode.ask(order, time.monotonic(), on_text))
        finally:
            served.num_waiting -= count


async def _run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop of an engine. If the client disconnects, it is cancelled.

    Raises:
        RequestError: the engine cancelled the coroutine, because the episode ended or started over.
    """
    try:
        future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except RuntimeError as error:  # the run ended, and closed the loop
        coroutine.close()
        raise RequestError(410, ENDED) from error
    answer = asyncio.wrap_future(future)
    try:
        await asyncio.wait([answer])
    finally:
        future.cancel()
    if answer.cancelled():
        raise RequestError(410, ENDED)
    return answer.result()


def _end(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, thread: Thread) -> None:
    loop.call_soon_threadsafe(ended.set)
    thread.join(_END_S)


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode("utf-8", "replace")).digest()


async def _write(request: web.Request, response: web.StreamResponse, events: Iterable[Part]) -> None:
    if not response.prepared:
        await response.prepare(request)
    for name, value in events:
        text = value if isinstance(value, str) else json.dumps(value)
        await response.write(f"{f'event: {name}{chr(10)}' if name else ''}data: {text}\n\n".encode())


async def _not_served(request: web.Request) -> web.StreamResponse:
    served = ", ".join(f"POST {path}" for path in served_paths())
    refusal = RequestError(404, f"{request.method} {request.path} is not served; use {served} or GET /v1/models")
    return _refusal(_CHAT, refusal)


def _failure(error: Exception) -> RequestError:
    reason = f"the request failed in the trainer ({type(error).__name__}: {printable(str(error))[:200]})"
    return RequestError(500, reason, "internal_error")


def _object(content: bytes) -> dict[str, Any]:
    """Parse the body of a request.

    Raises:
        RequestError: the body is not a JSON object, has more than ``MAX_VALUES`` values, or is nested deeper than ``MAX_DEPTH``.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise RequestError(413, f"the request has more than {MAX_VALUES} values")
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {str(error)[:200]}") from error
    if not isinstance(body, dict):
        raise RequestError(400, "the body is not a JSON object")
    if is_deeper(body, MAX_DEPTH):
        raise RequestError(400, f"the body is nested deeper than {MAX_DEPTH}")
    return body


def _refusal(dialect: Dialect, refusal: RequestError) -> web.Response:
    return web.json_response(dialect.refuse(refusal), status=refusal.status)
