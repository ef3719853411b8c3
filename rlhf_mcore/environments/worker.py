"""A worker process, which creates an instance of the user's environment class for each session, and calls it.

``rlhf_mcore.environments.sessions`` starts it.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import random
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlhf_mcore.config.choices import AGENT, ROLLOUT
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.own_processes import DISCONNECTED, decode, encode, end_group_with, limit_memory, receive_messages
from rlhf_mcore.plugins import load_plugin
from rlhf_mcore.readers.user_functions import is_file_spec, load_function, place_of
from rlhf_mcore.redaction import redact
from rlhf_mcore.rewards.user_function import number_problem, shorten

KEY = "environment.function"
BUILT_IN = {
    "tools": "rlhf_mcore.environments.tools:Tools",
    AGENT: "rlhf_mcore.environments.agents.program:AgentEnvironment",
    ROLLOUT: "rlhf_mcore.environments.function_worker:FunctionEnvironment",
}
_RECEIVE_BYTES = 2**16
_MESSAGES = 'None, a text, a message {"role", "content"} whose role is a word, or a list of messages; content may be parts with images'
_ROLE = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)  # the template writes it between its markers
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # characters that tokenizers and UTF-8 files reject


class Requests(list[dict[str, Any]]):
    """The observation of a rollout function: its requests for turns, or its result. It is sent unchanged."""


class EnvironmentFailed(Exception):
    """A call failed. The message explains the cause without the name of an exception. ``timed_out``: it took too long."""

    def __init__(self, message: str, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


def main(descriptor: int) -> None:
    """Serve sessions over a socket until the other end closes it.

    The first message names the class to load: ``{"spec", "options", "memory_bytes", "folder"}``. The answer is ``{"ready": true,
    "concurrent"}`` or ``{"problem": text}``. Every later message is ``{"close": session}`` or ``{"session", "seed", "actions"}``.
    If the message also contains ``"row"``, the session is new in this process: the worker resets it, and runs all actions.
    The answer is the result of the last action.
    """
    end_group_with(descriptor)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    order = next(receive_messages(connection))
    limit_memory(order["memory_bytes"])
    try:
        os.chdir(order["folder"])
    except OSError as error:
        problem = (
            f"{KEY}={order['spec']}: the folder {order['folder']} of the run does not exist on {os.uname().nodename}"
        )
        connection.sendall(encode({"problem": f"{problem} ({error.strerror}); copy it to this machine"}))
        return
    sys.path.append(os.getcwd())
    try:
        kind = load_environment(order["spec"])
        options = order["options"]
        kind(**options)  # find invalid options now
    except ConfigError as error:
        connection.sendall(encode({"problem": str(error)}))
        return
    except Exception as error:
        text = f"{traceback.format_exception_only(error)[-1].strip()[:2000]}{place_of(error, order['spec'])}"
        connection.sendall(
            encode({"problem": f"{KEY}={order['spec']} with environment.options={redact(options)} raises {text}"})
        )
        return
    concurrent = any(inspect.iscoroutinefunction(getattr(kind, name, None)) for name in ("reset", "step"))
    connection.sendall(encode({"ready": True, "concurrent": concurrent}))
    # Error messages show the line in this file.
    source = options.get("function") if order["spec"] in (AGENT, ROLLOUT) else None
    asyncio.run(_serve(connection, Environments(lambda: kind(**options), source or order["spec"])))


def load_environment(spec: str) -> Callable[..., Any]:
    """Load the class that ``environment.function`` names.

    Raises:
        ConfigError: it cannot be loaded, is not a class, or has no ``reset`` or no ``step``.
    """
    if spec in BUILT_IN:
        from importlib import import_module

        module, _, name = BUILT_IN[spec].partition(":")
        return getattr(import_module(module), name)
    if not is_file_spec(spec):
        plugin: Callable[..., Any] = load_plugin("environments", spec, f"{KEY}={spec}", package="environments")
        return plugin
    kind = load_function(spec, KEY)
    missing = [name for name in ("reset", "step") if not callable(getattr(kind, name, None))]
    if not inspect.isclass(kind) or missing:
        what = f"no method {' and no method '.join(missing)}" if inspect.isclass(kind) else "is not a class"
        has = "has " if inspect.isclass(kind) else ""
        raise ConfigError(f"{KEY} is {spec!r}, but it {has}{what}: it needs reset(row, seed) and step(action)")
    return kind


async def _serve(connection: socket.socket, environments: Environments) -> None:
    loop, process, buffer = asyncio.get_running_loop(), os.getpid(), bytearray()
    connection.setblocking(False)
    sending, tasks = asyncio.Lock(), set[asyncio.Task[None]]()

    async def answer(item: Mapping[str, Any]) -> None:
        try:
            reply = await environments.answer(item)
        except MemoryError:
            reply = {"lost": "ran out of memory"}
        if os.getpid() != process:  # the environment forked, and this is the child. Only the parent answers.
            os._exit(0)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        if "close" in item:
            return
        try:
            async with sending:
                await loop.sock_sendall(connection, encode({"session": item["session"], **reply}))
        except OSError:
            os._exit(DISCONNECTED)
        if "lost" in reply:
            os._exit(0)

    while data := await loop.sock_recv(connection, _RECEIVE_BYTES):
        buffer += data
        for item in decode(buffer):
            task = loop.create_task(answer(item))
            tasks.add(task)
            task.add_done_callback(tasks.discard)


@dataclass(slots=True)
class _LiveSession:
    environment: Any
    seed: int
    turns: int = 0


class Environments:
    """The sessions of this process. ``make`` builds an environment; ``spec`` is used in error messages."""

    def __init__(self, make: Callable[[], Any], spec: str) -> None:
        self._make, self._spec = make, spec
        self._sessions: dict[int, _LiveSession] = {}

    async def answer(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Handle a message. Returns ``{"messages", "reward", "done", "special"}``, ``{"error"}``, or {} for a close."""
        try:
            return await self._answer(item)
        except MemoryError:
            raise
        except EnvironmentFailed as failed:
            return {"error": " ".join(str(failed).split()), "timed_out": failed.timed_out}
        except SystemExit as error:
            return {"error": f"called sys.exit({error.code!r}){place_of(error, self._spec)}"}
        except BaseException as error:
            text = " ".join(traceback.format_exception_only(error)[-1].split())  # one line, as part of a sentence
            return {"error": f"raised {text[:2000]}{place_of(error, self._spec)}"}

    async def _answer(self, item: Mapping[str, Any]) -> dict[str, Any]:
        if "close" in item:
            session = self._sessions.pop(item["close"], None)
            if session is not None and hasattr(session.environment, "close"):
                await self._call(session, "close")
            return {}
        reply: dict[str, Any] = {}
        if "row" in item:
            session = self._sessions[item["session"]] = _LiveSession(self._make(), item["seed"])
            observation = await self._call(session, "reset", item["row"], item["seed"])
            reply = self._reply(session, "reset", observation, (observation, 0.0, False))
        for action in item["actions"]:
            if "error" in reply:
                break
            session = self._sessions[item["session"]]
            result = await self._call(session, "step", action)
            reply = self._reply(session, "step", result, result)
        return reply

    async def _call(self, session: _LiveSession, method: str, *arguments: Any) -> Any:
        # Seed the global generators, so that an environment's random numbers do not depend on the other sessions of the process.
        random.seed(f"{session.seed} {session.turns}")
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed((session.seed + session.turns) % 2**32)
        session.turns += 1
        result = getattr(session.environment, method)(*arguments)
        return await result if inspect.isawaitable(result) else result

    @staticmethod
    def _reply(session: _LiveSession, method: str, given: Any, result: Any) -> dict[str, Any]:
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            return {"error": f"returned {shorten(given)} from {method}: return observation, reward, done"}
        observation, reward, done = result
        reward = 0.0 if reward is None else reward
        if problem := number_problem(reward, "the reward"):
            return {"error": f"returned {shorten(given)} from {method}: {problem}"}
        messages = observation if isinstance(observation, Requests) else messages_of_observation(observation)
        if messages is None:
            return {"error": f"returned the observation {shorten(observation)} from {method}: it must be {_MESSAGES}"}
        special = bool(getattr(session.environment, "special_tokens", False))
        return {"messages": messages, "reward": float(reward), "done": bool(done), "special": special}


def messages_of_observation(observation: Any) -> list[dict[str, Any]] | None:
    """Convert an observation to messages; None if it is not a valid observation. NUL and lone surrogates become U+FFFD.

    A message with images has, in addition to ``content``, the ``texts`` around the images, and the image sources in ``images``.
    """
    if observation is None or observation == "":
        return []
    if isinstance(observation, str):
        observation = {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, (list, tuple)):
        return None
    checked = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return None
        content = _content(message.get("content"))
        if content is None or _ROLE.fullmatch(message["role"]) is None:
            return None
        checked.append({"role": str(message["role"]), **content})
    return checked


def _content(content: Any) -> dict[str, Any] | None:
    """Return ``content`` of a message, and also ``texts`` and ``images`` if it has images; None if it is invalid."""
    if isinstance(content, str):
        return {"content": _NO_TEXT.sub("\ufffd", content)}
    if not isinstance(content, list):
        return None
    from rlhf_mcore.data.image_rows import MARK, parts_of  # imported here because few environments return images

    texts, sources = [""], list[Any]()
    try:
        for part in parts_of(content, "an observation"):
            if isinstance(part, str):
                texts[-1] += _NO_TEXT.sub("\ufffd", part)
            else:
                texts.append("")
                sources.append(sent_image(part.source))
    except ConfigError:
        return None
    if None in sources:
        return None
    return {"content": MARK.join(texts), **({"texts": texts, "images": sources} if sources else {})}


def sent_image(source: Any) -> Any:
    """Return the source of an image as JSON: bytes become a data URL, and a relative path becomes absolute."""
    if isinstance(source, bytes):
        return f"data:image/unknown;base64,{base64.b64encode(source).decode()}"
    source = os.fspath(source) if isinstance(source, os.PathLike) else source
    is_path = isinstance(source, str) and "://" not in source and not source.startswith("data:")
    return os.path.abspath(source) if is_path else source
