"""The links of a run directory: ``latest``, ``best``, and ``pins/<name>`` for checkpoints that somebody has tagged.

They are for people and tools; the trainer scans the directory instead. Retention keeps a pinned checkpoint. A pin may be made and
removed while the run continues.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import BEST, LATEST, MANIFEST, Checkpoint, checkpoint_path, linked_step, scan, step_of
from rlhf_mcore.checkpoint.manifest import has_base, read_manifest
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig

PINS = "pins"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class BestRule:
    """Ranks checkpoints by a metric of the evaluation at their step."""

    metric: str
    greater_is_better: bool = True

    def improves(self, value: float, on: float | None) -> bool:
        """Return whether ``value`` is better than ``on``. Any number is better than None; NaN is never better."""
        if value != value:
            return False
        return on is None or (value > on if self.greater_is_better else value < on)


def best_rule(cfg: CheckpointConfig) -> BestRule | None:
    """Return the rule of ``metric_for_best_model``, None if it is not set."""
    return BestRule(cfg.metric_for_best_model, cfg.greater_is_better) if cfg.metric_for_best_model is not None else None


def find_best(checkpoints: list[Checkpoint], rule: BestRule) -> Checkpoint | None:
    """Return the best checkpoint, of equal ones the earliest. Those without the metric or a readable manifest do not count."""
    best, best_value = None, None
    for checkpoint in checkpoints:
        try:
            value = read_manifest(checkpoint.path).info.metrics.get(rule.metric)
        except ConfigError:
            continue
        if value is not None and rule.improves(value, best_value):
            best, best_value = checkpoint, value
    return best


def point(link: Path, target: str, disk: Disk) -> None:
    """Move a link to ``target`` in one step: a reader sees the old or the new one, never none."""
    temporary = link.with_name(f".{link.name}.new")
    disk.unlink(temporary)
    disk.symlink(temporary, target)
    disk.rename(temporary, link)
    disk.sync_directory(link.parent)


def refresh_links(run: Path, rule: BestRule | None, disk: Disk) -> list[str]:
    """Point ``latest`` at the newest checkpoint and ``best`` at the best one. Returns one line for each change.

    Without a rule, a ``best`` that names a checkpoint stays. A link to nothing is removed. A delta without its base is unusable, and
    no link names it.
    """
    checkpoints = [checkpoint for checkpoint in scan(run) if has_base(checkpoint.path)]
    latest = checkpoints[-1].step if checkpoints else None
    best = linked_step(run, BEST)
    if rule is not None:
        checkpoint = find_best(checkpoints, rule)
        best = checkpoint.step if checkpoint else None
    elif best not in [checkpoint.step for checkpoint in checkpoints]:
        best = None
    changed = [_refresh(run / LATEST, latest, disk), _refresh(run / BEST, best, disk)]
    return [note for note in changed if note]


def _refresh(link: Path, step: int | None, disk: Disk) -> str | None:
    disk.unlink(link.with_name(f".{link.name}.new"))
    if step is None:
        if not link.is_symlink():
            return None
        disk.unlink(link)
        return f"link {link.name} removed: it named no checkpoint"
    if linked_step(link.parent, link.name) == step:
        return None
    point(link, f"checkpoint-{step}", disk)
    return f"link {link.name} now names checkpoint-{step}"


def read_pins(run: Path) -> dict[str, int]:
    """Return the step of each pin by its name. Links made by hand that lead elsewhere are no pins."""
    folder = run / PINS
    if folder.is_symlink() or not folder.is_dir():
        return {}
    pins = {}
    for link in sorted(folder.iterdir()):
        target = link.readlink() if link.is_symlink() else Path()
        step = step_of(target.name)
        if step is not None and target == Path("..", target.name):
            pins[link.name] = step
    return pins


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
