"""An agent in a worker process. It is a program, a function or a server that runs a whole episode and may return a reward."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import aiohttp

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.coroutines import OutputTooLong, end_program, exchange, start_program
from rlhf_mcore.environments.containers.container import Blocking, ContainerLost
from rlhf_mcore.environments.containers.task import task_of
from rlhf_mcore.environments.containers.workplace import Workplace, Workplaces, workplaces_of
from rlhf_mcore.environments.worker import EnvironmentFailed
from rlhf_mcore.own_processes import ProcessGroupReaper
from rlhf_mcore.readers.user_functions import load_function
from rlhf_mcore.rewards.user_function import number_problem, shorten

KEY = "environment.agent"
UNGRADED = "ungraded"  # role of the message that an agent without a reward returns instead of an observation
# Programs whose first argument is a script. A version may follow the name, for example python3.11.
_INTERPRETERS = ("python", "bash", "sh", "node", "ruby", "perl")
_SCRIPTS = (".py", ".sh", ".js", ".ts", ".mjs", ".rb", ".pl")
_FLAGS = ("-u", "-B", "-E", "-I", "-O", "-P", "-S", "-s")  # Python options without an argument
_PARAMETERS = ("task", "base_url", "api_key")
NO_TURN = "ended without a turn of the policy"
_THREADS = ThreadPoolExecutor(256)  # for agents that are ordinary functions; a thread starts when it is needed
_CANCEL_S = 10.0  # wait for a cancelled agent
_SHOWN_CHARS = 1000  # limit for an agent's output in a message


@dataclass(frozen=True, slots=True)
class Ungraded:
    """The result of an agent without a reward. ``printed`` is the last line that a program printed."""

    printed: str = ""


@lru_cache(maxsize=1)
def _keeper() -> ProcessGroupReaper:
    """Return the reaper of this process, which kills its programs if the process dies."""
    return ProcessGroupReaper()


def missing_reward(messages: Sequence[Mapping[str, str]]) -> str:
    """Return the error for an agent that returned no reward, from the messages of its step; "" if it returned one."""
    if [message["role"] for message in messages] != [UNGRADED]:
        return ""
    how = "return one"
    if said := messages[0]["content"]:
        how = f'its last line is {said!r}; print {{"reward": number}} as the last line'
    return f"ended without a reward; {how}, or set environment.score=reward"


def _missing_script(command: Sequence[str]) -> str | None:
    """Return the script in an interpreter's command if the file does not exist, in the directory or on PATH; else None."""
    if Path(command[0]).name.rstrip(".0123456789") not in _INTERPRETERS:
        return None
    first = next((argument for argument in command[1:] if argument not in _FLAGS), "")
    is_script = Path(first).suffix in _SCRIPTS and not first.startswith("-")
    return first if is_script and not Path(first).exists() and shutil.which(first, os.F_OK) is None else None


def _load(spec: str, has_container: bool) -> tuple[Callable[..., Any], bool]:
    """Load an agent that is a function. Returns it, and whether it accepts a container.

    Raises:
        ConfigError: the function does not accept the arguments, requires a container that the run does not have, or is a generator.
    """
    key = f"{KEY}.function={spec}"
    function = load_function(spec, f"{KEY}.function")
    signature = inspect.signature(function)
    container = signature.parameters.get("container")
    if container is not None and not has_container and container.default is inspect.Parameter.empty:
        raise ConfigError(f"{key} takes a container, but the run has none; set environment.container.kind")
    try:
        signature.bind(*_PARAMETERS, **({"container": None} if container is not None else {}))
    except TypeError as error:
        wanted = ", ".join(_PARAMETERS)
        raise ConfigError(f"{key}: its parameters are {signature} ({error}); let it take ({wanted})") from None
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{key} is a generator; return the reward instead")
    return function, container is not None


class AgentEnvironment:
    """An environment with one step, in which an agent runs the whole episode.

    Args:
        command: program and its arguments. It reads the task as JSON from stdin, and the endpoint from environment variables.
            It may print a reward, ``{"reward": number}``, as its last line.
        function: ``path/to/file.py:name`` of ``f(task, base_url, api_key)``, a coroutine or a function, which may return a reward.
        url: server that receives a POST with ``{"task", "base_url", "api_key"}``, and answers ``{"reward": number}`` or ``{}``.
        timeout_s: limit for a try. ``retries``: number of further tries. Each try starts over.
        max_output_bytes: limit for a program's output or a server's answer.
        container: options of the container of each try (``containers.kinds.options_of``); None: no containers.

    Raises:
        ConfigError: the program or function does not exist.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        function: str | None = None,
        url: str | None = None,
        timeout_s: float = 600.0,
        retries: int = 0,
        max_output_bytes: int = 2**16,
        container: Mapping[str, Any] | None = None,
    ) -> None:
        self._command, self._url = command, url
        self._timeout_s, self._retries, self._max_output_bytes = timeout_s, retries, max_output_bytes
        self._task: Mapping[str, Any] = {}
        self._takes_container = False
        self._function: Callable[..., Any] | None = None
        self._workplaces: Workplaces | None = None
        self._needs: Any = None  # the task of the row for its container
        if container is not None:
            lends_for = "" if function is not None else f"{KEY}.{'command' if command else 'url'} with containers"
            self._workplaces = workplaces_of(json.dumps(container), lends_for)
        if command and shutil.which(command[0]) is None:
            first, *rest = command[0].split() or [""]
            if rest:  # arguments may be secrets
                raise ConfigError(
                    f"{KEY}.command is one text that starts with {first!r}; write it as a list, [{first}, agent.py]"
                )
            raise ConfigError(f"{KEY}.command: there is no program {command[0]!r}; give its path")
        if command and (script := _missing_script(command)) is not None:
            raise ConfigError(f"{KEY}.command: there is no file {script!r} (looked from {Path.cwd()}); give its path")
        if function is not None:
            self._function, self._takes_container = _load(function, container is not None)

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Store the task. The agent starts in ``step``.

        Raises:
            ConfigError: the description of the row's container is invalid.
        """
        self._task = row
        if self._workplaces is not None:
            self._needs = task_of(row["extra_info"])

    async def step(self, action: Mapping[str, str]) -> tuple[Any, float, bool]:
        """Run the episode at the endpoint in ``action``. If a container is lost, the episode gets one additional try."""
        tries, spare = 1 + self._retries, int(self._workplaces is not None)
        async with aiohttp.ClientSession() as web:
            while True:
                tries -= 1
                begun = {"Authorization": f"Bearer {action['api_key']}"}
                async with web.post(f"{action['base_url']}/begin", headers=begun) as answer:
                    if answer.status != 200:
                        raise RuntimeError("the endpoint does not know the episode")
                try:
                    return self._read(await self._try(web, action["base_url"], action["api_key"]))
                except ContainerLost:
                    if not tries and not spare:
                        raise
                    tries, spare = tries + spare, 0
                except Exception:
                    if not tries:
                        raise

    async def _try(self, web: aiohttp.ClientSession, base_url: str, api_key: str) -> Any:
        """Run the agent once. With containers, each try gets a new one, and the task's tests score it if the agent does not.

        Raises:
            ContainerLost: the container ended. The agent's result is then not used.
            EnvironmentFailed: the agent failed or did not end in time.
        """
        told = {"base_url": base_url, "api_key": api_key}
        if self._workplaces is None:
            return await self._in_time(self._play(web, told, None))
        async with self._workplaces.open(self._needs) as workplace:
            try:
                result = await self._in_time(self._play(web, told, workplace))
            except Exception as error:
                if workplace.container.is_lost:
                    raise ContainerLost(f"the container has ended, and then: {error}") from error
                raise
            if workplace.container.is_lost:
                raise ContainerLost("the container has ended")
            if self._read(result)[0] is None:
                return result
            return await self._workplaces.grade(workplace.container, self._needs)

    async def _in_time(self, playing: Coroutine[Any, Any, Any]) -> Any:
        """Wait for the agent until the deadline. Its exceptions, including its own TimeoutError, are raised unchanged."""
        task = asyncio.ensure_future(playing)
        try:
            if not (await asyncio.wait({task}, timeout=self._timeout_s))[0]:
                raise EnvironmentFailed(f"took longer than {KEY}.timeout_s={self._timeout_s:g} s", timed_out=True)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_S)

    async def _play(self, web: aiohttp.ClientSession, told: Mapping[str, str], workplace: Workplace | None) -> Any:
        if self._function is not None:
            return await self._call(told, workplace)
        lent = dict(workplace.lent) if workplace is not None else {}
        if self._command:
            return await self._run(told, lent)
        try:
            return await self._post(web, {"task": self._task, **told, **({"container": lent} if lent else {})})
        except aiohttp.ClientError as error:
            raise EnvironmentFailed(f"did not answer: {error}") from error

    async def _post(self, web: aiohttp.ClientSession, body: Mapping[str, Any]) -> Any:
        """Send an episode to the server, and return its answer, which it sends at the end of the episode."""
        assert self._url is not None
        async with web.post(self._url, json=body, timeout=aiohttp.ClientTimeout()) as answer:
            content = b""
            async for part in answer.content.iter_any():
                content += part
                if len(content) > self._max_output_bytes:
                    raise EnvironmentFailed(f"answered more than {self._max_output_bytes} bytes ({KEY}.max_output_kib)")
            if answer.status != 200:
                shown = content[:_SHOWN_CHARS].decode(errors="replace")
                raise EnvironmentFailed(f"answered with status {answer.status}: {shown}")
        try:
            return json.loads(content or b"null")
        except (ValueError, RecursionError):
            shown = content[:_SHOWN_CHARS].decode(errors="replace")
            raise EnvironmentFailed(f"answered with invalid JSON: {shown!r}") from None

    async def _call(self, told: Mapping[str, str], workplace: Workplace | None) -> Any:
        assert self._function is not None
        given: dict[str, Any] = {}
        if self._takes_container and workplace is not None:
            given["container"] = workplace.container
        if inspect.iscoroutinefunction(self._function):
            return await self._function(self._task, told["base_url"], told["api_key"], **given)
        loop = asyncio.get_running_loop()
        if given:
            given["container"] = Blocking(given["container"], loop)
        call = partial(self._function, self._task, told["base_url"], told["api_key"], **given)
        return await loop.run_in_executor(_THREADS, call)

    async def _run(self, told: Mapping[str, str], lent: Mapping[str, str]) -> Any:
        """Run the program, and return the result in its last line; ``Ungraded`` if that line is not a result."""
        assert self._command is not None
        base_url, api_key = told["base_url"], told["api_key"]
        own = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
            **{f"CONTAINER_{name.upper()}": value for name, value in lent.items()},
        }
        process = await start_program(*self._command, env={**os.environ, **own})
        _keeper().keep(process.pid)
        try:
            task = json.dumps(self._task).encode() + b"\n"
            code, printed, errors = await exchange(process, task, self._max_output_bytes)
        except OutputTooLong:
            raise EnvironmentFailed(
                f"printed more than {self._max_output_bytes} bytes ({KEY}.max_output_kib)"
            ) from None
        finally:
            with suppress(ProcessLookupError):  # also kills processes that the program left running
                os.killpg(process.pid, signal.SIGKILL)
            _keeper().release(process.pid)
            await end_program(process)
        if code:
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
            raise EnvironmentFailed(f"{how}; it last printed: {(errors.strip() or printed.strip())[-_SHOWN_CHARS:]!r}")
        last = printed.strip().rpartition("\n")[2]
        with suppress(ValueError, RecursionError):
            result = json.loads(last)
            if isinstance(result, dict) and "reward" in result:
                return result
        return Ungraded(last[-_SHOWN_CHARS:])

    @staticmethod
    def _read(result: Any) -> tuple[Any, float, bool]:
        """Convert the result of an agent to the result of a step.

        An agent returns a number, ``{"reward": number}``, or None.

        Raises:
            EnvironmentFailed: the agent returned anything else.
        """
        if isinstance(result, Ungraded):
            return {"role": UNGRADED, "content": result.printed}, 0.0, True
        if isinstance(result, Mapping) and result and "reward" not in result:
            raise EnvironmentFailed(f"ended with {shorten(result)}: it has no key 'reward'")
        reward = result.get("reward") if isinstance(result, Mapping) else result
        if reward is None:
            return AgentEnvironment._read(Ungraded())
        if problem := number_problem(reward, "the reward"):
            raise EnvironmentFailed(f"ended with {shorten(result)}: {problem}")
        return None, float(reward), True
