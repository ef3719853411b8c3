"""What the first rank does after a commit: links, retention, archives. It never fails a run: what it could not do is a note."""

from __future__ import annotations

from pathlib import Path

from rlhf_mcore.checkpoint.archive import Archiver
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import QUARANTINE, own_entries, scan_transitional
from rlhf_mcore.checkpoint.links import BestRule, refresh_links
from rlhf_mcore.checkpoint.retention import Retention, dropped, prune, prune_quarantine


def tidy(
    run: Path, policy: Retention, rule: BestRule | None, disk: Disk, archiver: Archiver | None = None
) -> list[str]:
    """Let the links be true, then drop what the policy does not keep. To be called after a commit, on the first rank.

    Returns one line per thing that went, or that could not be done.
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
