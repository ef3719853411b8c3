"""Who may read what a checkpoint holds (``checkpoint.mode``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlhf_mcore.checkpoint.layout import MANIFEST
from rlhf_mcore.config.checkpoint_rules import PRIVATE, octal_mode

OWNER_FILE, OWNER_FOLDER = 0o600, 0o700


@dataclass(frozen=True, slots=True)
class Permissions:
    """``setting``: null leaves everything to the umask; an octal mode is that of every file; ``private`` gives optimizer state, run
    state and configuration to the owner alone, and leaves the models and the manifest to the umask."""

    setting: str | None = None

    def of(self, name: str) -> int | None:
        """The mode of a file by its path in a checkpoint, None: what the umask leaves."""
        if self.setting is None:
            return None
        if self.setting != PRIVATE:
            return octal_mode(self.setting)
        is_of_model = name.count("/") == 1  # actor/model.safetensors, not actor/training/ or trainer_state.json
        return None if is_of_model or name == MANIFEST else OWNER_FILE

    def begin(self, partial: Path) -> None:
        """Nobody else looks into a checkpoint that is being written."""
        if self.setting is not None:
            partial.chmod(OWNER_FOLDER)

    def grant(self, partial: Path, files: Iterable[Path]) -> None:
        """Set the modes of files that were written."""
        for file in files:
            mode = self.of(file.relative_to(partial).as_posix())
            if mode is not None:
                file.chmod(mode)

    def finish(self, partial: Path) -> None:
        """Set the modes of the manifest and of all directories, of the checkpoint itself last."""
        if self.setting is None:
            return
        self.grant(partial, [partial / MANIFEST])
        for folder, _, files in os.walk(partial, topdown=False):
            modes = [self.of((Path(folder, file)).relative_to(partial).as_posix()) for file in files]
            known = [mode for mode in modes if mode is not None]
            if len(known) == len(modes) and modes:
                mode = max(known)
                Path(folder).chmod(mode | (mode & 0o444) >> 2)  # who may read files may enter their folder
            elif Path(folder) == partial:
                partial.chmod(partial.parent.stat().st_mode & 0o777)  # as open as the run is
