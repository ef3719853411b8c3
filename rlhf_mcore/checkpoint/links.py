"""The links of a run directory: ``latest``, ``best``, and ``pins/<name>`` for checkpoints that somebody has tagged.

They are for people and tools; the trainer scans the directory instead. Retention keeps a pinned checkpoint. A pin may be made and
removed while the run continues.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import BEST, LATEST, Checkpoint, linked_step, scan, step_of
from rlhf_mcore.checkpoint.manifest import has_base, read_manifest
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig

PINS = "pins"


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
