"""``rlhf-mcore pin RUN [STEP NAME | --remove NAME]``: keep a checkpoint under a name, whatever retention drops."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import MANIFEST, checkpoint_path
from rlhf_mcore.checkpoint.links import read_pins
from rlhf_mcore.cli import exit_codes
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import say
from rlhf_mcore.commands.pin.pins import pin, unpin
from rlhf_mcore.config.errors import ConfigError


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
