"""Containers of a service by HTTP (:mod:`rlhf_mcore.environments.containers.service`), such as one on machines of their own."""

from __future__ import annotations

import base64
import json
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import aiohttp

from rlhf_mcore.environments.containers.container import Container, ContainerLost, Order, Ran
from rlhf_mcore.environments.containers.task import Room, Task, task_to_json

_SLACK_S = 30.0  # above the deadline of what is asked
_ENDED = 410  # the status of a container that is gone
_FAILED = (aiohttp.ClientError, TimeoutError, ConnectionError)


class RemoteContainer(Container):
    """A container of the service at ``url``."""

    def __init__(self, url: str, headers: Mapping[str, str], room: Room, task: Task, cwd: str) -> None:
        super().__init__(room.timeout_s, task.workdir or cwd, task.env)
        self._url, self._headers = url, dict(headers)

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files, a request for each (:meth:`Container.write`)."""
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            status, told = await self._files("PUT", path, data)
            if status != 200:
                raise OSError(f"{path} cannot be written: {told[:1000].decode(errors='replace')}")

    async def read(self, path: str) -> bytes:
        """Read a file (:meth:`Container.read`)."""
        status, content = await self._files("GET", path, None)
        if status != 200:
            raise OSError(f"{path} cannot be read: {content[:1000].decode(errors='replace')}")
        return content

    async def _files(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        if self.is_lost:
            raise ContainerLost("the container has ended")
        query = urlencode({"path": posixpath.join(self.cwd, path)})
        try:
            status, content = await _ask(
                method, f"{self._url}/files?{query}", self._headers, data, self.timeout_s + _SLACK_S
            )
        except _FAILED as error:
            status, content = _ENDED, repr(error).encode()
        if status == _ENDED:
            self.is_lost = True
            raise ContainerLost("the container has ended")
        return status, content

    async def _execute(self, order: Order) -> Ran | None:
        body = {"command": order.command, "timeout_s": order.timeout_s, "cwd": order.cwd, "env": dict(order.env)}
        body["stdin_base64"] = base64.b64encode(order.stdin).decode()
        try:
            status, content = await _ask("POST", f"{self._url}/run", self._headers, body, order.timeout_s + _SLACK_S)
        except _FAILED:
            return None
        if status == _ENDED:
            return None
        told = _object(content)
        if status != 200:
            raise OSError(f"the service of containers refuses, status {status}: {told.get('error', '')}")
        return Ran(told["exit_code"], told["stdout"], told["stderr"], told["reason"])

    async def _end(self) -> None:
        with suppress(*_FAILED):  # it ends by itself
            await _ask("DELETE", self._url, self._headers, None, _SLACK_S)


class RemoteKind:
    """Opens containers of the service at ``url``."""

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    async def open(self, task: Task, room: Room) -> Container:
        """Open one; the service prepares it.

        Raises:
            ContainerLost: the service does not answer.
            OSError: it refuses, with its reason.
        """
        body, at_most_s = {"task": task_to_json(task), "room": asdict(room)}, 2 * room.start_timeout_s
        try:
            status, content = await _ask("POST", f"{self._url}/containers", self._headers, body, at_most_s + _SLACK_S)
        except _FAILED as error:
            raise ContainerLost(f"environment.container.url={self._url} gives no answer: {error!r}") from error
        told = _object(content)
        if status != 200 or not {"id", "key"} <= told.keys():
            why = f"status {status}: {told.get('error', '')}"
            raise OSError(f"environment.container.url={self._url} opens no container, {why}")
        own = {"Authorization": f"Bearer {told['key']}"}
        url = f"{self._url}/containers/{told['id']}"
        return RemoteContainer(url, own, room, task, str(told.get("cwd") or "/"))

    async def warm(self, task: Task) -> Task:
        """Leave images to the service."""
        return task


async def _ask(method: str, url: str, headers: Mapping[str, str], body: Any, timeout_s: float) -> tuple[int, bytes]:
    sent = {"data": body} if isinstance(body, bytes) else {"json": body} if body is not None else {}
    timeout = aiohttp.ClientTimeout(timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers=headers) as web,
        web.request(method, url, allow_redirects=False, **sent) as answer,
    ):
        return answer.status, await answer.read()


def _object(content: bytes) -> dict[str, Any]:
    try:
        told = json.loads(content)
    except ValueError:
        told = None
    return told if isinstance(told, dict) else {"error": content[:200].decode(errors="replace")}
