"""Names in a run directory, and functions that list what is there.

The name of a directory is its state: only ``checkpoint-<step>`` with a manifest is a checkpoint, wherever the links point.
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

# In every checkpoint, beside the directories of its models.
TRAINER_STATE = "trainer_state.json"
DATALOADER = "dataloader.json"
CONFIG = "config.yaml"
RNG_FILE = "rng.safetensors"
ROLLOUTS = "rollouts.safetensors"  # of runs that sample ahead: responses that wait to be learned from
DOCUMENTS = (TRAINER_STATE, DATALOADER, CONFIG, RNG_FILE)
TRAINING = "training"  # in the directory of a model: the state of its optimizer
# Suffixes of the two files that replace a weight file stored as a difference.
DELTA_DATA = ".delta"
DELTA_INDEX = ".delta.json"

_COMMITTED = re.compile(r"checkpoint-(0|[1-9]\d*)")
_TRANSITIONAL = re.compile(r"\.checkpoint-(0|[1-9]\d*)\.(partial|replaced|removed|full)(-[0-9a-z]+)?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint: it has its final name and a manifest. ``manifest.verify`` tells whether it is intact."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class Transitional:
    """A directory on its way in or out. ``state``: partial | replaced | removed | full (a delta made readable)."""

    step: int
    state: str
    path: Path


def checkpoint_path(run: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return run / f"checkpoint-{step}"


def transitional_path(run: Path, step: int, state: str, token: str = "") -> Path:
    """Return a hidden path of a step's directory. A ``token`` keeps writers that outlive a killed run out of the next run's files."""
    return run / f".checkpoint-{step}.{state}{f'-{token}' if token else ''}"


def step_of(name: str) -> int | None:
    """Return the step in ``checkpoint-<step>``, None for other names."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def scan(run: Path) -> list[Checkpoint]:
    """Return the committed checkpoints in a run directory, by rising step."""
    checkpoints = [
        Checkpoint(step, path)
        for path in _folders(run)
        if (step := step_of(path.name)) is not None and (path / MANIFEST).is_file()
    ]
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.step)


def without_manifest(run: Path) -> list[str]:
    """Return the names of directories with a checkpoint's name but no manifest. A commit leaves none."""
    return sorted(
        path.name for path in _folders(run) if step_of(path.name) is not None and not (path / MANIFEST).is_file()
    )


def scan_transitional(run: Path) -> list[Transitional]:
    """Return the directories that a killed run was writing, replacing or removing, by rising step."""
    directories = [
        Transitional(int(match[1]), match[2], path)
        for path in _folders(run)
        if (match := _TRANSITIONAL.fullmatch(path.name))
    ]
    return sorted(directories, key=lambda item: (item.step, item.path.name))


def own_entries(run: Path, folder: str) -> list[Path]:
    """Return the entries of a directory of the run (``quarantine``, ``archive``), by name; [] if that is a link."""
    path = run / folder
    return sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []


def linked_checkpoints(run: Path) -> list[Path]:
    """Return links with a checkpoint's name. No run makes such links."""
    return sorted(path for path in run.glob("checkpoint-*") if path.is_symlink() and step_of(path.name) is not None)


def linked_step(run: Path, link: str) -> int | None:
    """Return the step that a link of the run directory names, None when it is missing or does not name a committed checkpoint."""
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
