"""Define what a task needs of a container: an image, files, commands before, tests at the end."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TESTS_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class TaskTests:
    """Grade what an agent has left. ``command`` runs beside ``files``, which were not there before.

    The score is what it writes to a file of ``grading``, else whether it ends with 0.
    """

    command: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = TESTS_TIMEOUT_S
    needs_file: bool = False  # a reward that was not written is 0, whatever the exit code


@dataclass(frozen=True, slots=True)
class Task:
    """Describe how a container begins. ``context``: files beside a Dockerfile, by their paths."""

    image: str | None = None
    context: dict[str, bytes] = field(default_factory=dict)
    workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    tests: TaskTests | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """Bound what a container uses, from ``environment.container``. ``lives_s``: time after which it ends by itself."""

    timeout_s: float = 60.0
    start_timeout_s: float = 300.0
    memory_bytes: int = 2 * 2**30
    cpus: float = 1.0
    network: bool = False
    lives_s: float = 3600.0


USUAL = Room()


# ------------------------------------------------------------------------------------------------------- over the wire
def task_to_json(task: Task) -> dict[str, Any]:
    """Write a task for a service, without its tests, which the client runs; contents of files are base64."""
    return {
        "image": task.image,
        "context": _packed(task.context),
        "workdir": task.workdir,
        "env": dict(task.env),
        "files": _packed(task.files),
        "setup": list(task.setup),
    }


def task_from_json(told: Mapping[str, Any]) -> Task:
    """Read what ``task_to_json`` has written.

    Raises:
        ValueError: it is anything else.
    """
    try:
        return Task(
            None if told["image"] is None else str(told["image"]),
            _unpacked(told["context"]),
            None if told["workdir"] is None else str(told["workdir"]),
            {str(name): str(value) for name, value in told["env"].items()},
            _unpacked(told["files"]),
            tuple(map(str, told["setup"])),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the task is not as it should be: {error!r}") from error


def _packed(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def _unpacked(files: Mapping[str, str]) -> dict[str, bytes]:
    return {str(path): base64.b64decode(content) for path, content in files.items()}
