"""What the first rank does after a commit: links, retention, archives. It never fails a run: what it could not do, it says."""

from __future__ import annotations

from pathlib import Path

from rlhf_mcore.checkpoint.archive import Archiver
from rlhf_mcore.checkpoint.disk import Disk
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
