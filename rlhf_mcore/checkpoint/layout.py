"""Define the names in a run directory, and list its contents.

The name of a directory is its state. Only ``checkpoint-<step>`` with a manifest is a checkpoint, regardless of
links.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"
QUARANTINE = "quarantine"
ARCHIVE = "archive"
SAVE_REQUEST = "SAVE"

# In every checkpoint, in addition to the directories of its models.
TRAINER_STATE = "trainer_state.json"
DATALOADER = "dataloader.json"
CONFIG = "config.yaml"
RNG_FILE = "rng.safetensors"
ROLLOUTS = "rollouts.safetensors"  # runs that sample ahead: responses that wait for training
DOCUMENTS = (TRAINER_STATE, DATALOADER, CONFIG, RNG_FILE)
TRAINING = "training"  # in a model's directory: the state of its optimizer
# Suffixes of the two files that replace a weight file stored as a difference.
DELTA_DATA = ".delta"
DELTA_INDEX = ".delta.json"

_COMMITTED = re.compile(r"checkpoint-(0|[1-9]\d*)")
_TRANSITIONAL = re.compile(r"\.checkpoint-(0|[1-9]\d*)\.(partial|replaced|removed|full)(-[0-9a-z]+)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: it has its final name and a manifest. ``manifest.verify`` checks whether it is intact."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Transitional:
    """A directory that is being created or removed.

    ``state``: partial | replaced | removed | full (a delta made readable).
    """

    step: int
    state: str
    path: Path


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return run / f"checkpoint-{step}"


def transitional_path(run: Path, step: int, state: str, token: str = "") -> Path:
    """Return a hidden path for a step's directory.

    A ``token`` separates writers that outlive a killed run from the next run's files.
    """
    return run / f".checkpoint-{step}.{state}{f'-{token}' if token else ''}"


def step_of(name: str) -> int | None:
    """Return the step in ``checkpoint-<step>``, or None for other names."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def scan(run: Path) -> list[Checkpoint]:
    """Return the committed checkpoints in a run directory, in ascending order of steps."""
    checkpoints = [
        Checkpoint(step, path)
        for path in _folders(run)
        if (step := step_of(path.name)) is not None and (path / MANIFEST).is_file()
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def without_manifest(run: Path) -> list[str]:
    """Return the names of directories with a checkpoint's name but no manifest.

    A commit never leaves such directories.
    """
    return sorted(
        path.name for path in _folders(run) if step_of(path.name) is not None and not (path / MANIFEST).is_file()
    )


def scan_transitional(run: Path) -> list[Transitional]:
    """Return the directories that a killed run was writing, replacing or removing, in ascending order of steps."""
    directories = [
        Transitional(int(match[1]), match[2], path)
        for path in _folders(run)
        if (match := _TRANSITIONAL.fullmatch(path.name))
    ]
    return sorted(directories, key=lambda item: (item.step, item.path.name))


def own_entries(run: Path, folder: str) -> list[Path]:
    """Return the entries of a directory in the run (``quarantine``, ``archive``), by name.

    Return [] if the directory is a link.
    """
    path = run / folder
    return sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []


def linked_checkpoints(run: Path) -> list[Path]:
    """Return links with a checkpoint's name. No run creates such links."""
    return sorted(path for path in run.glob("checkpoint-*") if path.is_symlink() and step_of(path.name) is not None)


def linked_step(run: Path, link: str) -> int | None:
    """Return the step to which a link of the run directory points, or None if it does not point to a committed checkpoint."""
    path = run / link
    if not path.is_symlink():
        return None
    target = path.readlink()
    step = step_of(target.name)
    if step is None or target != Path(target.name) or not (run / target / MANIFEST).is_file():
        return None
    return step


def _folders(run: Path) -> list[Path]:
    if not run.is_dir():
        return []
    return [path for path in run.iterdir() if path.is_dir() and not path.is_symlink()]
