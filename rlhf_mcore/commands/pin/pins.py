"""Keeps checkpoints under names of their own, and lets go of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import MANIFEST, checkpoint_path, scan
from rlhf_mcore.checkpoint.links import PINS, read_pins
from rlhf_mcore.config.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def pin(run: Path, step: int, name: str, disk: Disk) -> Path:
    """Keep the checkpoint of a step under a name. Returns the link.

    Raises:
        ConfigError: there is no such checkpoint, or the name is not plain or names another checkpoint.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME={name!r} is not a plain name; use up to 64 letters, digits, dots, dashes, underscores")
    if (run / PINS).is_symlink():
        raise ConfigError(f"{run / PINS} is a link; make it a directory")
    steps = [checkpoint.step for checkpoint in scan(run)]
    if step not in steps:
        raise ConfigError(f"STEP={step}: {run} has no checkpoint-{step}; it has {_join(steps)}")
    link = run / PINS / name
    if (pinned := read_pins(run).get(name)) == step:
        return link
    if pinned is not None or link.is_symlink() or link.exists():
        what = f"checkpoint-{pinned}" if pinned is not None else "something else"
        raise ConfigError(f"NAME={name}: {link} names {what} already; choose another name, or remove that pin first")
    disk.make_directory(link.parent)
    disk.symlink(link, f"../checkpoint-{step}")
    disk.sync_directory(link.parent)
    # The run may have removed it since the scan.
    if not (checkpoint_path(run, step) / MANIFEST).is_file():
        disk.unlink(link)
        raise ConfigError(f"STEP={step}: the run has removed checkpoint-{step} just now; choose another one")
    return link


def unpin(run: Path, name: str, disk: Disk) -> None:
    """Remove a pin, so that retention may remove the checkpoint.

    Raises:
        ConfigError: there is no pin of that name.
    """
    pins = read_pins(run)
    if name not in pins:
        raise ConfigError(f"NAME={name}: {run} has no such pin; it has {_join(list(pins))}")
    disk.unlink(run / PINS / name)
    disk.sync_directory(run / PINS)


def _join(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none"
