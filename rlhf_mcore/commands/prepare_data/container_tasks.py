"""Tasks for agents in containers: directories of Terminal-Bench and Harbor, and rows of software tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_mcore.environments.containers.folders import instruction_of, is_task, read_folder
from rlhf_mcore.environments.containers.rows import software_task, task_of

if TYPE_CHECKING:
    from rlhf_mcore.commands.prepare_data.recipes import Message, PlacedRow

FOLDER = "task_folder"  # the column of a row that stands for a directory
SHAPE = ("FAIL_TO_PASS", "test_patch", "test_command", "test_cmd", "eval_script")  # one is in rows of software tasks
_NAMES = ("instance_id", "task_id", "id")


def folder_rows(root: Path) -> Iterator[PlacedRow]:
    """Yield a row for each task directory that is ``root`` or is below it."""
    found = [root] if is_task(root) else sorted({path.parent for path in root.rglob("task.*") if is_task(path.parent)})
    for folder in found:
        yield str(folder), {FOLDER: str(folder.resolve())}


def task_example(row: Mapping[str, Any]) -> tuple[str, list[Message], dict[str, str]]:
    """Return the data source, the prompt and the ``extra_info`` of a row.

    Raises:
        ConfigError, ValueError: it has no instruction, no tests, or what is not read.
    """
    if FOLDER in row:
        folder = Path(row[FOLDER])
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
    return source, [{"role": "user", "content": text.strip()}], {"container": json.dumps(told), "task": name}
