"""Puts a run directory in order: at the start of a run, and on the first rank after a commit.

At the start, under the run's lock, unfinished saves and removals of a killed run are cleared away and the links are corrected. What
might be wanted is moved to ``quarantine/`` instead of deleted; retention keeps the newest entries there.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import (
    ARCHIVE,
    QUARANTINE,
    Transitional,
    checkpoint_path,
    own_entries,
    scan,
    scan_transitional,
)
from rlhf_mcore.checkpoint.links import BestRule, refresh_links
from rlhf_mcore.checkpoint.retention import Retention, dropped, prune, prune_quarantine

if TYPE_CHECKING:
    from rlhf_mcore.checkpoint.archive import Archiver

SCARCE_BYTES = 64 * 2**20  # with less free a run may not even begin: logs, metrics


def recover(run: Path, rule: BestRule | None, disk: Disk) -> list[str]:
    """Bring a run directory into the state after a complete save. Returns one line for each change.

    A checkpoint that was being replaced is restored if its successor is missing. Partial directories are quarantined, or removed if
    the disk is full. Removals are finished. ``latest`` and ``best`` are rebuilt by scanning.
    """
    notes = []
    free = disk.free_bytes(run)
    if free is not None and free < SCARCE_BYTES and (count := remove_partials(run, disk)):
        notes.append(f"the disk is full ({free:,} bytes free): what {count} unfinished saves had left was removed")
    notes += [_resolve(run, directory, disk) for directory in scan_transitional(run)]
    for path in own_entries(run, ARCHIVE):
        if path.match(".*.partial"):
            disk.unlink(path)
            notes.append(f"unfinished {ARCHIVE}/{path.name} removed")
    return notes + refresh_links(run, rule, disk)


def quarantine(path: Path, disk: Disk) -> Path:
    """Move a directory (or file) of a run to ``quarantine/<name>-<time>``. Returns the new path."""
    folder = path.parent / QUARANTINE
    disk.make_directory(folder)
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
    suffixes = chain([""], (f".{number}" for number in count(2)))
    names = (f"{path.name.lstrip('.')}-{stamp}{suffix}" for suffix in suffixes)
    target = next(folder / name for name in names if not (folder / name).exists())
    disk.rename(path, target)
    disk.sync_directory(folder)
    disk.sync_directory(path.parent)
    return target


def set_aside(run: Path, steps: Iterable[int], rule: BestRule | None, disk: Disk) -> list[str]:
    """Quarantine checkpoints: damaged ones, or later ones than the step that a run resumes from.

    Afterwards the newest checkpoint is the one that the run continues from. Returns one line for each change.
    """
    notes = []
    for step in sorted(steps, reverse=True):
        where = quarantine(checkpoint_path(run, step), disk)
        notes.append(f"checkpoint-{step} moved to {where.relative_to(run)}")
    return notes + refresh_links(run, rule, disk)


def steps_after(run: Path, step: int) -> list[int]:
    """Return the steps of the committed checkpoints after ``step``."""
    return [checkpoint.step for checkpoint in scan(run) if checkpoint.step > step]


def _resolve(run: Path, directory: Transitional, disk: Disk) -> str:
    if directory.state == "partial":
        where = quarantine(directory.path, disk)
        return f"unfinished {directory.path.name} moved to {where.relative_to(run)}"
    target = checkpoint_path(run, directory.step)
    if directory.state == "replaced" and not target.exists():
        disk.rename(directory.path, target)
        disk.sync_directory(run)
        return f"{target.name} restored: it was being replaced when the run ended"
    disk.remove_tree(directory.path)
    return f"{directory.path.name} removed"


def tidy(
    run: Path, policy: Retention, rule: BestRule | None, disk: Disk, archiver: Archiver | None = None
) -> list[str]:
    """Correct the links, then remove what the policy does not keep. To be called after a commit, on the first rank.

    Never fails a run. Returns one line for each checkpoint removed, and for what could not be done.
    """
    notes = archiver.take_notes() if archiver else []
    try:
        refresh_links(run, rule, disk)
        if archiver is None:
            notes += [f"{path.name} removed" for path in prune(run, policy, disk)]
        else:
            for checkpoint in dropped(run, policy):
                archiver.submit(checkpoint)
        prune_quarantine(run, disk)
    except OSError as error:
        notes.append(f"old checkpoints could not be removed: {error}")
    return notes


def remove_partials(run: Path, disk: Disk) -> int:
    """Remove the directories of unfinished saves, in the run directory and in quarantine. No save may be under way.

    Returns how many there were.
    """
    partials = [item.path for item in scan_transitional(run) if item.state == "partial"]
    quarantined = (path for path in own_entries(run, QUARANTINE) if path.match("checkpoint-*.partial-*"))
    partials += [path for path in quarantined if path.is_dir() and not path.is_symlink()]
    for path in partials:
        disk.remove_tree(path)
    return len(partials)
