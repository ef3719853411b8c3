"""The ``prepare-data`` recipe ``tasks``: directories of Terminal-Bench and Harbor, and rows of software tasks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_mcore.commands.prepare_data.recipes import TASK_FOLDER, PlacedRow, PreparedExample, RowError, per_row
from rlhf_mcore.environments.containers.task import task_of
from rlhf_mcore_contrib.containers.folders import instruction_of, is_task, read_folder

_PATCH = "/tests/tests.patch"
_NAMES = ("instance_id", "task_id", "id")


def folder_rows(root: Path) -> Iterator[PlacedRow]:
    """Yield a row for each task directory: ``root`` itself, or directories below it."""
    found = [root] if is_task(root) else sorted({path.parent for path in root.rglob("task.*") if is_task(path.parent)})
    for folder in found:
        yield str(folder), {TASK_FOLDER: str(folder.resolve())}


def _convert(place: str, row: Mapping[str, Any]) -> PreparedExample:
    """Convert a task for an agent in a container. ``extra_info.container`` describes the container."""
    try:
        return _example(place, row)
    except ValueError as error:
        raise RowError(str(error)) from error


tasks = per_row(_convert)


def _example(place: str, row: Mapping[str, Any]) -> PreparedExample:
    if TASK_FOLDER in row:
        folder = Path(row[TASK_FOLDER])
        read_folder(str(folder))
        source, text, told, name = "tasks", instruction_of(folder), {"folder": str(folder)}, folder.name
    else:
        found = software_task(row)
        if found is None:
            raise ValueError("it has no tests: tests, test_command, eval_script or FAIL_TO_PASS")
        asked = next((row[key] for key in ("problem_statement", "instruction", "prompt") if row.get(key)), None)
        if not isinstance(asked, str):
            raise ValueError("it has no text problem_statement, instruction or prompt")
        text, source, told = asked, str(row.get("data_source") or "software"), found
        name = next((str(row[key]) for key in _NAMES if row.get(key)), "")
        task_of({"container": told})
    extra = {"container": json.dumps(told), "task": name}
    return PreparedExample(place, source, [{"role": "user", "content": text.strip()}], ability="agent", extra=extra)


def software_task(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Read image, setup and tests from a row of software tasks, for example SWE-bench (arXiv 2310.06770).

    The tests are a command (``tests``, ``test_command``, ``test_cmd``, ``eval_script``), or the names of tests that must pass after
    ``test_patch`` (``FAIL_TO_PASS`` and ``PASS_TO_PASS``). Returns ``extra_info.container``, or None if there are no tests.
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
