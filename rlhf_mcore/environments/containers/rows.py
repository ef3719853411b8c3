"""Tasks in rows: in ``extra_info.container``, an object or its JSON, and as sets of software tasks have them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.environments.containers.folders import read_folder
from rlhf_mcore.environments.containers.task import TESTS_TIMEOUT_S, Task, TaskTests

COLUMN = "extra_info.container"
_KEYS = {"image", "workdir", "env", "files", "setup", "tests", "folder"}
_TESTS = {"command", "files", "env", "timeout_s"}
_PATCH = "/tests/tests.patch"


def task_of(extra_info: Mapping[str, Any]) -> Task:
    """Read the task of a row. One that tells nothing gets an empty container.

    Raises:
        ConfigError: it is not as docs/agents.md says.
    """
    given = extra_info.get("container")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{COLUMN} is no JSON: {error}") from error
    if given is None:
        return Task()
    if not isinstance(given, Mapping):
        raise ConfigError(f"{COLUMN} must be an object, found {given!r:.60}")
    told = {name: value for name, value in given.items() if value is not None}  # parquet has the fields of all rows
    if unknown := sorted(told.keys() - _KEYS):
        raise ConfigError(f"{COLUMN} has unknown fields: {', '.join(unknown)}; there are {', '.join(sorted(_KEYS))}")
    base = Task()
    if "folder" in told:
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
        raise ConfigError(f"{COLUMN}.{name} must be a text that is not empty, found {value!r:.60}")
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
        raise ConfigError(f"{COLUMN}.tests {what}; there are {', '.join(sorted(_TESTS))}")
    seconds = told.get("timeout_s", TESTS_TIMEOUT_S)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ConfigError(f"{COLUMN}.tests.timeout_s must be a number above 0, found {seconds!r:.60}")
    command = " && ".join(_commands(told, "command"))
    return TaskTests(command, _files(told), _env(told), float(seconds))


def software_task(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read a row as sets of software tasks have it (SWE-bench, arXiv 2310.06770, and its kin): image, setup, tests.

    Tests are a command (``tests``, ``test_command``, ``test_cmd``, ``eval_script``), or the names of those that have to pass
    (``FAIL_TO_PASS`` and ``PASS_TO_PASS``) after ``test_patch``. Returns what ``extra_info.container`` holds; None: it has no tests.
    """
    image = _first(row, "image", "docker_image", "image_name")
    told: dict[str, Any] = {"image": image, "workdir": _first(row, "workdir", "repo_path")}
    told["setup"] = _first(row, "setup", "setup_script", "pre_install")
    files, before = {}, ""
    if patch := _first(row, "test_patch"):
        files, before = {_PATCH: patch}, f"git apply {_PATCH} && "
    if command := _first(row, "tests", "test_command", "test_cmd", "eval_script"):
        command = " && ".join(command) if isinstance(command, (list, tuple)) else command
    elif names := [*_names(row, "FAIL_TO_PASS"), *_names(row, "PASS_TO_PASS")]:
        command = f"python -m pytest -q {shlex.join(names)}"
    else:
        return None
    told["tests"] = {"command": before + command, "files": files or None}
    return {name: value for name, value in told.items() if value is not None}


def _first(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name)), None)


def _names(row: Mapping[str, Any], column: str) -> list[str]:
    given = row.get(column) or []
    if isinstance(given, str):  # SWE-bench stores lists as JSON
        given = json.loads(given)
    return [str(name) for name in given]
