"""Kill a save or a recovery at every boundary, each time in a new run directory and a forked process.

``python -m tests.processes.checkpoint.walk DIRECTORY`` prints the findings after each kill for every scenario, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_mcore.checkpoint.delta import verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import Retention, prune, recover
from rlhf_mcore.checkpoint.layout import linked_step, scan, scan_transitional
from rlhf_mcore.checkpoint.manifest import DELTA, Base, CheckpointInfo, read_manifest
from tests.unit.checkpoint.saving import KillingDisk, contents, save

Action = Callable[[Path, Disk], object]


def two_checkpoints(run: Path) -> None:
    save(run, 10)
    save(run, 20)


def deltas(run: Path) -> None:
    """Create two full checkpoints with two deltas each, and one checkpoint that retention keeps."""
    for full in (10, 20):
        base = Base(f"checkpoint-{full}", read_manifest(save(run, full)).digest)
        for step in (full + 1, full + 2):
            save(run, step, info=CheckpointInfo(step, DELTA, base))
    save(run, 25)


def interrupt_save(run: Path) -> None:
    """Create the state after a kill between the renames of a repeated save, and a started removal."""
    two_checkpoints(run)
    (run / "checkpoint-20").rename(run / ".checkpoint-20.replaced")
    save(run, 30)
    (run / "checkpoint-30").rename(run / ".checkpoint-30.partial-77")
    save(run, 5)
    (run / "checkpoint-5").rename(run / ".checkpoint-5.removed")
    (run / "latest").unlink()


SCENARIOS: dict[str, tuple[Callable[[Path], object], Action]] = {
    "new": (two_checkpoints, lambda run, disk: save(run, 30, disk=disk)),
    "first": (lambda run: None, lambda run, disk: save(run, 10, disk=disk)),
    "again": (two_checkpoints, lambda run, disk: save(run, 20, "second", disk=disk)),
    "recover": (interrupt_save, lambda run, disk: recover(run, None, disk)),
    "prune": (two_checkpoints, lambda run, disk: prune(run, Retention(limit=1), disk)),
    "prune deltas": (deltas, lambda run, disk: prune(run, Retention(limit=1), disk)),
}


def main(directory: Path) -> None:
    print(json.dumps({name: walk(directory / name, *SCENARIOS[name]) for name in SCENARIOS}))


def walk(directory: Path, arrange: Callable[[Path], object], act: Action) -> list[dict[str, Any]]:
    """Return one finding per boundary. The last finding of each half belongs to a completed action."""
    template, run = directory / "template", directory / "run"
    template.mkdir(parents=True)
    arrange(template)
    found: list[dict[str, Any]] = []
    for torn in (False, True):
        boundary, killed = 0, True
        while killed:
            boundary += 1
            shutil.copytree(template, run, symlinks=True)
            killed = _run_in_child(partial(act, run, KillingDisk(boundary, torn=torn)))
            found.append({"boundary": boundary, "torn": torn, "killed": killed, **_look(run)})
            shutil.rmtree(run)
    return found


def _run_in_child(action: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "the action failed"
    return False


def _look(run: Path) -> dict[str, Any]:
    """Return the checkpoints before the next start, after it, and after the step is saved again."""
    before = _intact(run)
    link_before = linked_step(run, "latest")
    recover(run, None, Disk())
    after = _intact(run)
    report = {
        "before": before,
        "link_before": link_before,
        "after": after,
        "left": [item.path.name for item in scan_transitional(run)],
        "link_after": linked_step(run, "latest"),
        "again": recover(run, None, Disk()),
    }
    return {**report, "later": _version(save(run, 30, "later"), 30)}


def _intact(run: Path) -> dict[str, str]:
    """Return the version of the content of each committed checkpoint, or its problem."""
    return {str(item.step): _version(item.path, item.step) for item in scan(run)}


def _version(path: Path, step: int) -> str:
    problems = verify_chain(path)
    if problems:
        return str(problems[0])
    data = (path / "actor" / "model.safetensors").read_bytes()
    known = {version: contents(step, version) for version in ("first", "second", "later")}
    return next(name for name, files in known.items() if files["actor/model.safetensors"] == data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
