"""Names in a run directory, and what is there.

The name of a thing is its state: only ``checkpoint-<step>`` with a manifest is a checkpoint, wherever the links point.
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
ROLLOUTS = "rollouts.safetensors"  # where sampling runs ahead: responses that wait to be learned from
DOCUMENTS = (TRAINER_STATE, DATALOADER, CONFIG, RNG_FILE)
TRAINING = "training"  # in the directory of a model: what its optimizer needs
# Of a weight file that is stored as a difference, in the place of the file.
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
    """Where the checkpoint of a step is."""
    return run / f"checkpoint-{step}"


def transitional_path(run: Path, step: int, state: str, token: str = "") -> Path:
    """A hidden name of a step's directory. A ``token`` keeps writers that outlive a killed run away from the next run's files."""
    return run / f".checkpoint-{step}.{state}{f'-{token}' if token else ''}"


def step_of(name: str) -> int | None:
    """The step in ``checkpoint-<step>``, None for other names."""
    match = _COMMITTED.fullmatch(name)
    return int(match[1]) if match else None


def scan(run: Path) -> list[Checkpoint]:
    """The committed checkpoints in a run directory, by rising step."""
    found = []
    for path in _folders(run):
        step = step_of(path.name)
        if step is not None and (path / MANIFEST).is_file():
            found.append(Checkpoint(step, path))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def without_manifest(run: Path) -> list[str]:
    """Names of directories that are called a checkpoint and have no manifest, which a commit does not leave."""
    return sorted(
        path.name for path in _folders(run) if step_of(path.name) is not None and not (path / MANIFEST).is_file()
    )


def scan_transitional(run: Path) -> list[Transitional]:
    """What a killed run has left half way in or out, by rising step."""
    found = []
    for path in _folders(run):
        match = _TRANSITIONAL.fullmatch(path.name)
        if match:
            found.append(Transitional(int(match[1]), match[2], path))
    return sorted(found, key=lambda item: (item.step, item.path.name))


def own_entries(run: Path, folder: str) -> list[Path]:
    """What is in a directory of the run (``quarantine``, ``archive``), by name; nothing where that is a link."""
    path = run / folder
    return sorted(path.iterdir()) if path.is_dir() and not path.is_symlink() else []


def linked_checkpoints(run: Path) -> list[Path]:
    """Links that have the name of a checkpoint, which no run makes."""
    return sorted(path for path in run.glob("checkpoint-*") if path.is_symlink() and step_of(path.name) is not None)


def linked_step(run: Path, link: str) -> int | None:
    """The step that a link of the run directory names, None when it is missing or does not name a committed checkpoint."""
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
