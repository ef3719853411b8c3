"""Reading what verl reads: hydra overrides on a command line, and YAML files with references."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.migration.shell_words import named_unknowns
from rlhf_mcore.config.yaml_text import MAX_REFERENCES, count_references, examine, interpolated_texts, load_yaml
from rlhf_mcore.foreign import shorten

ROOTS = (
    "actor_rollout_ref",
    "critic",
    "reward_model",
    "reward",
    "custom_reward_function",
    "algorithm",
    "data",
    "trainer",
    "global_profiler",
    "ray_kwargs",
    "ray_init",
    "transfer_queue",
)
_OVERRIDE = re.compile(rf"^\+{{0,2}}((?:{'|'.join(ROOTS)})(?:\.[\w-]+)+)=(.*)$", re.DOTALL)


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Keys and values of the ``a.b=c`` among the words of a command line."""
    found = {}
    for word in words:
        match = _OVERRIDE.match(word)
        if match:
            found[match[1]] = named(_parsed(match[2]))
    return found


def _parsed(text: str) -> Any:
    try:
        value = load_yaml(text, "override")
    except ConfigError:
        return text
    return _number(value)


def named(value: Any) -> Any:
    """A value of a script, with what is not in the script as text that our configuration understands."""
    if isinstance(value, list):
        return [named(item) for item in value]
    if isinstance(value, dict):
        return {str(key): named(item) for key, item in value.items()}
    return named_unknowns(value) if isinstance(value, str) else value


def _number(value: Any) -> Any:
    """YAML 1.1 takes 1e-6 for a text."""
    try:
        return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", value) else value
    except ValueError:
        return value


def read_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Keys and values of a YAML file, references among them resolved where that is possible.

    Raises:
        ConfigError: a key or a value is none that OmegaConf has.
    """
    ours = {key: value for key, value in tree.items() if key in ROOTS}
    leaves = dict(_leaves(ours, ""))
    try:
        cfg = OmegaConf.create(ours)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = (str(error) or "nested too deep").splitlines()[0]
        raise ConfigError(
            f"the file holds what verl itself cannot read ({shorten(reason, 200)}); correct it"
        ) from error
    resolvable = _resolvable(leaves)
    found = {key: _number(_resolved(cfg, key, value) if key in resolvable else value) for key, value in leaves.items()}
    return {key: value for key, value in found.items() if value not in (None, [], {})}


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", value


def _resolvable(leaves: Mapping[str, Any]) -> set[str]:
    """Keys whose references may be resolved: not those that multiply what they refer to, nor those that come to a resolver.

    The environment is the user's: ``${oc.env:NAME}`` stays as it is written.
    """
    references: dict[str, list[str]] = {}
    calling: set[str] = set()
    for key, value in leaves.items():
        with suppress(ValueError, OmegaConfBaseException):
            if any(interpolated_texts(value)):
                found = examine(value)
                references[key] = found.references
                calling |= {key} if found.resolvers else set()
    known: dict[str, int] = {}
    few = {key for key in references if count_references(key, references, known) <= MAX_REFERENCES}
    while more := {
        key
        for key in few - calling
        if any(
            name.startswith(reference.lstrip(".")) or name.endswith(reference)
            for reference in references[key]
            for name in calling
        )
    }:
        calling |= more
    return few - calling


def _resolved(cfg: Any, key: str, value: Any) -> Any:
    if "${" not in str(value):
        return value
    try:
        found = OmegaConf.select(cfg, key)
    except (OmegaConfBaseException, RecursionError):
        return value
    return OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
