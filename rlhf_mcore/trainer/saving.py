"""When the actor is written, and which one is the latest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class ModelSaver:
    """Writes ``checkpoint-<step>/<role>`` as Hugging Face directories every ``every`` steps (0: never) and after the last one.

    Each of ``writers`` is collective and leaves its directory whole or not at all.
    """

    writers: Mapping[str, Callable[[Path], None]]
    run_directory: Path
    every: int
    num_steps: int

    def after_step(self, step: int) -> None:
        """Save if it is due. Collective."""
        if step != self.num_steps and not (self.every and step % self.every == 0):
            return
        name = f"checkpoint-{step}"
        if dist.get_rank() == 0:
            (self.run_directory / name).mkdir(parents=True, exist_ok=True)
        for role, write in self.writers.items():
            write(self.run_directory / name / role)
        if dist.get_rank() == 0:
            _point(self.run_directory / "latest", name)


def _point(link: Path, target: str) -> None:
    """Move a link to ``target`` in one step: a reader sees the old or the new one, never none."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
