"""Rules for the keys of ``environment``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rlhf_mcore.config.choices import AGENT, ASKING, CONTRIB_ENVIRONMENTS, ENVIRONMENTS, ROLLOUT
from rlhf_mcore.config.errors import ConfigError, FileProblem
from rlhf_mcore.config.schema import Config, EnvironmentConfig
from rlhf_mcore.foreign import read_bytes
from rlhf_mcore.plugins import find_plugins, missing_plugin
from rlhf_mcore.readers.user_functions import OwnFunction, function_problems, is_file_spec

_TOOLS = '[{"type": "function", "function": {"name": ..., "description": ..., "parameters": {JSON schema}}}, ...]'
_CORE_CONTAINERS = ("sandbox", "docker")


def environment_problems(cfg: Config) -> Iterator[str]:
    """List problems with the environment of a run: its function, tools, tokens, agent and containers."""
    own = cfg.environment
    try:
        read_tools(own.tools)
    except ConfigError as error:
        yield FileProblem(str(error))
    if own.container.kind is not None:
        yield from _container_problems(own, own.container.kind)
    if own.function == AGENT:
        yield from _agent_problems(own)
    if own.function in ASKING:
        yield from _branch_problems(cfg)
    yield from _rollout_problems(cfg)
    if own.function is None:
        return
    named = f"environment.function={own.function}"
    if is_file_spec(own.function):
        yield from map(FileProblem, function_problems(own.function, "environment.function"))
    elif own.function in CONTRIB_ENVIRONMENTS:
        if problem := missing_plugin("environments", own.function, named, package="environments"):
            yield problem
    elif own.function not in (*ENVIRONMENTS, ROLLOUT) and own.function not in find_plugins("environments"):
        yield f"{named} is neither path/to/file.py:Class nor one of {', '.join(ENVIRONMENTS)}; correct it"
    if traces := cfg.logging.episode_traces:
        needed_by = f"logging.episode_traces={traces}"
        if problem := missing_plugin("traces", "opentelemetry", needed_by, package="traces"):
            yield problem
    if own.max_tokens is not None and own.max_tokens < (turn := cfg.rollout.sampling.max_new_tokens):
        episode = f"environment.max_tokens={own.max_tokens} (per episode)"
        yield f"{episode} is less than rollout.sampling.max_new_tokens={turn} (per turn); raise it, or lower that"


def _rollout_problems(cfg: Config) -> Iterator[str]:
    """List problems with ``rollout.function``, and with keys of ``environment`` that it does not use."""
    own, spec = cfg.environment, cfg.rollout.function
    if spec is None:
        if own.function == ROLLOUT:
            yield "environment.function=rollout needs a function; set rollout.function=path/to/file.py:name instead"
        return
    named = f"rollout.function={spec}"
    yield from map(FileProblem, function_problems(spec, "rollout.function"))
    if own.function != ROLLOUT:
        yield f"{named} and environment.function={own.function} both define the turns of a rollout; remove one of them"
        return
    if isinstance(spec, OwnFunction) and cfg.rollout.placement == "disaggregated":
        yield f"{named}: an engine under Ray cannot call a function of this process; write it to a file"
    for name in ("score", "tool_parser"):
        if getattr(own, name) != getattr(EnvironmentConfig(), name):
            yield f"environment.{name}={getattr(own, name)} has no effect with {named}; remove it"
    yield from _branch_problems(cfg)


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


def _agent_problems(own: EnvironmentConfig) -> Iterator[str]:
    """List problems with an agent. It needs exactly one of ``command``, ``function`` and ``url``."""
    keys = [f"environment.agent.{name}" for name in ("command", "function", "url")]
    given = [key for key in keys if getattr(own.agent, key.rpartition(".")[2])]
    if len(given) != 1:
        yield f"environment.function=agent needs exactly one of {', '.join(keys)}, found {' and '.join(given) or 'none'}; set one"
    if own.agent.function is not None:
        yield from map(FileProblem, function_problems(own.agent.function, "environment.agent.function"))
    if own.options is not None:
        yield "environment.options has no effect with environment.function=agent; remove it, and configure the agent in its own file"


def _container_problems(own: EnvironmentConfig, kind: str) -> Iterator[str]:
    """List problems with containers: plug-ins, the agent, and keys of another kind."""
    given, named = own.container, f"environment.container.kind={kind}"
    needed = [] if kind in _CORE_CONTAINERS else [("containers", kind, named)]
    for name in ("command", "url"):
        if getattr(own.agent, name):
            needed.append(("container_extras", "lending", f"environment.agent.{name} with environment.container.kind"))
    for plugin in needed:
        if problem := missing_plugin(*plugin, package="containers"):
            yield problem
    if own.function != AGENT:
        yield f"{named} needs an agent, found environment.function={own.function}; set environment.function=agent, or remove it"
    if (kind == "remote") != (given.url is not None):
        wants = "names the service" if kind == "remote" else "has no effect"
        yield f"{named} and environment.container.url={given.url}: the url {wants}; set both kind=remote and url, or neither"
    if kind == "sandbox" and (given.network or given.image is not None):
        name = "network" if given.network else "image"
        yield f"environment.container.{name} needs Docker or Podman, found {named}; remove it, or choose another kind"


def _branch_problems(cfg: Config) -> Iterator[str]:
    """List problems with the branches of episodes."""
    if cfg.environment.branches == "all" and (loss := cfg.algorithm.policy_loss) in ("gspo", "gmpo"):
        yield (
            f"algorithm.policy_loss={loss} uses one ratio per response, but an agent's episode may have several branches, so "
            "the loss would depend on their number; set it to ppo_clip or cispo, or environment.branches to last or longest"
        )
