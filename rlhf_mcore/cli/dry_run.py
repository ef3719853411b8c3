"""Run the checks that ranks run before they build models, in this process and without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf_mcore.checkpoint.disk import Disk
from rlhf_mcore.cli.preflight import continues_text
from rlhf_mcore.cli.run_context import load_example_data, load_prompt_data
from rlhf_mcore.cli.saved_checkpoint import check_saved
from rlhf_mcore.config.resolve import with_sequences
from rlhf_mcore.config.run_kinds import RL, run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.config.yaml_text import to_yaml
from rlhf_mcore.platform import current_platform
from rlhf_mcore.trainer.inputs import fingerprints
from rlhf_mcore.trainer.resume import Checker, find_start


def check_as_ranks(cfg: Config, directory: Path, announced: int) -> list[str]:
    """Check the checkpoint that a run continues from, and every row of its data. Returns the lines that the run would print.

    ``announced``: the step after which the run continues, if it was already printed.

    Raises:
        ConfigError: a check fails, as on the ranks.
    """
    notes: list[str] = []
    platform = current_platform()
    device = platform.memory_bytes() or 0, platform.device_name()
    shown = cfg.model_copy(update={"rollout": with_sequences(cfg.rollout, *device)}) if run_kind(cfg).generates else cfg
    with TemporaryDirectory(prefix=".dry-run-", dir=directory) as scratch:
        checker = _Checker(cfg, Path(scratch))
        start = find_start(
            directory, cfg.checkpoint, to_yaml(shown), fingerprints(cfg), lambda: checker, _UnchangedDisk()
        )
    if start.checkpoint is not None and start.step != announced:
        notes.append(continues_text(cfg, start.checkpoint, start.step))
    notes += start.notes
    load: Callable[..., Any] = load_prompt_data if run_kind(cfg) is RL else load_example_data
    load(cfg, notes.append, None)
    return notes


class _UnchangedDisk(Disk):
    """A disk that ignores every change."""

    def perform(self, name: str, action: Callable[[], Any], path: Path) -> Any:
        return None


class _Checker(Checker):
    """Check checkpoints with the values of models and optimizers. Weights of deltas are restored in ``scratch``."""

    def __init__(self, cfg: Config, scratch: Path):
        self._cfg, self._scratch = cfg, scratch

    def readable(self, checkpoint: Path, model: str, scratch: Path) -> Path:
        """Call ``delta.readable`` with the scratch directory of this dry run."""
        return super().readable(checkpoint, model, self._scratch)

    def check_saved(self, checkpoint: Path, weights: Mapping[str, Path]) -> None:
        """Call ``saved_checkpoint.check_saved`` in this process."""
        check_saved(checkpoint, weights, values=self._cfg.checkpoint.verify, base=self._cfg.model.path)
