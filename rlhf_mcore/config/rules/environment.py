"""Rules for the keys of ``environment``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlhf_mcore.config.choices import AGENT, ASKING, CONTRIB_ENVIRONMENTS, ENVIRONMENTS
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.schema import Config, EnvironmentConfig
from rlhf_mcore.foreign import read_bytes
from rlhf_mcore.plugins import find_plugins, missing_plugin
from rlhf_mcore.readers.user_functions import function_problems, is_file_spec

_TOOLS = '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema}}}, ...]'
_KIND = "environment.container.kind"
_CORE_CONTAINERS = ("sandbox", "docker")
_CONTAINERS = (*_CORE_CONTAINERS, "podman", "remote")


def environment_problems(cfg: Config) -> Iterator[str]:
    """List problems with the environment of a run: its function, tools, tokens, agent and containers."""
    own = cfg.environment
    try:
        read_tools(own.tools)
    except ConfigError as error:
        yield FileProblem(str(error))
    yield from _agent_problems(cfg)
    if own.function is None:
        return
    named = f"environment.function={own.function}"
    if is_file_spec(own.function):
        yield from map(FileProblem, function_problems(own.function, "environment.function"))
    elif own.function in CONTRIB_ENVIRONMENTS:
        if problem := missing_plugin("environments", own.function, named, package="environments"):
            yield problem
    elif own.function not in ENVIRONMENTS and own.function not in find_plugins("environments"):
        yield f"{named} is neither path/to/file.py:Class nor one of {', '.join(ENVIRONMENTS)}; correct it"
    if traces := cfg.logging.episode_traces:
        needed_by = f"logging.episode_traces={traces}"
        if problem := missing_plugin("traces", "opentelemetry", needed_by, package="traces"):
            yield problem
    if own.max_tokens is not None and own.max_tokens < cfg.rollout.sampling.max_new_tokens:
        yield (
            f"environment.max_tokens={own.max_tokens} (per episode) is less than rollout.sampling.max_new_tokens="
            f"{cfg.rollout.sampling.max_new_tokens} (per turn); raise it, or lower that"
        )


def read_tools(path: str | None) -> list[dict[str, Any]]:
    """Read tool schemas for prompts from a JSON file in OpenAI's format. Return [] for None.

    Raises:
        ConfigError: the file does not exist, or contains anything else.
    """
    if path is None:
        return []
    shown = f"environment.tools={path}"
    data = read_bytes(path, limit=2**20, where=shown, remedy="correct the path")
    try:
        tools = json.loads(data)
        names = [tool["function"]["name"] for tool in tools if tool["type"] == "function"]
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{shown} is not JSON ({error}); write {_TOOLS}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{shown} is not of the form {_TOOLS}") from error
    if not names or len(names) != len(tools) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"{shown} is not of the form {_TOOLS}")
    return list(tools)


def _agent_problems(cfg: Config) -> Iterator[str]:
    """List problems with an agent. It needs exactly one of ``command``, ``function`` and ``url``."""
    own, agent = cfg.environment, cfg.environment.agent
    kinds = [name for name in ("command", "function", "url") if getattr(agent, name)]
    if own.function in ASKING:
        yield from _asking_problems(cfg)
    kind = own.container.kind  # the schema rejects an unknown kind
    if kind in _CONTAINERS or kind in find_plugins("containers"):
        yield from _container_problems(own)
    if own.function != AGENT:
        for name in kinds:
            yield f"environment.agent.{name} is set, but environment.function={own.function}; set environment.function=agent"
        return
    if len(kinds) != 1:
        there = " and ".join(f"environment.agent.{name}" for name in kinds) or "none"
        yield (
            "environment.function=agent needs exactly one of environment.agent.command, environment.agent.function and "
            f"environment.agent.url, found {there}; set one"
        )
    if agent.function is not None:
        yield from map(FileProblem, function_problems(agent.function, "environment.agent.function"))
    if agent.url is not None and not agent.url.startswith(("http://", "https://")):
        yield f"environment.agent.url={agent.url}: it must begin with http:// or https://"
    if own.options is not None:
        yield "environment.options has no effect with environment.function=agent; remove it, and configure the agent in its own file"


def _container_problems(own: EnvironmentConfig) -> Iterator[str]:
    """List problems with containers: plug-ins, the agent, and keys of another kind."""
    given = own.container
    assert given.kind is not None
    needed = [] if given.kind in _CORE_CONTAINERS else [("containers", given.kind, f"{_KIND}={given.kind}")]
    for name in ("command", "url"):
        if getattr(own.agent, name):
            needed.append(("container_extras", "lending", f"environment.agent.{name} with {_KIND}"))
    for plugin in needed:
        if problem := missing_plugin(*plugin, package="containers"):
            yield problem
    if own.function != AGENT:
        yield (
            f"environment.container.kind={given.kind} needs an agent, found environment.function={own.function}; set "
            "environment.function=agent, or remove it"
        )
    if (given.kind == "remote") != (given.url is not None):
        wants = "names the service" if given.kind == "remote" else "has no effect"
        yield (
            f"environment.container.kind={given.kind} and environment.container.url={given.url}: the url {wants}; set both "
            "kind=remote and url, or neither"
        )
    if given.url is not None and not given.url.startswith(("http://", "https://")):
        yield f"environment.container.url={given.url}: it must begin with http:// or https://"
    if given.kind == "sandbox" and (given.network or given.image is not None):
        name = "network" if given.network else "image"
        yield f"environment.container.{name} needs Docker or Podman, found {_KIND}=sandbox; remove it, or choose another kind"


def _asking_problems(cfg: Config) -> Iterator[str]:
    """List problems with an environment that requests turns from an endpoint."""
    own = cfg.environment
    if own.overlap is False:
        yield "environment.overlap=False: an engine always samples turns of agents when they are requested; set it to null"
    if own.branches == "all" and cfg.algorithm.policy_loss in ("gspo", "gmpo"):
        yield (
            f"algorithm.policy_loss={cfg.algorithm.policy_loss} uses one ratio per response, but an agent's episode may have "
            "several branches with separate ratios, so the loss would depend on their number; set it to ppo_clip or cispo, or "
            "set environment.branches to last or longest"
        )
