"""Read task directories of Terminal-Bench (``task.yaml``) and of Harbor (``task.toml``).

harborframework.com/docs/tasks describes the formats, and /docs/task-difference the older format.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.settings import load_yaml
from rlhf_mcore.environments.containers.task import TESTS_TIMEOUT_S, Task, TaskTests
from rlhf_mcore.foreign import read_bytes

HARBOR, TERMINAL = "task.toml", "task.yaml"
MAX_FILE_BYTES = 2**24
MAX_BYTES = 2**26  # limit for all files of a task
_NO_CONTEXT = {TERMINAL, "solution.sh", "solution.yaml", "run-tests.sh", "docker-compose.yaml"}


def is_task(folder: Path) -> bool:
    """Return whether a directory is a task."""
    return (folder / HARBOR).is_file() or (folder / TERMINAL).is_file()


def instruction_of(folder: Path) -> str:
    """Read the instruction for the agent.

    Raises:
        ConfigError: there is no instruction.
    """
    if (folder / HARBOR).is_file():
        return _read(folder / "instruction.md").decode(errors="replace").strip()
    text = _settings(folder / TERMINAL).get("instruction")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{folder / TERMINAL}: it has no instruction")
    return text.strip()


def read_folder(name: str) -> Task:
    """Read the container and the tests of a task directory.

    Raises:
        ConfigError: the directory is not a task, or the task needs several containers, several steps or another user.
    """
    folder = Path(name)
    if not is_task(folder):
        raise ConfigError(f"{folder} is not a task directory: it contains neither {HARBOR} nor {TERMINAL}")
    task = _harbor(folder) if (folder / HARBOR).is_file() else _terminal(folder)
    if task.image is None and "Dockerfile" not in task.context:
        raise ConfigError(f"{folder}: it has neither an image nor a Dockerfile")
    return task


def _harbor(folder: Path) -> Task:
    settings = _settings(folder / HARBOR)
    environment, verifier = _group(settings, "environment"), _group(settings, "verifier")
    if (folder / "steps").is_dir():
        raise ConfigError(f"{folder}: tasks with several steps are not supported")
    users = {str(_group(settings, group).get("user") or "root") for group in ("agent", "verifier")}
    if users != {"root"} or verifier.get("environment_mode", "shared") != "shared":
        raise ConfigError(
            f"{folder / HARBOR}: tasks with other users, or with a container for the verifier, are not supported"
        )
    context = _files_below(folder / "environment")
    if "Dockerfile" not in context and "docker-compose.yaml" in context:
        raise ConfigError(f"{folder}: tasks with several containers are not supported")
    tests = {f"/tests/{path}": content for path, content in _files_below(folder / "tests").items()}
    if "/tests/test.sh" not in tests:
        raise ConfigError(f"{folder}: there is no tests/test.sh")
    return Task(
        image=environment.get("docker_image"),
        context=context,
        workdir=environment.get("workdir"),
        env=_env(environment, folder),
        tests=TaskTests("bash /tests/test.sh", tests, _env(verifier, folder), _seconds(verifier, "timeout_sec"), True),
    )


def _terminal(folder: Path) -> Task:
    settings, context = _settings(folder / TERMINAL), _files_below(folder)
    compose = context.get("docker-compose.yaml")
    told = _yaml(compose.decode(errors="replace"), str(folder / "docker-compose.yaml")) if compose else None
    if isinstance(told, dict) and len(told.get("services") or ()) > 1:
        raise ConfigError(f"{folder}: tasks with several containers are not supported")
    tests = {f"/{path}": content for path, content in context.items() if path.startswith("tests/")}
    command = "python -m pytest -q /tests/test_outputs.py"
    if (script := context.get("run-tests.sh")) is not None:
        tests["/tests/run-tests.sh"], command = script, "bash /tests/run-tests.sh"
    if not tests:
        raise ConfigError(f"{folder}: it has no tests")
    kept = {path: data for path, data in context.items() if path not in _NO_CONTEXT and not path.startswith("tests/")}
    seconds = _seconds(settings, "max_test_timeout_sec")
    return Task(context=kept, tests=TaskTests(command, tests, {"TEST_DIR": "/tests"}, seconds))


def _settings(path: Path) -> dict[str, Any]:
    data = _read(path)
    try:
        text = data.decode()
        read = _toml(text, path) if path.suffix == ".toml" else _yaml(text, str(path))
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} has no settings")
    return read


def _yaml(text: str, name: str) -> Any:
    """Load YAML from a data set. Aliases are rejected, because a few aliases can expand to gigabytes."""
    with suppress(yaml.YAMLError, RecursionError):  # load_yaml reports these
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
            raise ConfigError(f"{name}: aliases (*name) are not supported; write the values out")
    return load_yaml(text, name)


def _toml(text: str, path: Path) -> Any:
    try:
        import tomllib
    except ImportError as error:
        raise ConfigError(f"{path}: reading TOML requires Python 3.11 or newer") from error
    return tomllib.loads(text)


def _group(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = settings.get(name)
    return group if isinstance(group, Mapping) else {}


def _env(group: Mapping[str, Any], folder: Path) -> dict[str, str]:
    env = {str(name): str(value) for name, value in _group(group, "env").items()}
    if secret := next((name for name, value in env.items() if "${" in value), None):
        raise ConfigError(
            f"{folder / HARBOR}: {secret} is a variable of the host, which containers do not see; write its value out"
        )
    return env


def _seconds(group: Mapping[str, Any], name: str) -> float:
    value = group.get(name, TESTS_TIMEOUT_S)
    return float(value) if isinstance(value, (int, float)) and value > 0 else TESTS_TIMEOUT_S


def _read(path: Path) -> bytes:
    return read_bytes(path, limit=MAX_FILE_BYTES, remedy="correct the task")


def _files_below(folder: Path) -> dict[str, bytes]:
    """Read the files below a directory, by relative path. Links are skipped."""
    files, total = {}, 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.resolve().is_relative_to(folder.resolve()):
            content = files[path.relative_to(folder).as_posix()] = _read(path)
            total += len(content)
        if total > MAX_BYTES:
            raise ConfigError(f"{folder} has more than {MAX_BYTES >> 20} MiB; move large files into an image")
    return files
