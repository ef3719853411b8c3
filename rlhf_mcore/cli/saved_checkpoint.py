"""Judge a checkpoint whose files are intact: a run must be able to have saved it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_mcore.bridge.files.saved_model import check_saved_model
from rlhf_mcore.checkpoint.layout import TRAINING
from rlhf_mcore.checkpoint.saved_rng import check_states
from rlhf_mcore.config.errors import ConfigError

UNTRAINED = ("reference", "teacher")  # models in a checkpoint that have no optimizer


def check_saved(checkpoint: Path, weights: Mapping[str, Path], *, values: bool = True, base: str | None = None) -> None:
    """Read models, optimizers and random generators as a run that resumes does, by one process, before anything is built.

    Args:
        checkpoint: its files are those of its manifest.
        weights: by model the Hugging Face directory with its weights.
        values: false: names, shapes and places only.
        base: the adapters' model, where the one that they name is not here.

    Raises:
        ConfigError: a file holds what no run can have saved; the message names file and tensor.
    """
    check_states(checkpoint)
    for model, directory in weights.items():
        training = checkpoint / model / TRAINING
        if model not in UNTRAINED and not training.is_dir():
            raise ConfigError(f"{training} is missing: the state of the optimizer; choose another checkpoint")
        check_saved_model(directory, training if training.is_dir() else None, values=values, base=base)
