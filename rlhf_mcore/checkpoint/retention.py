"""Which checkpoints stay. Decided from what is on the disk, and only after a commit.

What is dropped first loses its name, then its files: a kill in between leaves no half checkpoint. Differences go before the full
checkpoint that they need: a kill in between leaves none without it.
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

QUARANTINED = 2  # things in quarantine/ that are kept


@dataclass(frozen=True, slots=True)
class Retention:
    """How many checkpoints stay: the newest ``limit`` (None: all), and those of ``keep`` and of multiples of ``keep_every``.

    The best one, the one that ``latest`` names, pinned ones, and the full checkpoint that a delta which stays needs, stay beside
    them.
    """

    limit: int | None = None
    keep_every: int | None = None
    keep: tuple[int, ...] = ()  # steps


def dropped(run: Path, policy: Retention) -> list[Checkpoint]:
    """The checkpoints that the policy does not keep, in the order in which they may go: deltas before full ones, oldest first."""
    checkpoints = scan(run)
    if policy.limit is None:
        return []
    kept = {checkpoint.step for checkpoint in checkpoints[-policy.limit :]}
    kept |= {*policy.keep, *read_pins(run).values()}
    kept |= {step for link in (LATEST, BEST) if (step := linked_step(run, link)) is not None}
    if policy.keep_every:
        kept |= {checkpoint.step for checkpoint in checkpoints if checkpoint.step % policy.keep_every == 0}
    kept |= _bases([checkpoint for checkpoint in checkpoints if checkpoint.step in kept])
    gone = [checkpoint for checkpoint in checkpoints if checkpoint.step not in kept]
    return sorted(gone, key=lambda checkpoint: not _bases([checkpoint]))


def prune(run: Path, policy: Retention, disk: Disk) -> list[Path]:
    """Remove what the policy drops. Returns the checkpoints that went."""
    gone = []
    for checkpoint in dropped(run, policy):
        if checkpoint.step not in read_pins(run).values():  # somebody may have pinned it while others were removed
            remove(checkpoint, disk)
            gone.append(checkpoint.path)
    return gone


def prune_quarantine(run: Path, disk: Disk) -> None:
    """Remove all but the newest of what was set aside. Checkpoints of steps that are pinned stay."""
    pinned = tuple(f"checkpoint-{step}-" for step in read_pins(run).values())
    found = [path for path in own_entries(run, QUARANTINE) if path.is_dir() and not path.is_symlink()]
    for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))[:-QUARANTINED]:
        if not path.name.startswith(pinned):
            disk.remove_tree(path)


def remove(checkpoint: Checkpoint, disk: Disk) -> None:
    """Remove one checkpoint: whole, or finished by the next start."""
    doomed = transitional_path(checkpoint.path.parent, checkpoint.step, "removed")
    disk.remove_tree(doomed)
    disk.rename(checkpoint.path, doomed)
    disk.sync_directory(checkpoint.path.parent)
    disk.remove_tree(doomed)


def _bases(kept: Sequence[Checkpoint]) -> set[int]:
    """Steps of the full checkpoints that deltas among these are differences to."""
    steps = set()
    for checkpoint in kept:
        try:
            base = read_manifest(checkpoint.path).info.base
        except ConfigError:  # damaged: it is refused when it is loaded, not here
            continue
        step = step_of(base.name) if base else None
        if step is not None:
            steps.add(step)
    return steps
