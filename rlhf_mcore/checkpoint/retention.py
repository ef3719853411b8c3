"""Removes old checkpoints, decided from what is on the disk and only after a commit.

A checkpoint is first renamed, then its files are removed: a kill in between leaves no half checkpoint. Deltas are removed before
their base: a kill in between leaves none without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import (
    BEST,
    LATEST,
    QUARANTINE,
    Checkpoint,
    linked_step,
    own_entries,
    scan,
    step_of,
    transitional_path,
)
from rlhf_mcore.checkpoint.links import read_pins
from rlhf_mcore.checkpoint.manifest import read_manifest
from rlhf_mcore.config.errors import ConfigError

QUARANTINED = 2  # entries of quarantine/ that are kept


@dataclass(frozen=True, slots=True)
class Retention:
    """Keeps the newest ``limit`` checkpoints (None: all), the steps ``keep`` and all multiples of ``keep_every``.

    The best checkpoint, the one that ``latest`` names, pinned ones, and the bases of kept deltas are kept too.
    """

    limit: int | None = None
    keep_every: int | None = None
    keep: tuple[int, ...] = ()


def dropped(run: Path, policy: Retention) -> list[Checkpoint]:
    """Return the checkpoints that the policy does not keep, in the order of removal: deltas before full ones, oldest first."""
    checkpoints = scan(run)
    if policy.limit is None:
        return []
    kept = {checkpoint.step for checkpoint in checkpoints[-policy.limit :]}
    kept |= {*policy.keep, *read_pins(run).values()}
    kept |= {step for link in (LATEST, BEST) if (step := linked_step(run, link)) is not None}
    if policy.keep_every:
        kept |= {checkpoint.step for checkpoint in checkpoints if checkpoint.step % policy.keep_every == 0}
    kept |= _find_bases([checkpoint for checkpoint in checkpoints if checkpoint.step in kept])
    others = [checkpoint for checkpoint in checkpoints if checkpoint.step not in kept]
    return sorted(others, key=lambda checkpoint: not _find_bases([checkpoint]))


def prune(run: Path, policy: Retention, disk: Disk) -> list[Path]:
    """Remove the checkpoints that the policy does not keep. Returns their paths."""
    removed = []
    for checkpoint in dropped(run, policy):
        # Somebody may have pinned it while others were removed.
        if checkpoint.step not in read_pins(run).values():
            remove(checkpoint, disk)
            removed.append(checkpoint.path)
    return removed


def prune_quarantine(run: Path, disk: Disk) -> None:
    """Remove all but the newest entries of quarantine. Checkpoints of pinned steps stay."""
    pinned = tuple(f"checkpoint-{step}-" for step in read_pins(run).values())
    folders = [path for path in own_entries(run, QUARANTINE) if path.is_dir() and not path.is_symlink()]
    for path in sorted(folders, key=lambda path: (path.stat().st_mtime_ns, path.name))[:-QUARANTINED]:
        if not path.name.startswith(pinned):
            disk.remove_tree(path)


def remove(checkpoint: Checkpoint, disk: Disk) -> None:
    """Remove one checkpoint. If interrupted, the next start finishes the removal."""
    doomed = transitional_path(checkpoint.path.parent, checkpoint.step, "removed")
    disk.remove_tree(doomed)
    disk.rename(checkpoint.path, doomed)
    disk.sync_directory(checkpoint.path.parent)
    disk.remove_tree(doomed)


def _find_bases(checkpoints: Sequence[Checkpoint]) -> set[int]:
    """Return the steps of the bases of the deltas among ``checkpoints``."""
    steps = set()
    for checkpoint in checkpoints:
        try:
            base = read_manifest(checkpoint.path).info.base
        except ConfigError:
            # Damaged: it is refused when it is loaded, not here.
            continue
        step = step_of(base.name) if base else None
        if step is not None:
            steps.add(step)
    return steps
