"""The group ``environment``: the environment that answers the policy between its turns."""

from __future__ import annotations

from typing import Any, Optional

from rlhf_mcore.config.schema.group import Group
from rlhf_mcore.config.schema.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, Choices, group, key, one_of
from rlhf_mcore.plugins import find_plugins


class AgentConfig(Group):
    """A program that runs whole episodes and requests turns from the policy over HTTP (`environment.function: agent`)."""

    command: Optional[list[str]] = key(
        None,
        "program and arguments; it reads the task as JSON, finds the endpoint in its environment, and may print a reward",
        null="`function` or `url`",
        more="`OPENAI_BASE_URL`, `OPENAI_API_KEY` and the Anthropic equivalents are set for it "
        "([agents](guide/agents/index.md)).",
    )
    function: Optional[str] = key(
        None,
        "`path/to/file.py:name` of f(task, base_url, api_key), a coroutine or a function, which may return a reward",
        null="`command` or `url`",
    )
    url: Optional[str] = key(
        None,
        'URL to which `{"task", "base_url", "api_key"}` is posted for each episode; the answer may contain a reward',
        null="`command` or `function`",
    )
    timeout_s: float = key(600.0, "time limit per attempt of an episode in seconds", ABOVE_0)
    retries: int = key(0, "retries of a failed episode, each from its start", AT_LEAST_0)
    max_output_kib: float = key(64.0, "maximum output of a program, or answer of a server, in KiB", ABOVE_0)
    host: str = key("127.0.0.1", "address on which the endpoint listens; by default only this machine can connect")


class ContainerConfig(Group):
    """A container per episode of an agent. The agent works in it, and the task's tests grade its final state."""

    kind: Optional[str] = key(
        None,
        "container provider",
        Choices(
            {
                "sandbox": "Linux namespaces with this machine's programs and files in memory; no images",
                "docker": "",
                "podman": "",
                "remote": "a service at `url`",
            },
            adds=lambda name: name in find_plugins("containers"),
        ),
        null="no containers",
        more="Only with `function: agent` ([agents](guide/agents/containers.md)).",
    )
    url: Optional[str] = key(
        None,
        "`remote`: URL of the service, such as `http://10.0.0.7:8910`",
        null="none",
        more="`rlhf-mcore serve-containers` is such a service.",
    )
    token_env: Optional[str] = key(
        None, "`remote`: environment variable that contains the service's token", null="none"
    )
    image: Optional[str] = key(None, "image for tasks that name none", null="`python:3.11-slim`")
    memory_gib: float = key(2.0, "memory of a container in GiB", ABOVE_0)
    cpus: float = key(1.0, "Docker, Podman: cores per container", ABOVE_0)
    network: bool = key(False, "Docker, Podman: allow network access")
    timeout_s: float = key(
        60.0,
        "time limit in seconds of a command without its own limit; the image, and each setup command of a task, may take "
        "5 times as long",
        ABOVE_0,
    )
    tests_timeout_s: float = key(
        600.0, "time limit in seconds for the tests of an episode; a task may set a lower limit", ABOVE_0
    )


class EnvironmentConfig(Group):
    """Set the environment that answers the policy between its turns. Without ``function`` a response is a single turn."""

    function: Optional[str] = key(
        None,
        "`path/to/file.py:Class` with reset(row, seed) and step(action), `tools`, `gymnasium`, `openenv`, `verifiers` or "
        "`agent`",
        null="a response is one turn, without an environment",
        more="There is one instance per episode, in worker processes ([environments](guide/environments/index.md)).",
    )
    options: Optional[dict[str, Any]] = key(None, "arguments of the constructor", null="none")
    max_turns: int = key(8, "maximum number of policy turns per episode", AT_LEAST_1)
    max_tokens: Optional[int] = key(
        None,
        "maximum number of tokens of an episode after its prompt, including tokens of the environment",
        AT_LEAST_1,
        null="the maximum length of one turn",
        more="`rollout.sampling.max_new_tokens` (in evaluations `evaluate.max_new_tokens`) limits each turn.",
    )
    max_seconds: Optional[float] = key(
        None, "duration in seconds after which an episode starts no further turn", ABOVE_0, null="no limit"
    )
    tools: Optional[str] = key(
        None,
        "JSON file with tool schemas in OpenAI's format; the chat template writes them into the prompts",
        null="prompts describe tools themselves, if there are any",
    )
    tool_parser: Optional[str] = key(
        None,
        "name of a vLLM tool parser (`hermes`, `llama3_json`, `qwen3_coder`, ...); step(action) then receives a message "
        "with `tool_calls`",
        null="step(action) receives the text of a turn",
    )
    score: str = key(
        "environment",
        "score of an episode",
        one_of(
            environment="sum of its step rewards",
            reward="score of the last turn by `reward`",
            sum="both",
        ),
    )
    overlap: Optional[bool] = key(
        None,
        "an engine samples turns of other episodes while environments compute",
        null="true if `trainer.max_staleness` is above 0 and `rollout.deterministic_order` is false",
        more="This is faster if environment steps take long. Batches then depend on timing, so a run that was killed and "
        "resumed may differ from an uninterrupted run in the last bits.",
    )
    rewritten_history: str = key(
        "refuse",
        "handling of a chat template that changes earlier turns when later turns follow",
        one_of(
            refuse="the run ends with an error",
            keep="the template formats only new messages; sampled tokens stay unchanged",
        ),
        more="Templates that remove the reasoning of earlier turns do this.",
    )
    agent: AgentConfig = group(AgentConfig, "a program that runs whole episodes")
    container: ContainerConfig = group(ContainerConfig, "containers in which agents work")
    branches: str = key(
        "all",
        "`function: agent`: trained branches of an episode whose history the agent rewrote",
        one_of(
            all="all branches; each sampled token counts once",
            last="the branch of the last turn",
            longest="the branch with the most sampled tokens",
        ),
    )
    timeout_s: float = key(60.0, "time limit in seconds for one reset or step", ABOVE_0)
    memory_gib: float = key(8.0, "memory of a worker in GiB", ABOVE_0)
    workers: Optional[int] = key(
        None,
        "worker processes per engine",
        AT_LEAST_1,
        null="the engine's share of the cores, at most 8",
        more="A worker runs one call at a time, or many episodes concurrently if the environment has `async def` methods.",
    )
    env: list[str] = key([], "environment variables that workers see, as in `reward.env`")
