"""The task of a container: image, files, setup commands, and tests after the agent's work.

A row contains its task in ``extra_info.container``, as an object or as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.plugins import load_plugin

TESTS_TIMEOUT_S = 600.0
COLUMN = "extra_info.container"
_KEYS = {"image", "workdir", "env", "files", "setup", "tests", "folder"}
_TESTS = {"command", "files", "env", "timeout_s"}


@dataclass(frozen=True, slots=True)
class TaskTests:
    """Tests that score the work of an agent. ``files`` are written before ``command`` runs; the agent does not see them.

    The score is the number that the command writes into the folder ``workplace.REWARDS``. If it writes none, the score is 1 for
    exit code 0, and 0 otherwise.
    """

    command: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TESTS_TIMEOUT_S
    needs_file: bool = False  # without a written reward the score is 0, even for exit code 0


@dataclass(frozen=True, slots=True)
class Task:
    """The initial state of a container, and its tests. ``context``: a Dockerfile and the files next to it, by path."""

    image: str | None = None
    context: dict[str, bytes] = field(default_factory=dict)
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    tests: TaskTests | None = None


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of a container, from ``environment.container``. After ``lives_s`` seconds it stops itself."""

    timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    memory_bytes: int = 2 * 2**30
    cpus: float = 1.0
    network: bool = False
    lives_s: float = 3600.0


USUAL = ContainerLimits()


# ------------------------------------------------------------------------------------------------------- tasks of rows
def task_of(extra_info: Mapping[str, Any]) -> Task:
    """Read the task of a row. A row without a task gets a container without files, setup and tests.

    Raises:
        ConfigError: the task is not in the format of docs/guide/agents/containers.md.
    """
    given = extra_info.get("container")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{COLUMN} is not JSON: {error}") from error
    if given is None:
        return Task()
    if not isinstance(given, Mapping):
        raise ConfigError(f"{COLUMN} must be an object, found {given!r:.60}")
    told = {name: value for name, value in given.items() if value is not None}  # parquet adds null fields of other rows
    if unknown := sorted(told.keys() - _KEYS):
        raise ConfigError(
            f"{COLUMN} has unknown fields: {', '.join(unknown)}; allowed fields: {', '.join(sorted(_KEYS))}"
        )
    base = Task()
    if "folder" in told:
        read_folder = load_plugin("container_extras", "folder", f"{COLUMN}.folder", package="containers")
        base = read_folder(_text(told, "folder"))
    return replace(
        base,
        image=_text(told, "image") if "image" in told else base.image,
        workdir=_path(told) if "workdir" in told else base.workdir,
        env={**base.env, **_env(told)},
        files={**base.files, **_files(told)},
        setup=(*base.setup, *_commands(told, "setup")),
        tests=_tests(told["tests"]) if "tests" in told else base.tests,
    )


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told[name]
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ConfigError(f"{COLUMN}.{name} must be a non-empty text, found {value!r:.60}")
    return value


def _path(told: Mapping[str, Any]) -> str:
    path = _text(told, "workdir")
    if not path.startswith("/"):
        raise ConfigError(f"{COLUMN}.workdir={path}: give an absolute path")
    return path


def _env(told: Mapping[str, Any]) -> dict[str, str]:
    given = told.get("env", {})
    if not isinstance(given, Mapping) or not all(name and "=" not in name for name in given):
        raise ConfigError(f"{COLUMN}.env must be an object of texts, found {given!r:.60}")
    return {str(name): str(value) for name, value in given.items() if value is not None}


def _files(told: Mapping[str, Any]) -> dict[str, bytes]:
    given = told.get("files", {})
    if not isinstance(given, Mapping) or not all(isinstance(content, (str, type(None))) for content in given.values()):
        raise ConfigError(f"{COLUMN}.files must be an object of paths and texts, found {given!r:.60}")
    return {path: content.encode(errors="replace") for path, content in given.items() if content is not None}


def _commands(told: Mapping[str, Any], name: str) -> list[str]:
    given = told.get(name, [])
    commands = [given] if isinstance(given, str) else given
    if not isinstance(commands, (list, tuple)) or not all(isinstance(each, str) for each in commands):
        raise ConfigError(f"{COLUMN}.{name} must be a command or a list of commands, found {given!r:.60}")
    return list(commands)


def _tests(given: Any) -> TaskTests:
    if isinstance(given, (str, list, tuple)):
        return TaskTests(" && ".join(_commands({"tests": given}, "tests")))
    if not isinstance(given, Mapping):
        raise ConfigError(f"{COLUMN}.tests must be a command or an object, found {given!r:.60}")
    told = {name: value for name, value in given.items() if value is not None}
    if (unknown := sorted(told.keys() - _TESTS)) or "command" not in told:
        what = f"has unknown fields: {', '.join(unknown)}" if unknown else "has no command"
        raise ConfigError(f"{COLUMN}.tests {what}; allowed fields: {', '.join(sorted(_TESTS))}")
    seconds = told.get("timeout_s", TESTS_TIMEOUT_S)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{COLUMN}.tests.timeout_s must be a number above 0, found {seconds!r:.60}")
    command = " && ".join(_commands(told, "command"))
    return TaskTests(command, _files(told), _env(told), float(seconds))
