"""Where a run begins: at its first step, or after the newest checkpoint that is intact."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.layout import Checkpoint, scan
from rlhf_mcore.checkpoint.links import BestRule
from rlhf_mcore.checkpoint.recovery import recover, set_aside, steps_after
from rlhf_mcore.config.checkpoint_rules import AUTO, NEVER
from rlhf_mcore.config.differences import compare_configs, refuse
from rlhf_mcore.config.errors import ConfigError
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.trainer.documents import CONFIG, read_step

MAX_NOTED = 20


@dataclass(frozen=True, slots=True)
class Start:
    """A run begins after ``step`` with what ``checkpoint`` holds; None: with the weights of the configuration.

    ``weights``: by role the Hugging Face directory with its weights. ``continues``: the run's own record goes on, up to this step.
    """

    checkpoint: Path | None = None
    step: int = 0
    weights: dict[str, Path] = field(default_factory=dict)
    continues: bool = False
    notes: list[str] = field(default_factory=list)


def best_rule(cfg: CheckpointConfig) -> BestRule | None:
    """Which checkpoint is the best, None if no metric says so."""
    return BestRule(cfg.metric_for_best_model, cfg.greater_is_better) if cfg.metric_for_best_model is not None else None


def find_start(run: Path, cfg: CheckpointConfig, config_yaml: str, disk: Disk | None = None) -> Start:
    """Bring a run directory in order and choose the checkpoint to go on from. For one process, which holds the directory's lock.

    Raises:
        ConfigError: a checkpoint was asked for and is damaged, none of several is intact, or the configuration has changed in what
            cannot be changed.
    """
    disk = disk or Disk()
    rule = best_rule(cfg)
    notes = recover(run, rule, disk)
    own = scan(run)
    if cfg.resume == NEVER:
        _refuse_to_mix(run, own)
        return Start(notes=notes)
    if cfg.resume != AUTO and (not own or Path(cfg.resume).resolve().parent == run.resolve()):
        chosen = Path(cfg.resume).resolve()
        _check(chosen, cfg)
    else:
        found, skipped = _newest_intact(own, cfg)
        notes += skipped
        if found is None:
            return Start(notes=notes)
        chosen = found.path
    notes += _compare(chosen, config_yaml)
    step, inside = read_step(chosen), chosen.parent == run.resolve() or chosen.parent == run
    if inside:
        notes += set_aside(run, steps_after(run, step), rule, disk)
    weights = {role.name: readable(chosen, role.name, run) for role in sorted(chosen.iterdir()) if role.is_dir()}
    return Start(chosen, step, weights, inside, [f"going on after step {step} from {chosen}", *notes])


def _newest_intact(own: list[Checkpoint], cfg: CheckpointConfig) -> tuple[Checkpoint | None, list[str]]:
    notes: list[str] = []
    for checkpoint in reversed(own):
        try:
            _check(checkpoint.path, cfg)
        except ConfigError as error:
            if cfg.on_damaged == "error":
                raise
            notes.append(f"{error} Falling back to the checkpoint before it.")
        else:
            return checkpoint, notes
    if own:
        raise ConfigError.many(
            [f"none of the {len(own)} checkpoints in {own[0].path.parent} is intact; start a new experiment", *notes]
        )
    return None, notes


def _check(checkpoint: Path, cfg: CheckpointConfig) -> None:
    damaged = [problem for problem in verify_chain(checkpoint, hashes=cfg.verify) if problem.is_damage]
    if damaged:
        raise ConfigError(f"{checkpoint} is damaged: {'; '.join(map(str, damaged))}.")


def _compare(checkpoint: Path, config_yaml: str) -> list[str]:
    try:
        saved = (checkpoint / CONFIG).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{checkpoint / CONFIG}: not readable ({error}); choose another checkpoint") from error
    fixed, other = compare_configs(saved, config_yaml)
    refuse(checkpoint, fixed)
    shown = other[:MAX_NOTED]
    return [f"changed since: {line}" for line in shown] + (
        [f"changed since: {len(other) - len(shown)} more keys"] if len(other) > len(shown) else []
    )


def _refuse_to_mix(run: Path, own: list[Checkpoint]) -> None:
    """Checkpoints of two runs in one directory could not be told apart."""
    if own:
        raise ConfigError(
            f"checkpoint.resume={NEVER!r}, but {run} holds {len(own)} checkpoints of an earlier run; choose another experiment, "
            "or move them away"
        )
