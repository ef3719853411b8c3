"""Lend containers over HTTP: to runs by ``rlhf-mcore serve-containers``, and to agents in other processes.

    POST   /containers           {"task", "room"} -> {"id", "key"}      with the token of the service, if it requires one
    POST   /containers/ID/run    {"command", "stdin" | "stdin_base64", "timeout_s", "cwd", "env"}
           -> {"exit_code", "stdout", "stderr", "reason"}
    GET    /containers/ID/files?path=PATH   -> the file
    PUT    /containers/ID/files?path=PATH   the file
    DELETE /containers/ID

All requests but the first need the header ``Authorization: Bearer KEY``. Status 410 means that the container has ended. An error is
``{"error": text}``.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from aiohttp import web

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import MAX_FILE_BYTES, Container, ContainerLost
from rlhf_mcore.environments.containers.task import USUAL, ContainerLimits, Task
from rlhf_mcore_contrib.containers.wire import task_from_json

MAX_BYTES = 2**27  # limit for a request, for example with the context of an image
MAX_CONTAINERS = 1024
MAX_COMMAND_S = 3600.0
_LOOK_S = 0.5  # interval for checks whether a client has disconnected
_ROOM = frozenset(each.name for each in fields(ContainerLimits))
Opens = Callable[[Task, ContainerLimits], Awaitable[Container]]


@dataclass(slots=True, eq=False)
class _LentContainer:
    container: Container
    key: str
    end: asyncio.TimerHandle | None = None


class Service:
    """Lend containers over HTTP.

    Args:
        opens: function that opens a container for a client; None: only containers of ``add`` are lent.
        token: token that clients need to open containers; None: no token is required.
        most: upper bounds for the limits of a container.
    """

    def __init__(self, opens: Opens | None = None, token: str | None = None, most: ContainerLimits = USUAL) -> None:
        self._opens, self._token, self._most = opens, token, most
        self._lent: dict[str, _LentContainer] = {}
        self._opening = 0

    def application(self) -> web.Application:
        """Build the HTTP application."""
        application = web.Application(client_max_size=MAX_BYTES, middlewares=[_refuse])
        one = "/containers/{id}"
        application.router.add_post("/containers", self._open)
        application.router.add_post(f"{one}/run", self._run)
        application.router.add_get(f"{one}/files", self._read)
        application.router.add_put(f"{one}/files", self._write)
        application.router.add_delete(one, self._delete)
        application.on_cleanup.append(self._close_all)
        return application

    def add(self, container: Container) -> tuple[str, str]:
        """Lend a container. Returns its id and its key."""
        name, key = secrets.token_hex(8), secrets.token_urlsafe(32)
        self._lent[name] = _LentContainer(container, key)
        return name, key

    def remove(self, name: str) -> None:
        """Stop lending a container."""
        self._lent.pop(name, None)

    async def _close_all(self, _: web.Application) -> None:
        lent, self._lent = list(self._lent.values()), {}
        await asyncio.gather(*(each.container.close() for each in lent))

    def _one(self, request: web.Request) -> _LentContainer:
        lent = self._lent.get(request.match_info["id"])
        if lent is None:
            raise web.HTTPGone(text="the container has ended or never existed")
        if not hmac.compare_digest(_bearer(request), lent.key.encode()):
            raise web.HTTPUnauthorized(text="the header Authorization does not contain the key of this container")
        return lent

    async def _open(self, request: web.Request) -> web.Response:
        if self._opens is None:
            raise web.HTTPNotFound(text="this service does not open containers")
        if self._token is not None and not hmac.compare_digest(_bearer(request), self._token.encode()):
            raise web.HTTPUnauthorized(text="the header Authorization does not contain the token of this service")
        if len(self._lent) + self._opening >= MAX_CONTAINERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_CONTAINERS} containers are open")
        body = await _object(request)
        if not isinstance(body.get("task"), dict):
            raise ValueError("the request has no object 'task'")
        task, room = task_from_json(body["task"]), _smaller(self._most, body.get("room"))
        self._opening += 1
        try:
            container = await self._opens(task, room)
        finally:
            self._opening -= 1
        name, key = self.add(container)
        self._lent[name].end = asyncio.get_running_loop().call_later(room.lives_s, self._expire, name)
        return web.json_response({"id": name, "key": key, "cwd": container.cwd})

    def _expire(self, name: str) -> None:
        if (lent := self._lent.pop(name, None)) is not None:
            task = asyncio.ensure_future(lent.container.close())
            task.add_done_callback(lambda done: done.exception())

    async def _run(self, request: web.Request) -> web.Response:
        lent, body = self._one(request), await _object(request)
        command, stdin = body.get("command"), body.get("stdin", "")
        timeout_s, cwd, env = body.get("timeout_s"), body.get("cwd"), body.get("env") or {}
        if "stdin_base64" in body:
            stdin = base64.b64decode(str(body["stdin_base64"]), validate=True)
        if not isinstance(command, str) or not isinstance(stdin, (str, bytes)) or not isinstance(env, dict):
            raise ValueError("'command' and 'stdin' must be texts, and 'env' must be an object")
        if timeout_s is not None and not (_is_number(timeout_s) and 0 < timeout_s <= MAX_COMMAND_S):
            raise ValueError(f"timeout_s must be a number from 0 to {MAX_COMMAND_S:g}")
        given = {str(key): str(value) for key, value in env.items()}
        ran = await lent.container.run(
            command, stdin=stdin, timeout_s=timeout_s, cwd=None if cwd is None else str(cwd), env=given
        )
        return web.json_response(asdict(ran))

    async def _read(self, request: web.Request) -> web.Response:
        return web.Response(body=await self._one(request).container.read(_path_in(request)))

    async def _write(self, request: web.Request) -> web.Response:
        lent, path, content = self._one(request), _path_in(request), await request.read()
        if len(content) > MAX_FILE_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_FILE_BYTES, len(content))
        await lent.container.write({path: content})
        return web.json_response({})

    async def _delete(self, request: web.Request) -> web.Response:
        lent = self._one(request)
        self._lent.pop(request.match_info["id"], None)
        if lent.end is not None:
            lent.end.cancel()
        await lent.container.close()
        return web.json_response({})


class Lender:
    """Lend the containers of a worker process to agents in other processes, at a free port of ``host``."""

    def __init__(self, host: str) -> None:
        self._host, self._service, self._url = host, Service(), ""

    @asynccontextmanager
    async def lend(self, container: Container) -> AsyncIterator[dict[str, str]]:
        """Lend a container within the block. Yields its address and its key."""
        if not self._url:
            await self._serve()
        name, key = self._service.add(container)
        try:
            yield {"url": f"{self._url}/containers/{name}", "key": key}
        finally:
            self._service.remove(name)

    async def _serve(self) -> None:
        runner = web.AppRunner(self._service.application(), access_log=None, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, self._host, 0).start()
        self._url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{runner.addresses[0][1]}"


@web.middleware
async def _refuse(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    """Answer an exception with a status and one line."""
    try:
        response: web.StreamResponse = await _while_connected(request, handler(request))
        return response
    except ContainerLost as error:
        status, reason = 410, str(error)
    except web.HTTPException as error:
        status, reason = error.status, error.text or error.reason
    except (ValueError, OSError, ConfigError) as error:
        status, reason = 400, str(error)
    except Exception as error:
        status, reason = 500, f"the request failed ({type(error).__name__}: {error})"
    return web.json_response({"error": " ".join(reason.split())[:1000]}, status=status)


async def _while_connected(request: web.Request, work: Coroutine[Any, Any, Any]) -> Any:
    """Do the work of a request. Cancel it if the client disconnects, independently of the server's options."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done() and (transport := request.transport) is not None and not transport.is_closing():
            await asyncio.wait([task], timeout=_LOOK_S)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
    return web.Response() if task.cancelled() else task.result()


def _bearer(request: web.Request) -> bytes:
    return request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")


def _path_in(request: web.Request) -> str:
    if not (path := request.query.get("path")) or "\0" in path:
        raise ValueError("the request has no query 'path'")
    return path


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except RecursionError as error:
        raise ValueError("the body is no JSON") from error
    if not isinstance(body, dict):
        raise ValueError("the body is no JSON object")
    return body


def _smaller(most: ContainerLimits, asked: Any) -> ContainerLimits:
    """Return the limits that a client requests, at most ``most``.

    Raises:
        ValueError: ``asked`` is not an object, or a value has the wrong type or is not above 0.
    """
    if not isinstance(asked, dict | None):
        raise ValueError("'room' must be an object")
    kept: dict[str, Any] = {}
    for name, value in (asked or {}).items():
        bound = getattr(most, name, None) if name in _ROOM else None
        if value is None or bound is None:
            continue
        if isinstance(bound, bool) != isinstance(value, bool) or not (isinstance(value, bool) or _is_number(value)):
            raise ValueError(
                f"room.{name} must be {'true or false' if isinstance(bound, bool) else 'a number above 0'}"
            )
        if not isinstance(value, bool) and not value > 0:
            raise ValueError(f"room.{name} must be a number above 0")
        kept[name] = min(type(bound)(min(value, bound)), bound)
    return replace(most, **kept)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
