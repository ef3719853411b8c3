"""The HTTP server from which agents request turns of the policy. It has one address, and a key for each episode."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any

from aiohttp import web

from rlhf_mcore.config.errors import ConfigError, printable
from rlhf_mcore.environments.agents.anthropic_api import Messages
from rlhf_mcore.environments.agents.calls import MAX_DEPTH, MODEL, NO_PARSER, Call, RequestError, TurnInput, TurnOutput
from rlhf_mcore.environments.agents.dialects import ClientRequest, Dialect, Part
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
_ENDED = "the episode of this key has ended, or the key is unknown"


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


@dataclass(slots=True, eq=False)
class _ServedEpisode:
    number: int
    api_key: str
    waiting: set[Call] = field(default_factory=set)


class Endpoint:
    """Serve the episodes of an engine in a separate thread. Calls wait until the engine's thread takes them.

    Args:
        host: address to listen on; the port is a free one.
        max_bytes: limit for the size of a request.

    Raises:
        ConfigError: the address is not available.
    """

    def __init__(self, host: str, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._by_digest: dict[bytes, _ServedEpisode] = {}
        self._by_number: dict[int, _ServedEpisode] = {}
        self.wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable while calls wait
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
    def open(self, number: int) -> str:
        """Start to serve an episode. Returns its key."""
        api_key = secrets.token_urlsafe(32)
        episode = self._by_number[number] = _ServedEpisode(number, api_key)
        self._by_digest[_digest(api_key)] = episode
        return api_key

    def close(self, number: int) -> None:
        """Stop serving an episode. Waiting clients get an error."""
        episode = self._by_number.pop(number, None)
        if episode is None:
            return
        self._by_digest.pop(_digest(episode.api_key), None)
        self._loop.call_soon_threadsafe(_refuse_all, episode)

    def take(self) -> list[Call]:
        """Return the calls received since the last ``take``."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        calls = []
        while True:
            try:
                calls.append(self._calls.get_nowait())
            except Empty:
                return calls

    def answer_nothing(self, *, calls_tools: bool = True) -> set[int]:
        """Answer all waiting calls with empty turns, without a policy. Returns the episodes that requested turns.

        If ``calls_tools`` is false, calls with tools get the error for a missing parser.
        """
        calls = self.take()
        for call in calls:
            refused = call.asked is not None and call.asked.tools and not calls_tools
            silence = [TurnOutput({"role": "assistant", "content": ""}, (), "stop", 0)] * call.n
            call.answer(RequestError(400, NO_PARSER) if refused else silence)
        return {call.key for call in calls if call.asked is not None}

    # ------------------------------------------------------------------------------------ of the server's thread
    def _episode_of(self, request: web.Request) -> _ServedEpisode:
        """Find the episode of a request by its key.

        Raises:
            RequestError: the key is missing or belongs to no episode.
        """
        given = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        episode = self._by_digest.get(_digest(given))
        if episode is None or not hmac.compare_digest(episode.api_key.encode(), given.encode("utf-8", "replace")):
            raise RequestError(401, _ENDED, "invalid_api_key")
        return episode

    async def _models(self, request: web.Request) -> web.StreamResponse:
        try:
            self._episode_of(request)
        except RequestError as refusal:
            return _refusal(_CHAT, refusal)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "rlhf_mcore", "type": "model"}
        return web.json_response({"object": "list", "data": [model]})

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        try:
            episode = self._episode_of(request)
        except RequestError as refusal:
            return _refusal(_CHAT, refusal)
        _refuse_all(episode)
        self._put(Call(episode.number, None, lambda _: None))
        return web.json_response({})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        dialect: Dialect = _CHAT
        try:
            dialect = dialect_at(request.path)
            episode = self._episode_of(request)
            body = _object(await request.read())
            order = dialect.read(body)
            if order.streams:
                return await self._stream(request, episode, dialect, order, body)
            said = await self._ask(episode, order)
            return web.json_response(dialect.write(body, said))
        except RequestError as refusal:
            return _refusal(dialect, refusal)
        except web.HTTPRequestEntityTooLarge:
            with suppress(RequestError):
                await self._ask(episode, ClientRequest([_TOO_LONG]))  # the episode then ends at its length limit
            reason = f"the request has more than {self._max_bytes} bytes"
            return _refusal(dialect, RequestError(413, reason, "context_length_exceeded"))
        except (ConnectionError, web.HTTPException):
            raise
        except Exception as error:
            return _refusal(dialect, _failure(error))

    async def _stream(
        self,
        request: web.Request,
        episode: _ServedEpisode,
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
        asking = asyncio.create_task(self._ask(episode, order, heard))
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
        self, episode: _ServedEpisode, order: ClientRequest, heard: asyncio.Queue[tuple[int, str] | None] | None = None
    ) -> list[TurnOutput]:
        """Wait for the turns of a request. ``heard`` receives the number of a turn and its next text.

        Raises:
            RequestError: the request is rejected, or its episode ended.
        """
        if len(episode.waiting) + len(order.asked) > MAX_WAITING:
            raise RequestError(
                429, f"the episode has {len(episode.waiting)} concurrent requests; the limit is {MAX_WAITING}"
            )
        loop = asyncio.get_running_loop()
        calls, answers = [], []
        for place, asked in enumerate(order.asked):
            answer: asyncio.Future[list[TurnOutput] | RequestError] = loop.create_future()
            call = Call(episode.number, asked, _teller(loop, answer), order.n, order.max_tokens, order.stop)
            if heard is not None:
                call.hear = _hearer(loop, heard, place * order.n)
            calls.append(call)
            answers.append(answer)
        episode.waiting.update(calls)
        for call in calls:
            self._put(call)
        try:
            said: list[TurnOutput] = []
            for answer in answers:
                given = await answer
                if isinstance(given, RequestError):
                    raise given
                said += given
            return said
        finally:
            for call in calls:
                call.gone = True
            episode.waiting.difference_update(calls)

    def _put(self, call: Call) -> None:
        self._calls.put(call)
        with suppress(BlockingIOError):
            os.eventfd_write(self.wake, 1)


def _end(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, thread: Thread) -> None:
    loop.call_soon_threadsafe(ended.set)
    thread.join(_END_S)


def _digest(api_key: str) -> bytes:
    return hashlib.sha256(api_key.encode("utf-8", "replace")).digest()


def _teller(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Any]) -> Callable[[Any], None]:
    def settle(given: Any) -> None:
        if not answer.done():
            answer.set_result(given)

    def tell(given: Any) -> None:
        with suppress(RuntimeError):  # the run ended, and closed the loop
            loop.call_soon_threadsafe(settle, given)

    return tell


def _hearer(
    loop: asyncio.AbstractEventLoop, heard: asyncio.Queue[tuple[int, str] | None], first: int
) -> Callable[[int, str], None]:
    def hear(number: int, words: str) -> None:
        with suppress(RuntimeError):  # the run ended, and closed the loop
            loop.call_soon_threadsafe(heard.put_nowait, (first + number, words))

    return hear


async def _write(request: web.Request, response: web.StreamResponse, events: Iterable[Part]) -> None:
    if not response.prepared:
        await response.prepare(request)
    for name, value in events:
        text = value if isinstance(value, str) else json.dumps(value)
        await response.write(f"{f'event: {name}{chr(10)}' if name else ''}data: {text}\n\n".encode())


def _refuse_all(episode: _ServedEpisode) -> None:
    for call in list(episode.waiting):
        call.gone = True
        call.answer(RequestError(410, _ENDED))


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
