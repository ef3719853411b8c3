"""The group ``environment``: what answers the policy between its turns."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Choices, group, key, one_of
from rlhf_mcore.plugins import find_plugins


class AgentConfig(Group):
    """A program that plays whole episodes, and asks the policy over HTTP (`environment.function: agent`)."""

    command: Optional[list[str]] = key(
        None,
        "a program and its arguments: it reads the task as JSON, finds the endpoint in its environment, and may print a reward",
        null="`function` or `url`",
        more="`OPENAI_BASE_URL`, `OPENAI_API_KEY` and the same of Anthropic are set for it ([agents](guide/agents/index.md)).",
    )
    function: Optional[str] = key(
        None,
        "`path/to/file.py:name` of f(task, base_url, api_key), a coroutine or a function, which may return a reward",
        null="`command` or `url`",
    )
    url: Optional[str] = key(
        None,
        'where `{"task", "base_url", "api_key"}` is posted for each episode; the answer may have a reward',
        null="`command` or `function`",
    )
    timeout_s: float = key(600.0, "for one try of an episode", ABOVE_0)
    retries: int = key(0, "tries of an episode after the first, each from its beginning", AT_LEAST_0)
    max_output_kib: float = key(64.0, "most that a program prints, or a server answers", ABOVE_0)
    host: str = key("127.0.0.1", "address that the endpoint listens on; of this machine alone, unless it is changed")


class ContainerConfig(Group):
    """A container for each episode of an agent: it works there, and tests of the task grade what it has left."""

    kind: Optional[str] = key(
        None,
        "what containers are made of",
        Choices(
            {
                "sandbox": "the sandbox of programs: Linux namespaces, this machine's programs, files in memory; no images",
                "docker": "Docker's",
                "podman": "Podman's",
                "remote": "those of a service, at `url`",
            },
            adds=lambda name: name in find_plugins("containers"),
        ),
        null="there are none",
        more="`function: agent` ([agents](guide/agents/containers.md)).",
    )
    url: Optional[str] = key(
        None,
        "of the service, such as `http://10.0.0.7:8910`",
        null="none",
        more="`rlhf-mcore serve-containers` is one.",
    )
    token_env: Optional[str] = key(None, "environment variable that holds the token of the service", null="none")
    image: Optional[str] = key(None, "of tasks that name none", null="`python:3.11-slim`")
    memory_gib: float = key(2.0, "memory of a container", ABOVE_0)
    cpus: float = key(1.0, "cores of a container of Docker or Podman", ABOVE_0)
    network: bool = key(False, "whether containers of Docker or Podman reach a network")
    timeout_s: float = key(
        60.0,
        "for a command that has no time of its own; 5 times as long to have an image, and for each command of a task's setup",
        ABOVE_0,
    )
    tests_timeout_s: float = key(600.0, "for the tests of an episode; a task may have less", ABOVE_0)


class EnvironmentConfig(Group):
    """Set what answers the policy between its turns. Without ``function`` a response is a single turn."""

    function: Optional[str] = key(
        None,
        "`path/to/file.py:Class` with reset(row, seed) and step(action), `tools`, `gymnasium`, `openenv`, `verifiers` or `agent`",
        null="a response is one turn",
        more="One instance for each episode, in worker processes ([environments](guide/environments/index.md)).",
    )
    options: Optional[dict[str, Any]] = key(None, "arguments of its constructor", null="none")
    max_turns: int = key(8, "most turns of the policy in an episode", AT_LEAST_1)
    max_tokens: Optional[int] = key(
        None,
        "most tokens of an episode after its prompt, those of the environment included",
        AT_LEAST_1,
        null="as many as of one turn",
        more="`rollout.sampling.max_new_tokens` (of evaluations `evaluate.max_new_tokens`) bounds each turn.",
    )
    max_seconds: Optional[float] = key(
        None, "most time that an episode may take before its next turn begins", ABOVE_0, null="no limit"
    )
    tools: Optional[str] = key(
        None,
        "JSON file with schemas of tools as OpenAI's API takes them; the chat template writes them into the prompts",
        null="the prompts tell of tools, if there are any",
    )
    tool_parser: Optional[str] = key(
        None,
        "a parser of vLLM's by its name (`hermes`, `llama3_json`, `qwen3_coder`, ...): step(action) gets a message with `tool_calls`",
        null="step(action) gets the text of a turn",
    )
    score: str = key(
        "environment",
        "what an episode's score is",
        one_of(
            environment="the rewards of its steps",
            reward="what `reward` gives to the last turn",
            sum="both",
        ),
    )
    overlap: Optional[bool] = key(
        None,
        "an engine draws turns of other episodes while environments compute",
        null="true where `trainer.max_staleness` is above 0 and `rollout.deterministic_order` is false",
        more="Faster where a step takes long. What is drawn together then depends on the time, so that a run that was killed and "
        "resumed may differ from the uninterrupted one in the last bits.",
    )
    rewritten_history: str = key(
        "refuse",
        "a chat template that writes earlier turns differently when later ones follow",
        one_of(
            refuse="ends the run",
            keep="is used for new messages alone; what was sampled stays as it is",
        ),
        more="Templates that take out the reasoning of earlier turns are of this kind.",
    )
    agent: AgentConfig = group(AgentConfig, "a program that plays whole episodes")
    container: ContainerConfig = group(ContainerConfig, "where what agents do is done")
    branches: str = key(
        "all",
        "`function: agent`: what is learned from where an agent has rewritten its history",
        one_of(
            all="every token that was sampled, once",
            last="the branch of the last turn",
            longest="the branch with most sampled tokens",
        ),
    )
    timeout_s: float = key(60.0, "for one reset or step", ABOVE_0)
    memory_gib: float = key(8.0, "memory of a worker", ABOVE_0)
    workers: Optional[int] = key(
        None,
        "worker processes of an engine",
        AT_LEAST_1,
        null="the engine's share of the cores, at most 8",
        more="One with `async def` methods has many episodes under way at a time, others one call.",
    )
    env: list[str] = key([], "environment variables that workers see, as `reward.env`")
