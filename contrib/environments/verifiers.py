"""Environments of the package verifiers, version 0.4. One verifiers episode is one episode of the run.

verifiers calls a model for each turn, in the API of its harness. Here the model is the policy behind the agent endpoint
(``rlhf_mcore.environments.agents``). The run learns from all sampled turns, even if a harness rewrites its history.

``python -m rlhf_mcore_contrib.environments.verifiers`` writes the prompts of a taskset.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from importlib import import_module
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_mcore.config.errors import ConfigError, for_terminal
from rlhf_mcore.environments.agents.dialects import MODEL, ClientRequest, TurnInput, TurnOutput
from rlhf_mcore.environments.agents.endpoint import Endpoint, OnText
from rlhf_mcore.redaction import redact

KEY = "environment.options"
INSTALL = "pip install --target FOLDER verifiers==0.4.0, and set environment.options.packages=FOLDER"
_HARNESS = "rlhf_mcore_turns"


class Verifiers:
    """An episode of a verifiers environment. Only its last step has a reward, which is the score of the episode.

    Args:
        taskset: configuration of the taskset, including its ``id``.
        env: the other fields of verifiers' ``EnvConfig``: ``id``, and agents by name.
        packages: folder that contains verifiers; None: verifiers is installed in this environment.

    Raises:
        ConfigError: verifiers is not installed or cannot load the environment.
    """

    def __init__(
        self, taskset: Mapping[str, Any], env: Mapping[str, Any] | None = None, packages: str | None = None
    ) -> None:
        self._host = _host(json.dumps({**(env or {}), "taskset": taskset}), packages)
        self._task: Any = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Select the task with the number ``extra_info.task``. ``step`` starts it."""
        number = row["extra_info"].get("task")
        if not isinstance(number, int):
            raise ValueError(
                f"extra_info.task of this row is {number!r}, not the number of a task; write the rows with python -m {__name__}"
            )
        self._task = self._host.task(number)

    async def step(self, action: Mapping[str, str]) -> tuple[None, float, bool]:
        """Run the whole episode with the policy at the endpoint in ``action``."""
        aiohttp = import_module("aiohttp")
        headers = {"Authorization": f"Bearer {action['api_key']}"}
        async with aiohttp.ClientSession() as web, web.post(f"{action['base_url']}/begin", headers=headers) as answer:
            if answer.status != 200:
                raise RuntimeError("the endpoint does not know the episode")
        return None, await self._host.play(self._task, action["base_url"], action["api_key"]), True


class _Host:
    """The verifiers environment of a process, which all its episodes share."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        loaders, agents = _module("utils.loaders"), _module("configs.agent")
        self._v1 = _module()
        sys.modules[_HARNESS] = _turns_module()
        resolved = loaders.resolve_env_config(dict(config))
        roles = {}
        for name, role in agents.agent_config_fields(resolved).items():
            own = {} if "runtime" in role.model_fields_set else {"runtime": self._v1.SubprocessConfig()}
            if role.harness is None and loaders.default_harness_id(resolved.taskset.id) == "bash":
                own |= {"harness": loaders.harness_config_type(_HARNESS)(id=_HARNESS)}
            roles[name] = role.model_copy(update=own)
        self._environment = loaders.load_environment(resolved.model_copy(update=roles))
        self._tasks: list[Any] = []
        self._more = iter(self._environment.taskset)
        self._ready: asyncio.Task[Any] | None = None
        self._holder: asyncio.Task[None] | None = None
        self._numbers = count()

    def task(self, number: int) -> Any:
        """Return the task with this number.

        Raises:
            IndexError: the taskset has fewer tasks.
        """
        while number >= len(self._tasks):
            task = next(self._more, None)
            if task is None:
                raise IndexError(f"there is no task {number}: the taskset has {len(self._tasks)}")
            self._tasks.append(task)
        return self._tasks[number]

    async def play(self, task: Any, base_url: str, api_key: str) -> float:
        """Run a complete verifiers episode. Returns the reward of the agent that the policy played.

        Raises:
            RuntimeError: the episode failed, or the policy played several agents, whose rewards may be opposed.
        """
        if self._ready is None:
            self._ready = asyncio.create_task(self._begin())
        await self._ready
        variable = (
            f"RLHF_MCORE_EPISODE_{next(self._numbers)}"  # a verifiers client reads its key from an environment variable
        )
        os.environ[variable] = api_key
        try:
            client = self._v1.EvalClientConfig(base_url=base_url, api_key_var=variable)
            played = await self._environment.run_episode(
                task, self._v1.clients.ModelContext(model=MODEL, client=client)
            )
        finally:
            del os.environ[variable]
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if errors or not played.ok:
            raise RuntimeError("verifiers reports " + ("; ".join(f"{e.type}: {e.message}" for e in errors) or "no end"))
        clients = [(trace, trace.agent.config.client) for trace in played.traces]
        own = [trace for trace, its in clients if its is None or its.api_key_var == variable]
        if len(own) != 1:
            raise RuntimeError(
                f"the policy played {len(own)} agents in one verifiers episode; give all but one a model and a client of "
                "their own"
            )
        return float(own[0].reward)

    async def _begin(self) -> None:
        """Start the services of the environment for its agents. They run until the process ends."""
        begun = asyncio.Event()

        async def hold() -> None:
            async with self._environment.serving():
                begun.set()
                await asyncio.Event().wait()

        self._holder = asyncio.create_task(hold())
        beginning = asyncio.create_task(begun.wait())
        await asyncio.wait([self._holder, beginning], return_when=asyncio.FIRST_COMPLETED)
        if self._holder.done():
            self._holder.result()


@lru_cache(maxsize=4)
def _host(config: str, packages: str | None) -> _Host:
    """Return the host that all episodes of a process share."""
    if packages is not None:
        if not Path(packages).is_dir():
            raise ConfigError(f"{KEY}.packages={packages} is not a folder; install verifiers into it: {INSTALL}")
        folder = str(Path(packages).resolve())
        sys.path.insert(0, folder)
        # verifiers starts tool servers, which also import the module of the taskset.
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", ""), os.getcwd()])
    try:
        version = import_module("importlib.metadata").version("verifiers")
    except ImportError as error:
        raise ConfigError(f"environment.function=verifiers: {error}; install it: {INSTALL}") from error
    if not version.startswith("0.4."):
        raise ConfigError(
            f"environment.function=verifiers: version {version} is not supported, because its interface differs from 0.4; {INSTALL}"
        )
    try:
        return _Host(json.loads(config))
    except Exception as error:
        shown = json.dumps(redact(json.loads(config)))
        raise ConfigError(f"{KEY}: verifiers cannot load {shown} ({type(error).__name__}: {error})") from error


def _module(name: str = "") -> Any:
    return import_module(f"verifiers.v1.{name}".removesuffix("."))


def _turns_module() -> ModuleType:
    """Build the module of a harness for tasks that configure none. It runs an agent in this process and executes no code."""
    harness, programs, wire = (_module(name) for name in ("harness", "runtimes", "dialects.chat"))
    tools_of, aiohttp = _module("harnesses.utils.mcp"), import_module("aiohttp")

    class Turns(harness.Harness[_module("configs.harness").HarnessConfig]):  # type: ignore[misc]
        APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
        EXECUTES_CODE = NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else None
            messages += asked or map(wire.message_to_wire, prompt or [])
            servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                tools, dispatch, connections = await tools_of.connect_mcp({"mcpServers": servers}, stack)
                web = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()))
                while True:
                    body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                    headers = {"Authorization": f"Bearer {secret}"}
                    async with web.post(f"{endpoint}/chat/completions", json=body, headers=headers) as response:
                        if response.status != 200:
                            return programs.ProgramResult(1, "", await response.text())
                        message = (await response.json())["choices"][0]["message"]
                    messages.append(message)
                    for call in message.get("tool_calls") or []:
                        content = await _call_tool(tools_of.call_mcp, call["function"], connections, dispatch)
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                    if not message.get("tool_calls"):
                        return programs.ProgramResult(0, "", "")

    Turns.__module__ = _HARNESS
    module = ModuleType(_HARNESS)
    module.__dict__.update({"Turns": Turns, "__all__": ["Turns"]})
    return module


async def _call_tool(call_mcp: Any, function: Mapping[str, str], connections: Any, dispatch: Mapping[str, Any]) -> Any:
    """Return the result of a tool call, or an error text for an invalid call of the policy."""
    name, given = function["name"], function["arguments"]
    if name not in dispatch:
        return f"error: there is no tool {name}; there is: {', '.join(dispatch)}"
    try:
        arguments = json.loads(given or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON ({error})"
    if not isinstance(arguments, dict):
        return "error: the arguments are no object"
    return await call_mcp(connections, dispatch, name, arguments)


# ------------------------------------------------------------------------------------------------------------------ rows
def main(argv: Sequence[str] | None = None) -> int:
    """Write the prompts of a taskset. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the tasks of a verifiers taskset as prompt rows.")
    parser.add_argument("--options", required=True, help="environment.options, as JSON")
    parser.add_argument("--first", type=int, default=0, help="number of the first task")
    parser.add_argument("--rows", type=int, required=True, help="maximum number of tasks")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--tools", type=Path, help="write the schemas of the tools to this file, for environment.tools")
    given = parser.parse_args(argv)
    try:
        rows, tools = asyncio.run(_openings(json.loads(given.options), given.first, given.rows))
        given.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        if given.tools is not None:
            given.tools.write_text(json.dumps(tools, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, ValueError, TypeError, RuntimeError, OSError) as error:
        print(for_terminal(f"error: {error}"), file=sys.stderr)
        return 2
    print(
        f"wrote {len(rows)} rows to {given.out}" + (f" and {len(tools)} tools to {given.tools}" if given.tools else "")
    )
    return 0


async def _openings(options: dict[str, Any], first: int, rows: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the first requests of the tasks as rows, and the tools, which all tasks share."""
    prompts: list[dict[str, Any]] = []
    tools: list[Any] = []
    endpoint = Endpoint("127.0.0.1")
    for number in range(first, first + rows):
        episode = Verifiers(**options)
        try:
            await episode.reset({"extra_info": {"task": number}}, seed=0)
        except IndexError:
            break
        asked = await _first_request(episode, endpoint, number)
        if prompts and list(asked.tools) != tools:
            raise RuntimeError(
                f"task {number} has other tools than task {first}; all tasks of a run must have the same tools"
            )
        tools = list(asked.tools)
        prompt = [{"role": message["role"], "content": message["content"]} for message in asked.messages]
        prompts.append({"prompt": prompt, "data_source": "verifiers", "extra_info": {"task": number}})
    return prompts, tools


class _Listener:
    """An episode that keeps the first request, and answers none."""

    def __init__(self) -> None:
        self.asked: asyncio.Future[TurnInput] = asyncio.get_running_loop().create_future()

    async def ask(self, order: ClientRequest, asked_at: float, on_text: OnText | None = None) -> list[TurnOutput]:
        """See :class:`rlhf_mcore.environments.agents.endpoint.ServedEpisode`."""
        if not self.asked.done():
            self.asked.set_result(order.asked[0])
        await asyncio.Event().wait()
        return []

    async def restart(self) -> None:
        """See ``ask``."""


async def _first_request(episode: Verifiers, endpoint: Endpoint, number: int) -> TurnInput:
    """Start a task and stop it after its first request to the policy. Returns this request."""
    listener = _Listener()
    api_key = endpoint.open(listener)
    playing = asyncio.create_task(episode.step({"base_url": endpoint.url, "api_key": api_key}))
    try:
        first: list[asyncio.Future[Any]] = [playing, listener.asked]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if listener.asked.done():
            return listener.asked.result()
        playing.result()
        raise RuntimeError(f"task {number} ended before it sent a request to the policy")
    finally:
        endpoint.close(api_key)
        playing.cancel()
        await asyncio.wait([playing])


if __name__ == "__main__":
    sys.exit(main())
