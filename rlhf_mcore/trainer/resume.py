"""Find the start of a run: its first step, or the newest intact checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlhf_mcore.checkpoint.config_changes import compare_configs, refuse
from rlhf_mcore.checkpoint.contents import model_names
from rlhf_mcore.checkpoint.delta import readable, verify_chain
from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.checkpoint.housekeeping import best_rule, recover, set_aside, steps_after
from rlhf_mcore.checkpoint.layout import CONFIG, MANIFEST, linked_checkpoints, scan, without_manifest
from rlhf_mcore.checkpoint.manifest import Problem, library_versions, read_manifest
from rlhf_mcore.config.errors import ConfigError, join_first
from rlhf_mcore.config.schema import CheckpointConfig
from rlhf_mcore.config.schema.run import AUTO, NEVER
from rlhf_mcore.foreign import SMALL, read_text
from rlhf_mcore.trainer.inputs import Inputs
from rlhf_mcore.trainer.run_state import Start, check_counts, read_inputs, read_step

MAX_NOTED = 20


class Checker:
    """Checks checkpoints in one process. It does not check the content of models and optimizers."""

    def verify(self, checkpoint: Path, *, hashes: bool) -> list[Problem]:
        """Return the problems of the files, see ``verify_chain``."""
        return verify_chain(checkpoint, hashes=hashes)

    def readable(self, checkpoint: Path, model: str, scratch: Path) -> Path:
        """Return a directory with a model's weights, see ``delta.readable``."""
        return readable(checkpoint, model, scratch)

    def check_saved(self, checkpoint: Path, weights: Mapping[str, Path]) -> None:
        """Raise ConfigError if files match the manifest but have content that no run can have saved.

        ``weights``: weight directory per model.
        """


def find_start(
    run: Path,
    cfg: CheckpointConfig,
    config_yaml: str,
    inputs: Inputs | None = None,
    checker: Checker | None = None,
    disk: Disk | None = None,
) -> Start:
    """Clean up a run directory and choose the checkpoint to resume from. Only the process with the directory's lock calls it.

    ``inputs``: fingerprints of the run's inputs, as the configuration names them. ``checker`` checks the checkpoint. Without it, only
    its files are compared.

    Raises:
        ConfigError: the requested checkpoint is damaged, no checkpoint is intact, or the configuration or the content of an input
            has a change that is not allowed.
    """
    inputs = inputs or {}
    disk = disk or Disk()
    _refuse_linked(run)
    notes = recover(run, best_rule(cfg), disk)
    own = scan(run)
    if cfg.resume == NEVER:
        if own:  # in one directory, the checkpoints of two runs are not distinguishable
            raise ConfigError(
                f"checkpoint.resume={NEVER!r}, but {run} holds {len(own)} checkpoints of an earlier run; choose another "
                "experiment, or move them away"
            )
        return Start(notes=notes, inputs=inputs)
    if cfg.resume == AUTO and not own and not without_manifest(run):
        return Start(notes=notes, inputs=inputs)
    return _continue_run(run, cfg, config_yaml, inputs, checker or Checker(), disk, notes)


def _refuse_linked(run: Path) -> None:
    """Reject checkpoints that are links. Skipping them would lose progress, and cleanup could delete their target."""
    if links := linked_checkpoints(run):
        raise ConfigError.many(
            [
                f"{path} is a link to {path.readlink()}, and a run uses directories of its own only; move the checkpoint here, or go "
                f"on from it in another experiment (checkpoint.resume={os.path.realpath(path)})"
                for path in links
            ]
        )


def _continue_run(
    run: Path,
    cfg: CheckpointConfig,
    config_yaml: str,
    inputs: Inputs,
    checker: Checker,
    disk: Disk,
    notes: list[str],
) -> Start:
    """Choose the checkpoint, and set aside later checkpoints. See ``find_start``. ``notes``: notes on the run directory so far."""
    own = scan(run)
    if cfg.resume != AUTO and (not own or os.path.dirname(os.path.realpath(cfg.resume)) == os.path.realpath(run)):
        chosen = Path(os.path.realpath(cfg.resume))
        weights, extra = _check(chosen, cfg, run, checker)
    else:
        chosen, weights, extra, passed_over = _newest_intact(run, cfg, checker)
        notes = notes + passed_over
    if extra:
        notes.append(f"not loaded from {chosen.name}: {join_first(extra, MAX_NOTED)}")
    notes += [*_compare(chosen, cfg, config_yaml, inputs), *_other_libraries(chosen)]
    step, inside = read_step(chosen), chosen.parent == run.resolve() or chosen.parent == run
    if inside:
        notes += set_aside(run, steps_after(run, step), best_rule(cfg), disk)
    return Start(chosen, step, weights, inside, notes=notes, inputs=inputs)


def _newest_intact(
    run: Path, cfg: CheckpointConfig, checker: Checker
) -> tuple[Path, dict[str, Path], list[Problem], list[str]]:
    """Return the newest intact checkpoint, the results of ``_check`` for it, and a line for each skipped checkpoint."""
    own, unread = scan(run), without_manifest(run)
    if not own:
        raise ConfigError(
            f"{run / unread[0]} has no readable {MANIFEST}, so it may be incomplete; restore the file, or move the directory away"
        )
    passed_over = [f"{name} is not used: it has no readable {MANIFEST}" for name in unread]
    damaged: list[str] = []
    for checkpoint in reversed(own):
        try:
            weights, extra = _check(checkpoint.path, cfg, run, checker)
        except ConfigError as error:
            if cfg.on_damaged == "error":
                raise
            damaged.append(f"{error} Falling back to the checkpoint before it.")
        else:
            return checkpoint.path, weights, extra, passed_over + damaged
    none = f"none of the {len(own)} checkpoints in {run} is intact; start a new experiment"
    raise ConfigError.many([none, *damaged])


def _check(
    checkpoint: Path, cfg: CheckpointConfig, run: Path, checker: Checker
) -> tuple[dict[str, Path], list[Problem]]:
    """Return the weight directory per model, and the files that the manifest does not list.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    problems = checker.verify(checkpoint, hashes=cfg.verify)
    damaged = [problem for problem in problems if problem.is_damage]
    if damaged:
        raise ConfigError(f"{checkpoint} is damaged: {join_first(damaged, MAX_NOTED)}.")
    check_counts(checkpoint)
    models = model_names(read_manifest(checkpoint).files)
    weights = {model: checker.readable(checkpoint, model, run) for model in models}
    try:
        checker.check_saved(checkpoint, weights)
    except ConfigError as error:
        raise ConfigError(f"{checkpoint} is damaged: {error}") from error
    return weights, problems


def _other_libraries(checkpoint: Path) -> list[str]:
    """Return a warning if library versions or the kind of processor differ from the checkpoint's."""
    before, now = read_manifest(checkpoint).libraries, dict(library_versions())
    if "processor" not in before:  # an earlier release wrote it, or a run on GPUs
        now.pop("processor", None)
    changed = [
        f"{name} was {before.get(name, 'not installed')} and is {now.get(name, 'not installed')}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if not changed:
        return []
    return [f"warning: {'; '.join(changed)}: the last digits of numbers may differ from those of an unbroken run"]


def _compare(checkpoint: Path, cfg: CheckpointConfig, config_yaml: str, inputs: Inputs) -> list[str]:
    saved = read_text(checkpoint / CONFIG, limit=SMALL.num_bytes, remedy="choose another checkpoint")
    known = read_inputs(checkpoint)
    by_content = keys_of(known) & keys_of(inputs) if known is not None else frozenset()
    fixed, other = compare_configs(saved, config_yaml, by_content)
    refuse(checkpoint, fixed)
    shown = other[:MAX_NOTED]
    notes = [f"changed since: {line}" for line in shown]
    if len(other) > len(shown):
        notes.append(f"changed since: {len(other) - len(shown)} more keys")
    if known is None:
        return [
            *notes,
            f"{checkpoint.name} holds no fingerprints of data, code and models: the release that wrote it kept none",
        ]
    return notes + compare_inputs(checkpoint, cfg, inputs)


def compare_inputs(checkpoint: Path, cfg: CheckpointConfig, inputs: Inputs) -> list[str]:
    """Return a warning for each input whose content differs from the checkpoint's.

    Raises:
        ConfigError: inputs differ, and ``cfg.changed_inputs`` does not allow it.
    """
    known = read_inputs(checkpoint)
    changed = changed_inputs(known, inputs) if known is not None else []
    if changed and cfg.changed_inputs == "refuse":
        raise ConfigError.many(
            [
                f"{line}; restore it, start a new experiment, or set checkpoint.changed_inputs=warn (checkpoint: {checkpoint})"
                for line in changed
            ]
        )
    return [f"warning: {line}" for line in changed]


def changed_inputs(saved: Inputs, current: Inputs) -> list[str]:
    """Return a line for each input whose content has changed.

    If only one side has an input, the configuration has changed, and the comparison of configurations reports it. Two inputs are
    reported here anyway: training prompts, and the reward function if an older release saved the checkpoint without a reward entry.
    """
    lines = []
    for name in dict.fromkeys((*saved, *current)):
        before, now = saved.get(name), current.get(name)
        if before is None or now is None:
            if name.startswith("data.train[") or (name == "reward.function" and "reward" not in saved):
                lines.append(
                    f"{name} was {before['path'] if before else 'not there'} and is {now['path'] if now else 'not there'}"
                )
        elif before["content"] != now["content"]:
            where = f"{before['path']} then, {now['path']} now" if before["path"] != now["path"] else before["path"]
            lines.append(f"{name} has another content than when the checkpoint was written ({where})")
    return lines


def keys_of(inputs: Inputs) -> frozenset[str]:
    """Return the keys of the configuration that name these inputs."""
    return frozenset(name.partition("[")[0].partition(" (")[0] for name in inputs)
