"""Commit one checkpoint: write a temporary directory, write the manifest last, rename, then update the link.

If the run is killed at any instant, the run directory contains every earlier checkpoint. A checkpoint that was
being replaced exists in its old or in its new version. A half-written checkpoint has a hidden name, and
``housekeeping.recover`` moves it away. This module is for one process; ``collective`` runs it for all ranks.
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
    """Make an empty directory for the files of a step. Quarantine the files of earlier attempts at this step first."""
    for directory in scan_transitional(run):
        if directory.step == step and directory.state == "partial":
            quarantine(directory.path, disk)
    partial = transitional_path(run, step, "partial", token)
    disk.make_directory(partial)
    return partial


def seal_files(partial: Path, paths: Iterable[str | Path], disk: Disk) -> dict[str, dict[str, Any]]:
    """Make this process's files durable and hash them. Return their entries for the manifest."""
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
    """Make the directories durable and write the manifest. Return its digest.

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
    """Rename a sealed directory to its final name and point ``latest`` at it.

    Replace an existing checkpoint of the same step.
    """
    target = checkpoint_path(run, step)
    replaced = transitional_path(run, step, "replaced")
    if (target / MANIFEST).is_file():
        disk.remove_tree(replaced)
        disk.rename(target, replaced)
    elif target.exists() or target.is_symlink():
        quarantine(target, disk)  # it has a checkpoint's name, but it is not a checkpoint
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
    """The file modes of a checkpoint.

    ``setting``: null uses the umask for all files; an octal mode applies to every file. ``private`` makes
    optimizer state, run state and configuration readable by the owner only, and uses the umask for the models and
    the manifest.
    """

    setting: str | None = None

    def of(self, name: str) -> int | None:
        """Return the mode of a file by its path in a checkpoint, or None to use the umask."""
        if self.setting is None:
            return None
        if self.setting != PRIVATE:
            return octal_mode(self.setting)
        # actor/model.safetensors, not actor/training/ or trainer_state.json
        is_of_model = name.count("/") == 1
        return None if is_of_model or name == MANIFEST else OWNER_FILE

    def begin(self, partial: Path) -> None:
        """Restrict a checkpoint in progress to its owner."""
        if self.setting is not None:
            partial.chmod(OWNER_FOLDER)

    def grant(self, partial: Path, files: Iterable[Path]) -> None:
        """Set the modes of written files."""
        for file in files:
            mode = self.of(file.relative_to(partial).as_posix())
            if mode is not None:
                file.chmod(mode)

    def finish(self, partial: Path) -> None:
        """Set the modes of the manifest and of all directories. The checkpoint's own directory is last."""
        if self.setting is None:
            return
        self.grant(partial, [partial / MANIFEST])
        for folder, _, files in os.walk(partial, topdown=False):
            modes = [self.of((Path(folder, file)).relative_to(partial).as_posix()) for file in files]
            known = [mode for mode in modes if mode is not None]
            if len(known) == len(modes) and modes:
                mode = max(known)
                Path(folder).chmod(mode | (mode & 0o444) >> 2)  # users who may read a folder's files may enter it
            elif Path(folder) == partial:
                partial.chmod(partial.parent.stat().st_mode & 0o777)  # the same mode as the run directory
