"""The commit protocol of one checkpoint: a temporary directory, the manifest last, a rename, then the link.

Killed at any instant, the run directory holds every checkpoint that was there before, or the new one in its place. A half-written
checkpoint has a hidden name, and ``housekeeping.recover`` clears it away. Everything here is for one process; ``collective`` runs it
for the ranks of a world.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mcore.checkpoint.disk import WORTH_BYTES, Disk, SaveError, fsync, spread
from rlhf_mcore.checkpoint.housekeeping import point, quarantine
from rlhf_mcore.checkpoint.layout import LATEST, MANIFEST, checkpoint_path, scan_transitional, transitional_path
from rlhf_mcore.checkpoint.manifest import CheckpointInfo, files_below, hash_files, write_manifest
from rlhf_mcore.config.schema.run import PRIVATE, octal_mode

OWNER_FILE, OWNER_FOLDER = 0o600, 0o700


def prepare(run: Path, step: int, token: str, disk: Disk) -> Path:
    """Make an empty directory for the files of a step. What an earlier attempt at this step has left is quarantined first."""
    for directory in scan_transitional(run):
        if directory.step == step and directory.state == "partial":
            quarantine(directory.path, disk)
    partial = transitional_path(run, step, "partial", token)
    disk.make_directory(partial)
    return partial


def seal_files(partial: Path, paths: Iterable[str | Path], disk: Disk) -> dict[str, dict[str, Any]]:
    """Make the files that this process wrote durable, and hash them. Returns their entries for the manifest."""
    files = [partial / path for path in paths]
    num_bytes = sum(file.stat().st_size for file in files)

    def make_durable() -> None:
        spread(lambda path: disk.perform("fsync", lambda: fsync(path), path), files, num_bytes)

    if num_bytes < WORTH_BYTES:
        make_durable()
        return hash_files(partial, files)
    # The disk writes while the processor hashes.
    with ThreadPoolExecutor(1) as beside:
        durable = beside.submit(make_durable)
        entries = hash_files(partial, files)
        durable.result()
    return entries


def seal(partial: Path, files: Mapping[str, Mapping[str, Any]], info: CheckpointInfo, disk: Disk) -> str:
    """Make the directories durable and write the manifest. Returns its digest.

    Raises:
        SaveError: a file has no entry, or an entry has no file.
    """
    present = set(files_below(partial)) - {MANIFEST}
    if present != set(files):
        unclaimed, absent = sorted(present - set(files)), sorted(set(files) - present)
        raise SaveError(
            f"{partial}: files and entries of the manifest differ: no entry for {unclaimed}, no file for {absent}"
        )
    for folder, _, _ in os.walk(partial):
        disk.sync_directory(Path(folder))
    digest = write_manifest(partial, files, info, disk)
    disk.sync_directory(partial)
    return digest


def publish(run: Path, step: int, partial: Path, disk: Disk) -> Path:
    """Rename a sealed directory to its final name, replacing a checkpoint of the same step, and point ``latest`` at it."""
    target = checkpoint_path(run, step)
    replaced = transitional_path(run, step, "replaced")
    if (target / MANIFEST).is_file():
        disk.remove_tree(replaced)
        disk.rename(target, replaced)
    elif target.exists() or target.is_symlink():
        quarantine(target, disk)  # it has our name, but it is no checkpoint
    try:
        disk.rename(partial, target)
    except OSError:
        if replaced.is_dir():
            disk.rename(replaced, target)
        raise
    disk.sync_directory(run)
    point(run / LATEST, target.name, disk)
    disk.remove_tree(replaced)
    return target


@dataclass(frozen=True, slots=True)
class Permissions:
    """The modes of a checkpoint's files.

    ``setting``: null leaves everything to the umask; an octal mode applies to every file; ``private`` makes optimizer state, run
    state and configuration readable by the owner only, and leaves the models and the manifest to the umask.
    """

    setting: str | None = None

    def of(self, name: str) -> int | None:
        """Return the mode of a file by its path in a checkpoint, None for what the umask gives."""
        if self.setting is None:
            return None
        if self.setting != PRIVATE:
            return octal_mode(self.setting)
        # actor/model.safetensors, not actor/training/ or trainer_state.json
        is_of_model = name.count("/") == 1
        return None if is_of_model or name == MANIFEST else OWNER_FILE

    def begin(self, partial: Path) -> None:
        """Close a checkpoint that is being written to all but its owner."""
        if self.setting is not None:
            partial.chmod(OWNER_FOLDER)

    def grant(self, partial: Path, files: Iterable[Path]) -> None:
        """Set the modes of files that were written."""
        for file in files:
            mode = self.of(file.relative_to(partial).as_posix())
            if mode is not None:
                file.chmod(mode)

    def finish(self, partial: Path) -> None:
        """Set the modes of the manifest and of all directories, of the checkpoint itself last."""
        if self.setting is None:
            return
        self.grant(partial, [partial / MANIFEST])
        for folder, _, files in os.walk(partial, topdown=False):
            modes = [self.of((Path(folder, file)).relative_to(partial).as_posix()) for file in files]
            known = [mode for mode in modes if mode is not None]
            if len(known) == len(modes) and modes:
                mode = max(known)
                Path(folder).chmod(mode | (mode & 0o444) >> 2)  # who may read files may enter their folder
            elif Path(folder) == partial:
                partial.chmod(partial.parent.stat().st_mode & 0o777)  # as open as the run is
