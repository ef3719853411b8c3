"""Use the containers of a service over HTTP (:mod:`rlhf_mcore_contrib.containers.service`), for example on other machines."""

from __future__ import annotations

import base64
import json
import os
import posixpath
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

import aiohttp

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.container import (
    CommandResult,
    Container,
    ContainerKind,
    ContainerLost,
    KindSettings,
    ShellCommand,
)
from rlhf_mcore.environments.containers.task import ContainerLimits, Task
from rlhf_mcore.redaction import without_secrets
from rlhf_mcore_contrib.containers.wire import task_to_json

_SLACK_S = 30.0  # time for an answer after the deadline of a request
_ENDED = 410  # status for a container that has ended
_FAILED = (aiohttp.ClientError, TimeoutError, ConnectionError)


class RemoteContainer(Container):
    """A container at ``url`` of a service."""

    scratch = None  # the service writes long commands to a file

    def __init__(self, url: str, headers: Mapping[str, str], room: ContainerLimits, task: Task, cwd: str) -> None:
        super().__init__(room.timeout_s, task.workdir or cwd, task.env)
        self._url, self._headers = url, dict(headers)

    async def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files, with one request per file (:meth:`Container.write`)."""
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

    async def _execute(self, order: ShellCommand) -> CommandResult | None:
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
            raise OSError(f"the container service returned status {status}: {told.get('error', '')}")
        return CommandResult(told["exit_code"], told["stdout"], told["stderr"], told["reason"])

    async def _end(self) -> None:
        with suppress(*_FAILED):  # the container ends by itself later
            await _ask("DELETE", self._url, self._headers, None, _SLACK_S)


class RemoteKind(ContainerKind):
    """Open containers of the service at ``settings.url``.

    Raises:
        ConfigError: the variable with the token is not set.
    """

    prepares = True

    def __init__(self, settings: KindSettings) -> None:
        url, variable = settings.url or "", settings.token_env
        if variable is not None and not os.environ.get(variable):
            raise ConfigError(
                f"environment.container.token_env={variable}: this environment variable is not set or is empty; export it"
            )
        self._url, self._shown = url.rstrip("/"), without_secrets(url)
        self._headers = {"Authorization": f"Bearer {os.environ[variable]}"} if variable is not None else {}

    async def open(self, task: Task, room: ContainerLimits) -> Container:
        """Open a container. The service prepares it.

        Raises:
            ContainerLost: the service does not answer.
            OSError: the service rejects the task; the message contains its reason.
        """
        body, at_most_s = {"task": task_to_json(task), "room": asdict(room)}, 2 * room.start_timeout_s
        try:
            status, content = await _ask("POST", f"{self._url}/containers", self._headers, body, at_most_s + _SLACK_S)
        except _FAILED as error:
            raise ContainerLost(f"environment.container.url={self._shown} does not answer: {error!r}") from error
        told = _object(content)
        if status != 200 or not {"id", "key"} <= told.keys():
            why = f"status {status}: {told.get('error', '')}"
            raise OSError(f"environment.container.url={self._shown} did not open a container, {why}")
        own = {"Authorization": f"Bearer {told['key']}"}
        url = f"{self._url}/containers/{told['id']}"
        return RemoteContainer(url, own, room, task, str(told.get("cwd") or "/"))

    async def warm(self, task: Task) -> Task:
        """Return the task unchanged, because the service loads its own images."""
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
    except (ValueError, RecursionError):
        told = None
    return told if isinstance(told, dict) else {"error": content[:200].decode(errors="replace")}
