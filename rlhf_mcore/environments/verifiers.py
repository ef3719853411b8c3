"""Environments of the package verifiers (interface of version 0.4): one episode of theirs is one of ours.

verifiers asks a model for each turn over OpenAI's chat protocol. Here an endpoint on this host takes the request and answers with
what the policy has written. Messages that come after the policy's turn are the observation; a request that tells an earlier turn
differently is refused, so nothing that was sampled is tokenised again.

``python -m rlhf_mcore.environments.verifiers`` writes the prompts of a taskset.
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
from rlhf_mcore.config.show import redact

KEY = "environment.options"
INSTALL = "pip install --target FOLDER verifiers==0.4.0, and set environment.options.packages=FOLDER"
_HARNESS = "rlhf_mcore_turns"
_SESSION = "X-Session-ID"


class Verifiers:
    """An episode of an environment of verifiers. Its score is the reward of the last step; the steps before it have none.

    Args:
        taskset: configuration of the taskset, with its ``id``.
        env: the rest of verifiers' ``EnvConfig``: ``id``, and the agents by their names.
        packages: the folder that verifiers is installed in; None: it is installed beside this package.

    Raises:
        ConfigError: verifiers is not installed, or does not load the environment.
    """

    def __init__(
        self, taskset: Mapping[str, Any], env: Mapping[str, Any] | None = None, packages: str | None = None
    ) -> None:
        self._host = _host(json.dumps({**(env or {}), "taskset": taskset}), packages)
        self._asked: asyncio.Queue[dict[str, Any] | Exception] = asyncio.Queue()
        self._answer: asyncio.Future[dict[str, Any]] | None = None
        self._episode: asyncio.Task[Any] | None = None
        self._told: list[dict[str, Any]] = []  # the conversation so far, as verifiers has told it
        self._traces: list[str] = []  # of the agents in this episode
        self._tools: list[Any] = []

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Begin the task with the number ``extra_info.task``."""
        number = row["extra_info"].get("task")
        if not isinstance(number, int):
            raise ValueError(
                f"extra_info.task of this row is {number!r}: it must be the number of a task; write the rows by python -m {__name__}"
            )
        asked = await self.begin(number)
        if other := [message for message in asked["messages"] if _text(message).strip() not in row["prompt"]]:
            raise ValueError(
                f"task {number} asks {_text(other[0])!r:.200}, which is not in the prompt of this row: write the rows of this "
                f"taskset by python -m {__name__}"
            )

    async def begin(self, number: int) -> dict[str, Any]:
        """Start an episode. Returns the first request to the policy."""
        task = self._host.task(number)
        self._episode = asyncio.create_task(self._host.play(task, self))
        asked = await self._next()
        if asked is None:
            raise RuntimeError(f"task {number} has ended before it asked the policy")
        self._tools = asked.get("tools") or []
        return asked

    async def step(self, action: str | Mapping[str, Any]) -> tuple[list[dict[str, str]], float, bool]:
        """Give the environment a turn, and return its answer."""
        assert self._answer is not None and self._episode is not None
        if self._tools and isinstance(action, str):
            raise ValueError(
                "the task has tools, and environment.tool_parser is not set, so that none can be called: set it, and "
                f"environment.tools to the file that python -m {__name__} --tools writes"
            )
        message: dict[str, Any] = {"role": "assistant", "content": action}
        if not isinstance(action, str):
            message |= {"content": action["content"]}
            message |= {"tool_calls": action["tool_calls"]} if action["tool_calls"] else {}
        before = len(self._told) + 1
        self._told.append(message)
        self._answer.set_result(message)
        asked = await self._next()
        if asked is not None:
            return [{"role": m["role"], "content": _text(m)} for m in asked["messages"][before:]], 0.0, False
        return [], self._host.reward_of(self._episode.result(), self._traces[0]), True

    async def close(self) -> None:
        """End the episode, wherever it is."""
        for trace in self._traces:
            self._host.episodes.pop(trace, None)
        if self._answer is not None:
            self._answer.cancel()
        if self._episode is not None and not self._episode.done():
            self._episode.cancel()
            await asyncio.wait([self._episode])

    async def ask(self, trace: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for the policy's turn, and wait for it."""
        messages, turns = body["messages"], self._told
        if not self._traces:
            self._traces.append(trace)
        problem = None
        if trace not in self._traces:
            problem = "has a second agent that the policy plays; give all but one a model and a client of their own"
        elif [*map(_said, messages[: len(turns)])] != [*map(_said, turns)] or len(messages) <= len(turns):
            problem = (
                "tells the turns so far differently than they were; use a harness that leaves the conversation as it is"
            )
        if problem is not None:
            self._asked.put_nowait(RuntimeError(f"the environment of verifiers {problem}"))
            raise asyncio.CancelledError
        self._told = list(messages)
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(body)
        return await self._answer

    async def _next(self) -> dict[str, Any] | None:
        """Wait for the next request to the policy; None where the episode has ended.

        Raises:
            RuntimeError: the conversation cannot be followed.
        """
        assert self._episode is not None
        asking = asyncio.create_task(self._asked.get())
        await asyncio.wait([asking, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            self._episode.result()
            return None
        request = asking.result()
        if isinstance(request, Exception):
            raise request
        return request


class _Host:
    """The environment of a process, the endpoint that its policy is asked at, and the episodes under way."""

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
        self.episodes: dict[str, Verifiers] = {}  # by the id of a trace

    def task(self, number: int) -> Any:
        """Return the task with this number.

        Raises:
            IndexError: there are fewer.
        """
        while number >= len(self._tasks):
            task = next(self._more, None)
            if task is None:
                raise IndexError(f"there is no task {number}: the taskset has {len(self._tasks)}")
            self._tasks.append(task)
        return self._tasks[number]

    async def play(self, task: Any, episode: Verifiers) -> Any:
        """Play an episode of verifiers from its beginning to its end."""
        if self._ready is None:
            self._ready = asyncio.create_task(self._serve())
        port = await self._ready
        client = self._v1.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY")
        context = self._v1.clients.ModelContext(model="policy", client=client)

        def register(trace: Any) -> None:
            self.episodes[trace.id] = episode

        return await self._environment.run_episode(task, context, on_trace=register)

    def reward_of(self, played: Any, trace_id: str) -> float:
        """Return the reward of the agent that the policy has played.

        Raises:
            RuntimeError: the episode has failed.
        """
        errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
        if errors or not played.ok:
            raise RuntimeError("verifiers reports " + ("; ".join(f"{e.type}: {e.message}" for e in errors) or "no end"))
        return float(next(trace.reward for trace in played.traces if trace.id == trace_id))

    async def _serve(self) -> int:
        web, begun = import_module("aiohttp.web"), asyncio.Event()

        async def hold() -> None:
            async with self._environment.serving():
                begun.set()
                await asyncio.Event().wait()

        self._holder = asyncio.create_task(hold())
        beginning = asyncio.create_task(begun.wait())
        await asyncio.wait([self._holder, beginning], return_when=asyncio.FIRST_COMPLETED)
        if self._holder.done():
            self._holder.result()
        application = web.Application(client_max_size=2**30)
        application.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return int(site._server.sockets[0].getsockname()[1])

    async def _complete(self, request: Any) -> Any:
        web, body, trace = import_module("aiohttp.web"), await request.json(), request.headers.get(_SESSION, "")
        try:
            message = await self.episodes[trace].ask(trace, body)
        except (asyncio.CancelledError, KeyError):
            return web.json_response({"error": {"message": "the episode is over"}}, status=410)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice, whole = {"index": 0, "finish_reason": reason}, {"id": "turn", "created": 0, "model": "policy"}
        if not body.get("stream"):
            return web.json_response(
                {**whole, "object": "chat.completion", "choices": [{**choice, "message": message}]}
            )
        calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls", []))]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunk = json.dumps({**whole, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n", content_type="text/event-stream")


@lru_cache(maxsize=4)
def _host(config: str, packages: str | None) -> _Host:
    """Return the one host of all episodes of a process."""
    if packages is not None:
        if not Path(packages).is_dir():
            raise ConfigError(f"{KEY}.packages={packages} is no folder; install verifiers into one: {INSTALL}")
        folder = str(Path(packages).resolve())
        sys.path.insert(0, folder)
        # For servers of tools, which verifiers starts; they import the file of the taskset too.
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", ""), os.getcwd()])
    try:
        version = import_module("importlib.metadata").version("verifiers")
    except ImportError as error:
        raise ConfigError(f"environment.function=verifiers: {error}; install it: {INSTALL}") from error
    if not version.startswith("0.4."):
        raise ConfigError(
            f"environment.function=verifiers: version {version} has another interface than 0.4: {INSTALL}"
        )
    try:
        return _Host(json.loads(config))
    except Exception as error:
        shown = json.dumps(redact(json.loads(config)))
        raise ConfigError(f"{KEY}: verifiers does not load {shown} ({type(error).__name__}: {error})") from error


def _module(name: str = "") -> Any:
    return import_module(f"verifiers.v1.{name}".removesuffix("."))


def _turns_module() -> ModuleType:
    """Make the module of a harness that plays an agent in this process and runs no code; for tasks that configure no other one."""
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
                        content = await _called(tools_of.call_mcp, call["function"], connections, dispatch)
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
                    if not message.get("tool_calls"):
                        return programs.ProgramResult(0, "", "")

    Turns.__module__ = _HARNESS
    module = ModuleType(_HARNESS)
    module.__dict__.update({"Turns": Turns, "__all__": ["Turns"]})
    return module


async def _called(call_mcp: Any, function: Mapping[str, str], connections: Any, dispatch: Mapping[str, Any]) -> Any:
    """Answer a call of a tool, also to mistakes of the policy."""
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


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)  # a KeyError names others


def _said(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Extract the parts of a message that a harness may not change."""
    calls = [(call["id"], *call["function"].values()) for call in message.get("tool_calls") or []]
    return message["role"], _text(message), calls


# ------------------------------------------------------------------------------------------------------------------ rows
def main(argv: Sequence[str] | None = None) -> int:
    """Write the prompts of a taskset; returns the exit status."""
    parser = argparse.ArgumentParser(description="Write the tasks of a taskset of verifiers as rows of prompts.")
    parser.add_argument("--options", required=True, help="environment.options, as JSON")
    parser.add_argument("--first", type=int, default=0, help="number of the first task")
    parser.add_argument("--rows", type=int, required=True, help="how many tasks, if there are as many")
    parser.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    parser.add_argument("--tools", type=Path, help="write the schemas of the tools to this file, for environment.tools")
    given = parser.parse_args(argv)
    try:
        rows, tools = asyncio.run(_openings(json.loads(given.options), given.first, given.rows))
        given.out.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        if given.tools is not None:
            given.tools.write_text(json.dumps(tools, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, ValueError, TypeError, RuntimeError, OSError) as error:
        print(for_terminal(f"error: {error}"), file=sys.stderr)  # noqa: T201
        return 2
    print(  # noqa: T201
        f"wrote {len(rows)} rows to {given.out}" + (f" and {len(tools)} tools to {given.tools}" if given.tools else "")
    )
    return 0


async def _openings(options: dict[str, Any], first: int, rows: int) -> tuple[list[dict[str, Any]], list[Any]]:
    """Read what the first tasks ask the policy, as rows; and their tools, which are the same in all of them."""
    prompts: list[dict[str, Any]] = []
    tools: list[Any] = []
    for number in count(first):
        episode = Verifiers(**options)
        if len(prompts) == rows:
            break
        try:
            asked = await episode.begin(number)
        except IndexError:
            break
        finally:
            await episode.close()
        if prompts and (asked.get("tools") or []) != tools:
            raise RuntimeError(f"task {number} has other tools than task {first}; a run has one list of them")
        tools = asked.get("tools") or []
        prompt = [{"role": message["role"], "content": _text(message)} for message in asked["messages"]]
        prompts.append({"prompt": prompt, "data_source": "verifiers", "extra_info": {"task": number}})
    return prompts, tools


if __name__ == "__main__":
    sys.exit(main())
