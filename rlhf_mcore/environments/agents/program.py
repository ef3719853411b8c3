"""An agent in a worker process: a program, a function or a server that is told an episode, and ends with a reward or without."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import aiohttp

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.user_functions import load_function
from rlhf_mcore.rewards.user_function import number_problem, shorten

KEY = "environment.agent"
UNGRADED = {"role": "ungraded", "content": ""}  # in the place of an observation: the agent leaves the score to others
_THREADS = ThreadPoolExecutor(256)  # of agents that are no coroutines; each is started when it is needed
_SHOWN_CHARS = 1000  # of what an agent has printed, in a message


class Agent:
    """One episode, which is one step of an environment.

    Args:
        command: a program and its arguments. It reads the task as JSON from its input, finds the endpoint in variables of its
            environment, and may print a reward, ``{"reward": number}``, as its last line.
        function: ``path/to/file.py:name`` of ``f(task, base_url, api_key)``, a coroutine or a function, which may return a reward.
        url: a server that gets ``{"task", "base_url", "api_key"}`` posted, and answers ``{"reward": number}`` or ``{}``.
        timeout_s: of a try. ``retries``: further tries, each from the beginning.
        max_output_bytes: most that a program prints or a server answers.

    Raises:
        ConfigError: there is no such program or function.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        function: str | None = None,
        url: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 0,
        max_output_bytes: int = 2**16,
    ) -> None:
        self._command, self._url = command, url
        self._timeout_s, self._retries, self._max_output_bytes = timeout_s, retries, max_output_bytes
        self._task: Mapping[str, Any] = {}
        self._function: Callable[..., Any] | None = None
        if command and shutil.which(command[0]) is None:
            raise ConfigError(f"{KEY}.command: there is no program {command[0]!r}; give its path")
        if function is not None:
            self._function = load_function(function, f"{KEY}.function")

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Take the task; the agent starts with ``step``."""
        self._task = row

    async def step(self, action: Mapping[str, str]) -> tuple[Any, float, bool]:
        """Play the episode at the endpoint that ``action`` names."""
        base_url, api_key = action["base_url"], action["api_key"]
        async with aiohttp.ClientSession() as web:
            for number in range(self._retries + 1):
                begun = {"Authorization": f"Bearer {api_key}"}
                async with web.post(f"{base_url}/begin", headers=begun) as answer:
                    if answer.status != 200:
                        raise RuntimeError("the endpoint does not know the episode")
                try:
                    result = await asyncio.wait_for(self._play(web, base_url, api_key), self._timeout_s)
                    return self._read(result)
                except asyncio.TimeoutError:
                    problem = RuntimeError(f"took longer than {KEY}.timeout_s={self._timeout_s:g} s")
                except Exception as error:
                    if number == self._retries:
                        raise
                    problem = RuntimeError(str(error))
        raise problem

    async def _play(self, web: aiohttp.ClientSession, base_url: str, api_key: str) -> Any:
        if self._function is not None:
            if inspect.iscoroutinefunction(self._function):
                return await self._function(self._task, base_url, api_key)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(_THREADS, self._function, self._task, base_url, api_key)
        if self._command:
            return await self._run(base_url, api_key)
        assert self._url is not None
        told = {"task": self._task, "base_url": base_url, "api_key": api_key}
        async with web.post(self._url, json=told, timeout=aiohttp.ClientTimeout()) as answer:
            content = b""
            async for part in answer.content.iter_any():
                content += part
                if len(content) > self._max_output_bytes:
                    raise RuntimeError(f"{KEY}.url answers more than {self._max_output_bytes} bytes")
            if answer.status != 200:
                shown = content[:_SHOWN_CHARS].decode(errors="replace")
                raise RuntimeError(f"{KEY}.url answers with status {answer.status}: {shown}")
        return json.loads(content or b"null")

    async def _run(self, base_url: str, api_key: str) -> Any:
        """Run the program, and return what its last line tells."""
        assert self._command is not None
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
        }
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **own},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            with suppress(ConnectionError):  # it need not read its task
                process.stdin.write(json.dumps(self._task).encode() + b"\n")
                await process.stdin.drain()
            process.stdin.close()
            printed = b""
            while part := await process.stdout.read(2**16):
                printed += part
                if len(printed) > self._max_output_bytes:
                    raise RuntimeError(f"{KEY}.command prints more than {self._max_output_bytes} bytes")
            code = await process.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        text = printed.decode(errors="replace").strip()
        if code:
            raise RuntimeError(f"{KEY}.command ended with {code}; it last printed: {text[-_SHOWN_CHARS:]!r}")
        with suppress(ValueError, RecursionError):
            told = json.loads(text.rpartition("\n")[2])
            if isinstance(told, dict) and "reward" in told:
                return told
        return None

    @staticmethod
    def _read(result: Any) -> tuple[Any, float, bool]:
        """Return what a step returns, of what an agent has: a number, ``{"reward": number}``, or nothing.

        Raises:
            ValueError: it is anything else.
        """
        reward = result.get("reward") if isinstance(result, Mapping) else result
        if reward is None:
            return UNGRADED, 0.0, True
        if problem := number_problem(reward, "the reward"):
            raise ValueError(f"the agent ended with {shorten(result)}: {problem}")
        return None, float(reward), True
