"""``rlhf-mcore verify-checkpoint DIR``: list all damaged, missing, truncated and extra files of a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf_mcore.checkpoint.contents import model_names
from rlhf_mcore.checkpoint.delta import verify_chain
from rlhf_mcore.checkpoint.housekeeping import read_pins
from rlhf_mcore.checkpoint.layout import BEST, LATEST, MANIFEST, linked_checkpoints, linked_step, scan, step_of
from rlhf_mcore.checkpoint.manifest import Problem, base_of, read_manifest
from rlhf_mcore.cli import terminal
from rlhf_mcore.cli.arguments import command_parser
from rlhf_mcore.cli.terminal import progress_bar, say, working
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.readers.adapter_files import base_model, holds_adapter

SHOWN = 100  # maximum number of listed problems per checkpoint, because a manifest may name a million missing files
EPILOG = """\
exit codes:
  0          intact
  2          damaged, or there is no checkpoint"""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The problems found in one checkpoint."""

    path: Path
    problems: list[Problem]
    pins: list[str] = field(default_factory=list)  # names that protect it from deletion

    @property
    def is_intact(self) -> bool:
        """Return whether the checkpoint can be loaded. Extra files are reported, but are no damage."""
        return not any(problem.is_damage for problem in self.problems)

    def as_text(self) -> str:
        """Return one line for the checkpoint and one per problem, up to ``SHOWN`` problems."""
        pins = f", pinned as {', '.join(self.pins)}" if self.pins else ""
        lines = [f"{self.path}: {'intact' if self.is_intact else 'damaged'}{pins}"]
        lines += [f"  {problem}" for problem in self.problems[:SHOWN]]
        if len(self.problems) > SHOWN:
            lines.append(f"  and {len(self.problems) - SHOWN:,} more: {_count(self.problems[SHOWN:])}")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the same problems as the text, and the number of all problems."""
        shown = [asdict(problem) for problem in self.problems[:SHOWN]]
        counts = {"problems": shown, "num_problems": len(self.problems)}
        return {"path": str(self.path), "intact": self.is_intact, "pins": self.pins, **counts}


def _count(problems: Sequence[Problem]) -> str:
    return ", ".join(f"{number:,} {kind}" for kind, number in Counter(each.kind for each in problems).most_common())


@terminal.report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Check the checkpoints and print the reports. Returns the exit code."""
    args = _parser().parse_args(argv)
    checkpoints = _checkpoints(Path(args.directory))
    with progress_bar(Console(stderr=True), "comparing", sum(map(_num_bytes, checkpoints))) as advance:
        reports = [_check(path, advance, hashes=not args.quick) for path in checkpoints]
    whole = [report for report in reports if not (args.quick or report.path.is_symlink()) and report.is_intact]
    with working("reading the models of", len(whole)) as begin:
        for report in whole:
            begin(report.path.name)
            report.problems.extend(_unusable(report.path, report.problems))
    if args.json:
        say(json.dumps([report.as_json() for report in reports], indent=1))
    else:
        say("\n".join(report.as_text() for report in reports))
    return terminal.DONE if all(report.is_intact for report in reports) else terminal.USER_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "rlhf-mcore verify-checkpoint",
        "Compare every file of a checkpoint with its manifest. For a delta, also check the full checkpoint that it needs. "
        "For a run directory, check all checkpoints and links in it.",
        examples=[
            "rlhf-mcore verify-checkpoint outputs/my/run",
            "rlhf-mcore verify-checkpoint outputs/my/run/checkpoint-100 --quick",
        ],
        exits=EPILOG,
    )
    parser.add_argument("directory", metavar="DIR", help="a checkpoint, or a run directory")
    parser.add_argument("--quick", action="store_true", help="compare only names and sizes, not the content")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoint, or all checkpoints and links of a run directory.

    Raises:
        ConfigError: there is no checkpoint.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory; give a checkpoint or a run directory")
    if (directory / MANIFEST).exists() or (directory / "actor").is_dir():
        return [directory.resolve()]
    checkpoints = [*(checkpoint.path for checkpoint in scan(directory)), *linked_checkpoints(directory)]
    if not checkpoints:
        raise ConfigError(
            f"{directory} contains neither a {MANIFEST} nor checkpoints; give a checkpoint or a run directory"
        )
    return [*checkpoints, *(directory / link for link in (LATEST, BEST) if (directory / link).is_symlink())]


def _num_bytes(path: Path) -> int:
    """Return the total size of the files in a checkpoint's manifest, or 0 if it cannot be read or is a link."""
    try:
        return 0 if path.is_symlink() else sum(entry.size for entry in read_manifest(path).files.values())
    except ConfigError:
        return 0


def _check(path: Path, progress: Callable[[int], None], *, hashes: bool) -> CheckpointReport:
    if not path.is_symlink():
        pins = [name for name, step in read_pins(path.parent).items() if step == step_of(path.name)]
        return CheckpointReport(path, verify_chain(path, hashes=hashes, progress=progress), pins)
    if path.name not in (LATEST, BEST):
        detail = f"a link to {path.readlink()}: no run resumes from it; move the checkpoint here"
        return CheckpointReport(path, [Problem(path.name, "outside", detail)])
    if linked_step(path.parent, path.name) is None:
        return CheckpointReport(
            path, [Problem(path.name, "missing", f"links to {path.readlink()}, which is not a checkpoint")]
        )
    return CheckpointReport(path, [])


def _unusable(checkpoint: Path, extra: list[Problem]) -> list[Problem]:
    """Return the reasons why no run could resume from a full checkpoint with intact files. Models with extra files are skipped."""
    from rlhf_mcore.cli.saved_checkpoint import check_saved  # imports torch

    if base_of(checkpoint) is not None:
        return []  # a delta, whose weights would have to be restored first
    models = model_names(read_manifest(checkpoint).files)
    added = {problem.path.split("/")[0] for problem in extra}
    for model in models:
        if holds_adapter(checkpoint / model):
            try:
                base_model(checkpoint / model)
            except ConfigError as error:
                return [Problem(model, "unchecked", f"its tensors were not compared with their model: {error}")]
    try:
        check_saved(checkpoint, {model: checkpoint / model for model in models if model not in added})
    except ConfigError as error:
        return [Problem(checkpoint.name, "content", str(error))]
    return []
