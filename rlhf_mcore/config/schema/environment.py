"""The group ``environment``: the environment that answers the policy between its turns."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Optional

from rlhf_mcore.config.choices import AGENT
from rlhf_mcore.config.schema.group import (
    Choices,
    Group,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    group,
    is_url,
    key,
)
from rlhf_mcore.plugins import find_plugins

Url = Annotated[str, Choices(allows=is_url, form="a URL that begins with http:// or https://")]
CONTAINERS = Choices(("sandbox", "docker", "podman", "remote"), lambda name: name in find_plugins("containers"))

_AGENT = f"environment.function={AGENT}"


class AgentConfig(Group):
    """A program that runs whole episodes and requests turns from the policy over HTTP (`environment.function: agent`)."""

    command: Optional[list[str]] = key(None, "program and arguments; or set `function` or `url`", only_with=_AGENT)
    """It reads the task as JSON, finds the endpoint in its environment (`OPENAI_BASE_URL`, `OPENAI_API_KEY` and the
    Anthropic equivalents), and may print a reward ([agents](guide/agents/index.md))."""
    function: Optional[str] = key(None, "`path/to/file.py:name` of f(task, base_url, api_key)", only_with=_AGENT)
    """A coroutine or a function, which may return a reward."""
    url: Optional[Url] = key(None, "URL to which each episode is posted", only_with=_AGENT)
    """The body is `{"task", "base_url", "api_key"}`; the answer may contain a reward."""
    timeout_s: PositiveFloat = key(600.0, "time limit per attempt of an episode in seconds")
    retries: NonNegativeInt = key(0, "retries of a failed episode, each from its start")
    max_output_kib: PositiveFloat = key(64.0, "maximum output of a program, or answer of a server, in KiB")
    host: str = key("127.0.0.1", "address on which the endpoint listens; by default only this machine can connect")


class ContainerConfig(Group):
    """A container per episode of an agent. The agent works in it, and the task's tests grade its final state."""

    kind: Optional[Annotated[str, CONTAINERS]] = key(None, "container provider; null: no containers")
    """`sandbox`: Linux namespaces with this machine's programs and files in memory; no images. `remote`: a service at
    `url`. Only with `function: agent` ([agents](guide/agents/containers.md))."""
    url: Optional[Url] = key(None, "`remote`: URL of the service, such as `http://10.0.0.7:8910`")
    """`rlhf-mcore serve-containers` is such a service."""
    token_env: Optional[str] = key(None, "`remote`: environment variable that contains the service's token")
    image: Optional[str] = key(None, "image for tasks that name none; null: `python:3.11-slim`")
    memory_gib: PositiveFloat = key(2.0, "memory of a container in GiB")
    cpus: PositiveFloat = key(1.0, "Docker, Podman: cores per container")
    network: bool = key(False, "Docker, Podman: allow network access")
    timeout_s: PositiveFloat = key(60.0, "time limit in seconds of a command without its own limit")
    """The image, and each setup command of a task, may take 5 times as long."""
    tests_timeout_s: PositiveFloat = key(600.0, "time limit in seconds for an episode's tests; a task may lower it")


class EnvironmentConfig(Group):
    """Set the environment that answers the policy between its turns. Without ``function`` a response is a single turn."""

    function: Optional[str] = key(None, "`file.py:Class`, `tools`, `gymnasium`, `openenv`, `verifiers` or `agent`")
    """A class has reset(row, seed) and step(action). There is one instance per episode, in worker processes
    ([environments](guide/environments/index.md)). `null`: a response is one turn, without an environment."""
    options: Optional[dict[str, Any]] = key(None, "arguments of the constructor")
    max_turns: PositiveInt = key(8, "maximum number of policy turns per episode")
    max_tokens: Optional[PositiveInt] = key(None, "maximum tokens of an episode after its prompt; null: as a turn")
    """Tokens of the environment are included. `rollout.sampling.max_new_tokens` (in evaluations
    `evaluate.max_new_tokens`) limits each turn."""
    max_seconds: Optional[PositiveFloat] = key(None, "seconds after which an episode starts no further turn")
    tools: Optional[str] = key(None, "JSON file with tool schemas in OpenAI's format, for the chat template")
    """`null`: prompts describe tools themselves, if there are any."""
    tool_parser: Optional[str] = key(None, "vLLM tool parser, such as `hermes`, `llama3_json` or `qwen3_coder`")
    """step(action) then receives a message with `tool_calls`, else the text of a turn."""
    score: Literal["environment", "reward", "sum"] = key("environment", "score of an episode")
    """`environment`: sum of its step rewards. `reward`: score of the last turn by `reward`. `sum`: both."""
    overlap: Optional[bool] = key(None, "an engine samples turns of other episodes while environments compute")
    """Faster if environment steps take long, but a run that was killed and resumed may differ in the last bits. `null`:
    false with `rollout.deterministic_order`. Otherwise true for agents, and if `trainer.max_staleness` is above 0."""
    rewritten_history: Literal["refuse", "keep"] = key("refuse", "if a chat template changes earlier turns")
    """`refuse`: the run ends with an error. `keep`: the template formats only new messages; sampled tokens stay
    unchanged. Templates that remove the reasoning of earlier turns do this."""
    agent: AgentConfig = group(AgentConfig, "a program that runs whole episodes")
    container: ContainerConfig = group(ContainerConfig, "containers in which agents work")
    branches: Literal["all", "last", "longest"] = key("all", "trained branches if an episode has several")
    """Agents and rollout functions may rewrite the history. `all`: each sampled token counts once. `last`: the branch
    of the last turn. `longest`: the branch with the most sampled tokens."""
    timeout_s: PositiveFloat = key(60.0, "time limit in seconds for one reset or step")
    memory_gib: PositiveFloat = key(8.0, "memory of a worker in GiB")
    workers: Optional[PositiveInt] = key(None, "worker processes per engine; null: its share of the cores, at most 8")
    """A worker runs one call at a time, or many episodes concurrently if the environment has `async def` methods."""
    env: list[str] = key([], "environment variables that workers see, as in `reward.env`")
