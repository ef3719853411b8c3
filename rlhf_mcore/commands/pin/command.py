"""``rlhf-mcore pin RUN [STEP NAME | --remove NAME]``: keep a checkpoint under a name, whatever retention drops."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import MANIFEST, checkpoint_path, scan
from rlhf_mcore.checkpoint.links import PINS, read_pins
from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.config.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@exit_codes.reporting
def main(argv: Sequence[str] | None = None) -> int:
    """Pin, remove a pin, or list the pins of a run. Returns the exit code."""
    args = _parser().parse_args(argv)
    for line in _act(args.run, args.step, args.name, args.remove):
        say(line)
    return exit_codes.DONE


def _act(run: Path, step: int | None, name: str | None, remove: str | None) -> list[str]:
    if not run.is_dir():
        raise ConfigError(f"RUN={run} is not a directory (looked from {Path.cwd()}); give a run directory")
    if remove is not None:
        if step is not None:
            raise ConfigError(f"--remove={remove} and STEP={step} exclude each other; give one of them")
        unpin(run, remove, Disk())
        return [f"{remove} removed; its checkpoint stays as long as others of its age do"]
    if step is not None:
        if name is None:
            raise ConfigError(f"STEP={step} needs a NAME; give one, as in: rlhf-mcore pin {run} {step} good")
        return [f"{pin(run, step, name, Disk())} -> checkpoint-{step}: it stays until the pin is removed"]
    pins = read_pins(run)
    lines = []
    for pinned, at in pins.items():
        missing = "" if (checkpoint_path(run, at) / MANIFEST).is_file() else " (missing)"
        lines.append(f"{pinned} -> checkpoint-{at}{missing}")
    return lines or [f"{run} has no pins"]


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore pin",
        "Keep the checkpoint of a step under a name, RUN/pins/NAME: checkpoint.save_total_limit and archiving leave it "
        "alone. The run may be running. Without STEP the pins of the run are listed.",
        examples=["rlhf-mcore pin outputs/my/run 400 good", "rlhf-mcore pin outputs/my/run"],
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("step", metavar="STEP", nargs="?", type=int, help="step of the checkpoint")
    parser.add_argument("name", metavar="NAME", nargs="?", help="name of the pin")
    parser.add_argument("--remove", metavar="NAME", help="remove a pin; its checkpoint stays until retention drops it")
    return parser


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
