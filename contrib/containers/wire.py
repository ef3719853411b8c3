"""Write and read the task of a request to a service of containers."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from rlhf_mcore.environments.containers.task import Task


def task_to_json(task: Task) -> dict[str, Any]:
    """Write a task for a service, with files in base64. The tests are omitted, because the client runs them."""
    return {
        "image": task.image,
        "context": _encode(task.context),
        "workdir": task.workdir,
        "env": dict(task.env),
        "files": _encode(task.files),
        "setup": list(task.setup),
    }


def task_from_json(told: Mapping[str, Any]) -> Task:
    """Read a task from the value of ``task_to_json``.

    Raises:
        ValueError: the value is malformed.
    """
    try:
        return Task(
            None if told["image"] is None else str(told["image"]),
            _decode(told["context"]),
            None if told["workdir"] is None else str(told["workdir"]),
            {str(name): str(value) for name, value in told["env"].items()},
            _decode(told["files"]),
            tuple(map(str, _list(told["setup"]))),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the task is malformed: {error!r}") from error


def _encode(files: Mapping[str, bytes]) -> dict[str, str]:
    return {path: base64.b64encode(content).decode() for path, content in files.items()}


def _decode(files: Mapping[str, str]) -> dict[str, bytes]:
    return {str(path): base64.b64decode(content, validate=True) for path, content in files.items()}


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError("'setup' must be a list")
    return value
