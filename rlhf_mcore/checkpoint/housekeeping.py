"""Clean up a run directory at the start of a run and after a commit: links, quarantine and retention.

At the start, under the run's lock, unfinished saves and removals of a killed run are cleared and the links are
corrected. Data that users may want is moved to ``quarantine/`` instead of deleted. Retention keeps the newest
entries there.

The links ``latest``, ``best`` and ``pins/<name>`` are for people and tools; the trainer scans the directory
instead. Retention keeps pinned checkpoints. Users may add and remove pins while the run continues.

Retention uses only the disk's contents, and only after a commit. It renames a checkpoint before it removes its
files, so a kill in between leaves no half checkpoint. It removes deltas before their base, so a kill in between
leaves no delta without its base.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain, count
from pathlib import Path
from typing import Protocol

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import (
    ARCHIVE,
    BEST,
    LATEST,
    QUARANTINE,
    Checkpoint,
    Transitional,
    checkpoint_path,
    linked_step,
    own_entries,
    scan,
    scan_transitional,
    step_of,
    transitional_path,
)
from rlhf_mcore.checkpoint.manifest import has_base, read_manifest
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig

PINS = "pins"
QUARANTINED = 2  # maximum number of entries in quarantine/
SCARCE_BYTES = 64 * 2**20  # with less free space a run may fail to start: it writes logs and metrics


class ArchiveHook(Protocol):
    """Store and then remove the checkpoints that retention drops (plug-in ``archive``). First rank only."""

    def submit(self, checkpoint: Checkpoint) -> None:
        """Archive a checkpoint in the background, and then remove it. The same checkpoint may be submitted again."""
        ...

    def take_notes(self) -> list[str]:
        """Return one line for each checkpoint that was archived since the last call, and for each failure."""
        ...

    def close(self) -> None:
        """Wait until all submitted checkpoints are archived."""
        ...


def recover(run: Path, rule: BestRule | None, disk: Disk) -> list[str]:
    """Restore the run directory to its state after a complete save. Return one line for each change.

    If a checkpoint was being replaced and its successor is missing, restore it. Quarantine partial directories, or
    remove them if the disk is full. Finish removals. Rebuild ``latest`` and ``best`` by scanning.
    """
    notes = []
    free = disk.free_bytes(run)
    if free is not None and free < SCARCE_BYTES and (count := remove_partials(run, disk)):
        notes.append(f"the disk is full ({free:,} bytes free): the files of {count} unfinished saves were removed")
    notes += [_resolve(run, directory, disk) for directory in scan_transitional(run)]
    for path in own_entries(run, ARCHIVE):
        if path.match(".*.partial"):
            disk.unlink(path)
            notes.append(f"unfinished {ARCHIVE}/{path.name} removed")
    return notes + refresh_links(run, rule, disk)


def quarantine(path: Path, disk: Disk) -> Path:
    """Move a directory (or file) of a run to ``quarantine/<name>-<time>``. Return the new path."""
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
    """Quarantine checkpoints that are damaged, or later than the step from which a run resumes.

    Afterwards, the newest checkpoint is the resumed checkpoint. Return one line for each change.
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
    run: Path, policy: Retention, rule: BestRule | None, disk: Disk, archiver: ArchiveHook | None = None
) -> list[str]:
    """Correct the links, then remove checkpoints that the policy does not keep.

    Call it after a commit, on the first rank.

    It never fails a run. Return one line for each removed checkpoint and for each error.
    """
    notes = archiver.take_notes() if archiver else []
    try:
        refresh_links(run, rule, disk)
        if archiver is None:
            notes += [f"{path.name} removed" for path in prune(run, policy, disk)]
        else:
            for checkpoint in checkpoints_to_delete(run, policy):
                archiver.submit(checkpoint)
        prune_quarantine(run, disk)
    except OSError as error:
        notes.append(f"old checkpoints could not be removed: {error}")
    return notes


def remove_partials(run: Path, disk: Disk) -> int:
    """Remove the directories of unfinished saves from the run directory and quarantine. Return their number.

    No save may be in progress.
    """
    partials = [item.path for item in scan_transitional(run) if item.state == "partial"]
    quarantined = (path for path in own_entries(run, QUARANTINE) if path.match("checkpoint-*.partial-*"))
    partials += [path for path in quarantined if path.is_dir() and not path.is_symlink()]
    for path in partials:
        disk.remove_tree(path)
    return len(partials)


@dataclass(frozen=True, slots=True)
class BestRule:
    """Rank checkpoints by an evaluation metric at their step."""

    metric: str
    greater_is_better: bool = True

    def improves(self, value: float, on: float | None) -> bool:
        """Return whether ``value`` is better than ``on``. Any number is better than None; NaN is never better."""
        if value != value:
            return False
        return on is None or (value > on if self.greater_is_better else value < on)


def best_rule(cfg: CheckpointConfig) -> BestRule | None:
    """Return the rule of ``metric_for_best_model``, or None if it is not set."""
    metric = cfg.metric_for_best_model
    return None if metric is None else BestRule(metric.removeprefix("-"), greater_is_better=not metric.startswith("-"))


def find_best(checkpoints: list[Checkpoint], rule: BestRule) -> Checkpoint | None:
    """Return the best checkpoint, or the earliest of equal ones.

    Skip checkpoints without the metric or a readable manifest.
    """
    best, best_value = None, None
    for checkpoint in checkpoints:
        try:
            value = read_manifest(checkpoint.path).info.metrics.get(rule.metric)
        except ConfigError:
            continue
        if value is not None and rule.improves(value, best_value):
            best, best_value = checkpoint, value
    return best


def point(link: Path, target: str, disk: Disk) -> None:
    """Move a link to ``target`` atomically. A reader always sees the old or the new link."""
    temporary = link.with_name(f".{link.name}.new")
    disk.unlink(temporary)
    disk.symlink(temporary, target)
    disk.rename(temporary, link)
    disk.sync_directory(link.parent)


def refresh_links(run: Path, rule: BestRule | None, disk: Disk) -> list[str]:
    """Point ``latest`` at the newest checkpoint and ``best`` at the best. Return one line for each change.

    Without a rule, a ``best`` link to a checkpoint stays. Links to missing checkpoints are removed. No link points
    to a delta without its base, because it is unusable.
    """
    checkpoints = [checkpoint for checkpoint in scan(run) if has_base(checkpoint.path)]
    latest = checkpoints[-1].step if checkpoints else None
    best = linked_step(run, BEST)
    if rule is not None:
        checkpoint = find_best(checkpoints, rule)
        best = checkpoint.step if checkpoint else None
    elif best not in [checkpoint.step for checkpoint in checkpoints]:
        best = None
    changed = [_refresh(run / LATEST, latest, disk), _refresh(run / BEST, best, disk)]
    return [note for note in changed if note]


def _refresh(link: Path, step: int | None, disk: Disk) -> str | None:
    disk.unlink(link.with_name(f".{link.name}.new"))
    if step is None:
        if not link.is_symlink():
            return None
        disk.unlink(link)
        return f"link {link.name} removed: it named no checkpoint"
    if linked_step(link.parent, link.name) == step:
        return None
    point(link, f"checkpoint-{step}", disk)
    return f"link {link.name} now names checkpoint-{step}"


def read_pins(run: Path) -> dict[str, int]:
    """Return the step of each pin by its name. Links made by hand to other places are ignored."""
    folder = run / PINS
    if folder.is_symlink() or not folder.is_dir():
        return {}
    pins = {}
    for link in sorted(folder.iterdir()):
        target = link.readlink() if link.is_symlink() else Path()
        step = step_of(target.name)
        if step is not None and target == Path("..", target.name):
            pins[link.name] = step
    return pins


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep the newest ``limit`` checkpoints (None: all), the steps ``keep`` and all multiples of ``keep_every``.

    It also keeps the best checkpoint, the checkpoint of ``latest``, pinned checkpoints, and the bases of kept
    deltas.
    """

    limit: int | None = None
    keep_every: int | None = None
    keep: tuple[int, ...] = ()


def checkpoints_to_delete(run: Path, policy: Retention) -> list[Checkpoint]:
    """Return the checkpoints that the policy does not keep, in removal order: deltas before full checkpoints, oldest first."""
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
    """Remove the checkpoints that the policy does not keep. Return their paths."""
    removed = []
    for checkpoint in checkpoints_to_delete(run, policy):
        # A user may have pinned it while others were removed.
        if checkpoint.step not in read_pins(run).values():
            remove(checkpoint, disk)
            removed.append(checkpoint.path)
    return removed


def prune_quarantine(run: Path, disk: Disk) -> None:
    """Remove all but the newest entries of quarantine. Keep checkpoints of pinned steps."""
    pinned = tuple(f"checkpoint-{step}-" for step in read_pins(run).values())
    folders = [path for path in own_entries(run, QUARANTINE) if path.is_dir() and not path.is_symlink()]
    for path in sorted(folders, key=lambda path: (path.stat().st_mtime_ns, path.name))[:-QUARANTINED]:
        if not path.name.startswith(pinned):
            disk.remove_tree(path)


def remove(checkpoint: Checkpoint, disk: Disk) -> None:
    """Remove one checkpoint. If the removal is interrupted, the next start finishes it."""
    doomed = transitional_path(checkpoint.path.parent, checkpoint.step, "removed")
    disk.remove_tree(doomed)
    disk.rename(checkpoint.path, doomed)
    disk.sync_directory(checkpoint.path.parent)
    disk.remove_tree(doomed)


def _find_bases(checkpoints: Sequence[Checkpoint]) -> set[int]:
    """Return the steps of the bases of the deltas in ``checkpoints``."""
    steps = set()
    for checkpoint in checkpoints:
        try:
            base = read_manifest(checkpoint.path).info.base
        except ConfigError:
            # damaged: loading it raises the error
            continue
        step = step_of(base.name) if base else None
        if step is not None:
            steps.add(step)
    return steps
