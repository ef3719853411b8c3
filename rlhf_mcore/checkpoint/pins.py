"""Checkpoints that somebody has tagged: ``pins/<name>`` in a run directory is a link to one, and retention leaves it alone.

A pin may be made and taken away while the run continues.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import MANIFEST, checkpoint_path, scan, step_of
from rlhf_mcore.config.errors import ConfigError

PINS = "pins"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_pins(run: Path) -> dict[str, int]:
    """Step of each pin by its name. Links that were made by hand and lead elsewhere are no pins."""
    folder = run / PINS
    if folder.is_symlink() or not folder.is_dir():
        return {}
    found = {}
    for link in sorted(folder.iterdir()):
        target = link.readlink() if link.is_symlink() else Path()
        step = step_of(target.name)
        if step is not None and target == Path("..", target.name):
            found[link.name] = step
    return found


def pin(run: Path, step: int, name: str, disk: Disk) -> Path:
    """Keep the checkpoint of a step under a name. Returns the link.

    Raises:
        ConfigError: there is no such checkpoint, the name is not a plain one, or it is another checkpoint's.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME={name!r} is not a plain name; use up to 64 letters, digits, dots, dashes, underscores")
    if (run / PINS).is_symlink():
        raise ConfigError(f"{run / PINS} is a link; make it a directory")
    steps = [checkpoint.step for checkpoint in scan(run)]
    if step not in steps:
        raise ConfigError(f"STEP={step}: {run} has no checkpoint-{step}; it has {_listed(steps)}")
    link = run / PINS / name
    if (held := read_pins(run).get(name)) == step:
        return link
    if held is not None or link.is_symlink() or link.exists():
        what = f"checkpoint-{held}" if held is not None else "something else"
        raise ConfigError(f"NAME={name}: {link} names {what} already; choose another name, or remove that pin first")
    disk.make_directory(link.parent)
    disk.symlink(link, f"../checkpoint-{step}")
    disk.sync_directory(link.parent)
    if not (checkpoint_path(run, step) / MANIFEST).is_file():  # the run has dropped it since it was looked at
        disk.unlink(link)
        raise ConfigError(f"STEP={step}: the run has removed checkpoint-{step} just now; choose another one")
    return link


def unpin(run: Path, name: str, disk: Disk) -> None:
    """Let retention have the checkpoint again.

    Raises:
        ConfigError: there is no pin of that name.
    """
    pins = read_pins(run)
    if name not in pins:
        raise ConfigError(f"NAME={name}: {run} has no such pin; it has {_listed(list(pins))}")
    disk.unlink(run / PINS / name)
    disk.sync_directory(run / PINS)


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none"
