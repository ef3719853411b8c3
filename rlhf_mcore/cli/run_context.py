"""Hold what every part of a training run is built from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from transformers import PreTrainedTokenizerBase

from rlhf_mcore.checkpoint.triggers import SignalRequests
from rlhf_mcore.config.run_kinds import RunKind, run_kind
from rlhf_mcore.config.schema import Config
from rlhf_mcore.platform import Platform
from rlhf_mcore.trainer.record import RunRecord
from rlhf_mcore.trainer.run_state import Start
from rlhf_mcore.types import Prompt

if TYPE_CHECKING:
    from rlhf_mcore.data.examples import TokenizedExample

T = TypeVar("T", "Prompt", "TokenizedExample")


@dataclass(frozen=True, slots=True)
class RunContext:
    """A resolved configuration with its process, its record and its start.

    ``stack`` closes what the run has started, when it ends.
    """

    cfg: Config
    platform: Platform
    record: RunRecord
    start: Start
    requests: SignalRequests
    stack: ExitStack

    @property
    def kind(self) -> RunKind:
        return run_kind(self.cfg)

    @property
    def dtype(self) -> str:
        """Return the dtype of models that do not have their own: fp32, bf16 or fp16."""
        return self.platform.dtype(self.cfg.model.dtype)

    @property
    def directory(self) -> Path:
        return Path(self.cfg.output_dir).resolve() / self.cfg.project / self.cfg.experiment


@dataclass(frozen=True, slots=True)
class Data(Generic[T]):
    """Prompts or examples to learn from, and others to evaluate on."""

    tokenizer: PreTrainedTokenizerBase
    train: list[T]
    held_out: list[T]

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        """Decode texts of responses without special tokens."""
        return self.tokenizer.batch_decode(responses, skip_special_tokens=True)
