"""A run directory is put in order: at the start of a run, and by the first rank after a commit.

At the start, under the run's lock, what a killed run has left half way is cleared away and the links are made true. Nothing is deleted
that might be wanted: it is moved to ``quarantine/``, of which retention keeps the newest.
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
    """Bring a run directory into a state that a save leaves. Returns one line per thing that was done.

    A checkpoint that was being replaced comes back if its successor did not arrive; partial directories are quarantined; removals
    are finished; ``latest`` and ``best`` are rebuilt by scanning. On a full disk partial directories are removed instead.
    """
    notes = []
    free = disk.free_bytes(run)
    if free is not None and free < SCARCE_BYTES and (count := remove_partials(run, disk)):
        notes.append(f"the disk is full ({free:,} bytes free): what {count} unfinished saves had left was removed")
    for left in scan_transitional(run):
        notes.append(_resolve(run, left, disk))
    for path in own_entries(run, ARCHIVE):
        if path.match(".*.partial"):
            disk.unlink(path)
            notes.append(f"unfinished {ARCHIVE}/{path.name} removed")
    return notes + refresh_links(run, rule, disk)


def quarantine(path: Path, disk: Disk) -> Path:
    """Move a directory (or file) of a run to ``quarantine/<name>-<time>``. Returns where it went."""
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
    """Quarantine checkpoints: damaged ones, or those of a future that a run resumed from an earlier step will not have.

    Afterwards the newest checkpoint is the one that the run continues from. Returns one line per thing that was done.
    """
    notes = []
    for step in sorted(steps, reverse=True):
        where = quarantine(checkpoint_path(run, step), disk)
        notes.append(f"checkpoint-{step} moved to {where.relative_to(run)}")
    return notes + refresh_links(run, rule, disk)


def steps_after(run: Path, step: int) -> list[int]:
    """The steps of the committed checkpoints that come after ``step``."""
    return [checkpoint.step for checkpoint in scan(run) if checkpoint.step > step]


def _resolve(run: Path, left: Transitional, disk: Disk) -> str:
    if left.state == "partial":
        where = quarantine(left.path, disk)
        return f"unfinished {left.path.name} moved to {where.relative_to(run)}"
    target = checkpoint_path(run, left.step)
    if left.state == "replaced" and not target.exists():
        disk.rename(left.path, target)
        disk.sync_directory(run)
        return f"{target.name} restored: it was being replaced when the run ended"
    disk.remove_tree(left.path)
    return f"{left.path.name} removed"


def tidy(
    run: Path, policy: Retention, rule: BestRule | None, disk: Disk, archiver: Archiver | None = None
) -> list[str]:
    """Let the links be true, then drop what the policy does not keep. To be called after a commit, on the first rank.

    Never fails a run. Returns one line per thing that went, or that could not be done.
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
    """Remove what saves that were not finished have left, in the run directory and in quarantine. None may be under way.

    Returns how many there were.
    """
    left = [item.path for item in scan_transitional(run) if item.state == "partial"]
    quarantined = (path for path in own_entries(run, QUARANTINE) if path.match("checkpoint-*.partial-*"))
    left += [path for path in quarantined if path.is_dir() and not path.is_symlink()]
    for path in left:
        disk.remove_tree(path)
    return len(left)
