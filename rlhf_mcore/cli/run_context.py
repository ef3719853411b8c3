"""What every part of a training run is built from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.config.run_kinds import RunKind, run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.platform import Platform
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.resume import Start


@dataclass(frozen=True, slots=True)
class RunContext:
    """A resolved configuration, the process that runs it, the record that it leaves, and where it begins."""

    cfg: Config
    platform: Platform
    record: RunRecord
    start: Start
    requests: SignalRequests

    @property
    def kind(self) -> RunKind:
        return run_kind(self.cfg)

    @property
    def dtype(self) -> str:
        """Of models that do not have their own: fp32, bf16 or fp16."""
        return self.platform.dtype(self.cfg.model.dtype)

    @property
    def directory(self) -> Path:
        return Path(self.cfg.output_dir).resolve() / self.cfg.project / self.cfg.experiment
