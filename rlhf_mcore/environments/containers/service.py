"""Containers over HTTP: what ``rlhf-mcore serve-containers`` serves, and what a program that is an agent finds beside it.

    POST   /containers           {"task", "room"} -> {"id", "key"}      with the token of the service, where it has one
    POST   /containers/ID/run    {"command", "stdin" | "stdin_base64", "timeout_s", "cwd", "env"}
           -> {"exit_code", "stdout", "stderr", "reason"}
    GET    /containers/ID/files?path=PATH   -> the file
    PUT    /containers/ID/files?path=PATH   the file
    DELETE /containers/ID

The header of the others is ``Authorization: Bearer KEY``. Status 410: the container has ended. A refusal is ``{"error": text}``.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from aiohttp import web

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import MAX_FILE_BYTES, Container, ContainerLost
from rlhf_mcore.environments.containers.task import USUAL, Room, Task, task_from_json

MAX_BYTES = 2**27  # of a request: the context of an image
MAX_CONTAINERS = 1024
MAX_COMMAND_S = 3600.0
Opens = Callable[[Task, Room], Awaitable[Container]]


@dataclass(slots=True, eq=False)
class _Lent:
    container: Container
    key: str
    end: asyncio.TimerHandle | None = None


class Service:
    """Lends containers by HTTP.

    Args:
        opens: opens a container, of those that clients ask for; None: it has only those of ``add``.
        token: of clients that open containers; None: of everybody who reaches it.
        most: room that a container gets at most.
    """

    def __init__(self, opens: Opens | None = None, token: str | None = None, most: Room = USUAL) -> None:
        self._opens, self._token, self._most = opens, token, most
        self._lent: dict[str, _Lent] = {}
        self._opening = 0

    def application(self) -> web.Application:
        """Build what an HTTP server runs."""
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
        self._lent[name] = _Lent(container, key)
        return name, key

    def remove(self, name: str) -> None:
        """Lend a container no longer."""
        self._lent.pop(name, None)

    async def _close_all(self, _: web.Application) -> None:
        lent, self._lent = list(self._lent.values()), {}
        await asyncio.gather(*(each.container.close() for each in lent))

    def _one(self, request: web.Request) -> _Lent:
        lent = self._lent.get(request.match_info["id"])
        if lent is None:
            raise web.HTTPGone(text="the container has ended, or there was none")
        if not hmac.compare_digest(_bearer(request), lent.key.encode()):
            raise web.HTTPUnauthorized(text="the header Authorization does not have the key of this container")
        return lent

    async def _open(self, request: web.Request) -> web.Response:
        if self._opens is None:
            raise web.HTTPNotFound(text="no containers are opened here")
        if self._token is not None and not hmac.compare_digest(_bearer(request), self._token.encode()):
            raise web.HTTPUnauthorized(text="the header Authorization does not have the token of this service")
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
            stdin = base64.b64decode(str(body["stdin_base64"]))
        if not isinstance(command, str) or not isinstance(stdin, (str, bytes)) or not isinstance(env, dict):
            raise ValueError("the request has no text 'command', or 'stdin' is no text, or 'env' no object")
        if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and 0 < timeout_s <= MAX_COMMAND_S):
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


@web.middleware
async def _refuse(request: web.Request, handler: Callable[..., Any]) -> web.StreamResponse:
    """Answer what goes wrong by a status and one line."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ContainerLost as error:
        status, reason = 410, str(error)
    except web.HTTPException as error:
        status, reason = error.status, error.text or error.reason
    except (ValueError, OSError, ConfigError) as error:
        status, reason = 400, str(error)
    return web.json_response({"error": " ".join(reason.split())[:1000]}, status=status)


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


def _smaller(most: Room, asked: Mapping[str, Any] | None) -> Room:
    """Return what is asked for, within ``most``."""
    asked, kept = asked or {}, {}
    for name in (each.name for each in fields(Room)):
        value, bound = asked.get(name), getattr(most, name)
        if isinstance(value, (int, float)) and value > 0:
            kept[name] = min(type(bound)(value), bound)
        elif value is False:
            kept[name] = False
    return replace(most, **kept)
